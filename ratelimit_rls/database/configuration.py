"""Everything that administrators configure and the database stores: accounts and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ratelimit_rls.identity.accounts import AccountChanges, Accounts
from ratelimit_rls.rules.stored_rule import StoredRule


@dataclass(frozen=True, slots=True)
class Configuration(Accounts):
    """All accounts and stored rules, as of one position in the change feed."""

    rules: tuple[StoredRule, ...] = ()
    at_s: float = 0.0  # time of that change: in a restored database another change may have the same number


@dataclass(frozen=True, slots=True)
class ConfigurationChanges(AccountChanges):
    """Changes since an earlier position in the change feed. None as a value: deleted."""

    rules: Mapping[str, StoredRule | None] = field(default_factory=dict)  # by rule_id
    at_s: float = 0.0  # as in Configuration

    def __bool__(self) -> bool:
        return bool(self.tiers or self.users or self.keys or self.rules)
