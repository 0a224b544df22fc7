"""In-memory directory of all tiers, users and API keys. Entitlements are resolved without I/O.

It holds everything instead of caching, so that an unknown key costs one lookup, an unavailable database has no effect,
and no first call has to wait. Not thread-safe: used by the event loop only.

    load, apply ─► tiers, users, keys ─► of ─► Entitlement (weak reference) ─► marked stale by a change that affects it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple
from weakref import WeakValueDictionary

from ratelimit_rls.core.entitlements import Block, Entitlement
from ratelimit_rls.core.model import Limit, Subject
from ratelimit_rls.identity import precedence
from ratelimit_rls.identity.accounts import AccountChanges, Accounts, ApiKey, Tier, User
from ratelimit_rls.identity.precedence import Candidate, NamedTier

_UNKNOWN_TIER = "\0"
"""Replaces tier names that occur in requests only, so that invented names do not create entitlements."""

NO_ACCOUNTS = Accounts()

_Limits = tuple[Limit, ...]
_Key = tuple[Subject, str, str]


class DirectorySizes(NamedTuple):
    tiers: int
    users: int
    keys: int
    entitlements: int  # those in use; the names of the fields are values of a metric attribute


class EffectiveLimits(NamedTuple):
    """Limits of a user at one time, and where they come from."""

    limits: _Limits | None  # None: the limits of the rules
    source: str  # as in Entitlement
    until_s: float
    block: Block | None
    considered: tuple[Candidate, ...]  # in order of precedence; all but the winner have a reason


class SubjectEntitlement:
    """Entitlement of a subject, which becomes stale when a change affects it."""

    __slots__ = ("__weakref__", "block", "limits", "source", "stale", "tier", "until_s")

    def __init__(
        self,
        limits: tuple[Limit, ...] | None = None,
        source: str = "",
        block: Block | None = None,
        until_s: float = inf,
        tier: str = "",
    ) -> None:
        self.limits = limits
        self.source = source
        self.block = block
        self.until_s = until_s
        self.tier = tier  # name of the tier that was considered; "": none
        self.stale = False


class AccountIndex:
    """All accounts, indexed by name. Building it takes 0.2 s for 100,000 users and is possible in any thread."""

    def __init__(self, accounts: Accounts = NO_ACCOUNTS) -> None:
        self.sequence = accounts.sequence
        self._limits: dict[_Limits, _Limits] = {}  # custom limits, interned: equal ones are one object
        self.tiers = {tier.name: tier for tier in accounts.tiers}
        self.users = {user.user_id: user for user in self._intern_limits(accounts.users)}
        self.blocks = {user.user_id: user.block for user in accounts.users if user.block is not None}
        self.keys = {key.key_id: key for key in accounts.keys}
        keys_of: dict[str, list[str]] = {}
        for key in accounts.keys:
            keys_of.setdefault(key.user_id, []).append(key.key_id)
        self.keys_of = {user_id: tuple(key_ids) for user_id, key_ids in keys_of.items()}

    def put_user(self, user_id: str, user: User | None) -> None:
        """Add, replace or (None) remove a user."""
        self.blocks.pop(user_id, None)
        if user is None:
            self.users.pop(user_id, None)
            return
        self.users[user_id] = self._with_interned_limits(user)
        if user.block is not None:
            self.blocks[user_id] = user.block

    def _with_interned_limits(self, user: User) -> User:
        """Return the user with interned limits, if equal ones exist."""
        limits = self._limits.get(user.limits)
        return user if limits is None or limits is user.limits else replace(user, limits=limits)

    def _intern_limits(self, users: Iterable[User]) -> Iterator[User]:
        """Yield the users with interned limits: most custom limits are one of a few sets.

        Comparing limits dominates the cost, so limits that are already the same object are not compared.
        """
        known: dict[int, _Limits] = {}  # by id(), which is stable while `users` exists
        for user in users:
            limits = user.limits
            if not limits:
                yield user
                continue
            shared = known.get(id(limits))
            if shared is None:
                shared = known[id(limits)] = self._limits.setdefault(limits, limits)
            yield user if shared is limits else replace(user, limits=shared)


class Directory:
    """Implements core.entitlements.Entitlements, and looks up users, keys and tiers by id."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._index = AccountIndex()
        self._entitlements: WeakValueDictionary[_Key, SubjectEntitlement] = WeakValueDictionary()
        # Subjects without an account share one, since a client can name any number of them. Where accounts are few, so
        # are new ones, each of which makes it stale.
        self._without_account: dict[Subject, SubjectEntitlement] = {}
        self.version = 0  # incremented by every change, which invalidates everything derived earlier

    @property
    def sequence(self) -> int:
        return self._index.sequence

    @property
    def sizes(self) -> DirectorySizes:
        return DirectorySizes(
            len(self._index.tiers), len(self._index.users), len(self._index.keys), len(self._entitlements)
        )

    def load(self, accounts: Accounts | AccountIndex) -> None:
        """Replace all accounts."""
        self.version += 1
        self._index = accounts if isinstance(accounts, AccountIndex) else AccountIndex(accounts)
        self._invalidate(list(self._entitlements.items()))
        for kind in Subject:
            self._invalidate_without_account(kind)

    def apply(self, changed: AccountChanges) -> None:
        """Apply changes. When this returns, all affected entitlements are stale."""
        self.version += 1
        for name, tier in changed.tiers.items():
            self._apply_tier(name, tier)
        for key_id, key in changed.keys.items():
            self._apply_key(key_id, key)
        for user_id, user in changed.users.items():
            if user_id not in self._index.users:
                self._invalidate_without_account(Subject.USER)
            self._index.put_user(user_id, user)
            self._invalidate_subject(Subject.USER, user_id)
            for key_id in self._index.keys_of.get(user_id, ()):
                self._invalidate_subject(Subject.API_KEY, key_id)
        self._index.sequence = changed.sequence

    def of(self, kind: Subject, subject: str, tier: str) -> Entitlement:
        accounts = self._index.users if kind is Subject.USER else self._index.keys
        if not tier and subject not in accounts:
            entitlement = self._without_account.get(kind)
            if entitlement is None:
                entitlement = self._without_account[kind] = self._resolve(kind, subject, tier, self._clock())
            return entitlement
        cache_key = kind, subject, tier if tier in self._index.tiers or not tier else _UNKNOWN_TIER
        now_s = self._clock()
        entitlement = self._entitlements.get(cache_key)
        if entitlement is None or now_s >= entitlement.until_s:
            if entitlement is not None:
                entitlement.stale = True
            entitlement = self._entitlements[cache_key] = self._resolve(*cache_key, now_s)
        return entitlement

    def key(self, key_id: str) -> ApiKey | None:
        return self._index.keys.get(key_id)

    def user(self, user_id: str) -> User | None:
        return self._index.users.get(user_id)

    def block(self, user_id: str) -> Block | None:
        """Return the block of a user, even if it has ended. Few users have one, so this is faster than `user`."""
        return self._index.blocks.get(user_id)

    def tier(self, name: str) -> Tier | None:
        return self._index.tiers.get(name)

    def effective(self, user_id: str, now_s: float) -> EffectiveLimits:
        """Return the limits of a user. Also works for unknown users: the limits of the rules apply."""
        user = self._index.users.get(user_id)
        considered: list[Candidate] = []
        winner: Candidate | None = None
        for candidate in precedence.user_candidates(user, self._tier_of(user, None, ""), now_s):
            if winner is None and not candidate.why_not:
                winner = candidate
            elif winner is not None and not candidate.why_not:
                candidate = candidate._replace(why_not=f"{winner.source} takes precedence")
            considered.append(candidate)
        assert winner is not None  # the rule itself is always a candidate
        return EffectiveLimits(winner.limits, winner.source, winner.until_s, winner.block, tuple(considered))

    def _resolve(self, kind: Subject, subject: str, tier: str, now_s: float) -> SubjectEntitlement:
        if kind is Subject.USER:
            user, key = self._index.users.get(subject), None
        else:
            key = self._index.keys.get(subject)
            user = self._index.users.get(key.user_id) if key is not None else None
        named = self._tier_of(user, key, tier)
        if kind is Subject.USER:
            winner = precedence.winning_candidate(precedence.user_candidates(user, named, now_s))
        else:
            winner = precedence.winning_candidate(precedence.key_candidates(key, user, named, now_s))
        uses_tier = winner.source == precedence.RULE or winner.source.startswith(precedence.TIER)
        return SubjectEntitlement(
            winner.limits, winner.source, winner.block, winner.until_s, named.name if uses_tier else ""
        )

    def _tier_of(self, user: User | None, key: ApiKey | None, requested: str) -> NamedTier:
        name = (key.tier if key is not None else "") or (user.tier if user is not None else "") or requested
        return NamedTier(name, self._index.tiers.get(name))

    def _apply_tier(self, name: str, tier: Tier | None) -> None:
        """Apply a change of a tier. Scans all entitlements: tiers change rarely, and most entitlements may use it."""
        is_new = name not in self._index.tiers
        if tier is None:
            self._index.tiers.pop(name, None)
        else:
            self._index.tiers[name] = tier
        # Entitlements looked up by the name of a removed tier cannot be found by it afterwards, and those looked up by
        # an unknown name may have meant the new tier.
        self._invalidate(
            [
                (cache_key, entitlement)
                for cache_key, entitlement in self._entitlements.items()
                if entitlement.tier == name or cache_key[2] == name or (is_new and entitlement.tier == _UNKNOWN_TIER)
            ]
        )

    def _apply_key(self, key_id: str, key: ApiKey | None) -> None:
        before = self._index.keys.pop(key_id, None)
        if before is None:
            self._invalidate_without_account(Subject.API_KEY)
        else:
            others = tuple(other for other in self._index.keys_of[before.user_id] if other != key_id)
            if others:
                self._index.keys_of[before.user_id] = others
            else:
                del self._index.keys_of[before.user_id]
        if key is not None:
            self._index.keys[key_id] = key
            self._index.keys_of[key.user_id] = (*self._index.keys_of.get(key.user_id, ()), key_id)
        self._invalidate_subject(Subject.API_KEY, key_id)

    def _invalidate_subject(self, kind: Subject, subject: str) -> None:
        cache_keys = ((kind, subject, tier) for tier in ("", _UNKNOWN_TIER, *self._index.tiers))
        self._invalidate(
            [
                (cache_key, entitlement)
                for cache_key in cache_keys
                if (entitlement := self._entitlements.get(cache_key)) is not None
            ]
        )

    def _invalidate_without_account(self, kind: Subject) -> None:
        entitlement = self._without_account.pop(kind, None)
        if entitlement is not None:
            entitlement.stale = True

    def _invalidate(self, entitlements: Iterable[tuple[_Key, SubjectEntitlement]]) -> None:
        for cache_key, entitlement in entitlements:
            entitlement.stale = True
            self._entitlements.pop(cache_key, None)
