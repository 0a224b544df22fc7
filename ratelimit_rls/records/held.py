"""Everything there is, by name, kept up to date by what has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ratelimit_rls.core.accounts import Accounts, Changed

T = TypeVar("T")


class Held:
    def __init__(self, accounts: Accounts) -> None:
        """Of a hundred thousand users this takes tens of milliseconds, in any thread."""
        self._sequence, self._at_s = accounts.sequence, accounts.at_s
        self._tiers = {tier.name: tier for tier in accounts.tiers}
        self._users = {user.user_id: user for user in accounts.users}
        self._keys = {key.key_id: key for key in accounts.keys}
        self._rules = {rule.rule_id: rule for rule in accounts.rules}

    def apply(self, changed: Changed) -> None:
        self._sequence, self._at_s = changed.sequence, changed.at_s
        _update(self._tiers, changed.tiers)
        _update(self._users, changed.users)
        _update(self._keys, changed.keys)
        _update(self._rules, changed.rules)

    def accounts(self) -> Accounts:
        """As of now: what is changed later does not change it."""
        rules = sorted(self._rules.values(), key=lambda rule: (rule.priority, rule.name))
        tiers, users, keys = tuple(self._tiers.values()), tuple(self._users.values()), tuple(self._keys.values())
        return Accounts(self._sequence, tiers, users, keys, tuple(rules), self._at_s)


def _update(held: dict[str, T], changed: Mapping[str, T | None]) -> None:
    for name, value in changed.items():
        if value is None:
            held.pop(name, None)
        else:
            held[name] = value
