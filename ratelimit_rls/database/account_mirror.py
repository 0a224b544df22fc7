"""An in-memory copy of all accounts, updated with each change. The snapshot file is written from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ratelimit_rls.database.configuration import Configuration, ConfigurationChanges

T = TypeVar("T")


class AccountMirror:
    """All accounts by name."""

    def __init__(self, accounts: Configuration) -> None:
        """Index the accounts. Takes tens of milliseconds for a hundred thousand users; may run in any thread."""
        self._sequence, self._at_s = accounts.sequence, accounts.at_s
        self._tiers = {tier.name: tier for tier in accounts.tiers}
        self._users = {user.user_id: user for user in accounts.users}
        self._keys = {key.key_id: key for key in accounts.keys}
        self._rules = {rule.rule_id: rule for rule in accounts.rules}

    def apply(self, changed: ConfigurationChanges) -> None:
        self._sequence, self._at_s = changed.sequence, changed.at_s
        _update(self._tiers, changed.tiers)
        _update(self._users, changed.users)
        _update(self._keys, changed.keys)
        _update(self._rules, changed.rules)

    def accounts(self) -> Configuration:
        """Return the current accounts; later changes do not affect the result."""
        rules = sorted(self._rules.values(), key=lambda rule: (rule.priority, rule.name))
        tiers, users, keys = tuple(self._tiers.values()), tuple(self._users.values()), tuple(self._keys.values())
        return Configuration(self._sequence, tiers, users, keys, tuple(rules), self._at_s)


def _update(mirrored: dict[str, T], changed: Mapping[str, T | None]) -> None:
    for name, value in changed.items():
        if value is None:
            mirrored.pop(name, None)
        else:
            mirrored[name] = value
