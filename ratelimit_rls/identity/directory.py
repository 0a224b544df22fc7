"""All tiers, users and API keys, in memory: how every caller stands is known without asking anybody.

Held whole and not in a cache, so that an unknown key costs one look, a database that is away changes nothing, and there
is no first call that has to wait. Used by one thread, that of the event loop.

    load, apply ─► tiers, users, keys ─► of ─► Standing, kept weakly ─► marked stale by the change that touches it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

from ratelimit_rls.core.accounts import Accounts, ApiKey, Block, Changed, Tier, User
from ratelimit_rls.core.model import Limit, Subject
from ratelimit_rls.core.standing import Standing
from ratelimit_rls.identity import order
from ratelimit_rls.identity.order import Candidate, NamedTier

_UNKNOWN = "\0"
"""In place of a tier that is named in requests alone: whoever invents names must not make standings."""

NOBODY = Accounts()

_Limits = tuple[Limit, ...]
_Key = tuple[Subject, str, str]


class Sizes(NamedTuple):
    tiers: int
    users: int
    keys: int
    standings: int  # in use at this moment


class Effective(NamedTuple):
    """A user's limits at one moment, and where they come from."""

    limits: _Limits | None  # None: those that the rules say
    source: str  # as in Standing
    until_s: float
    block: Block | None
    considered: tuple[Candidate, ...]  # in order, each but the one that won with the reason why it did not


class _Held(Standing):
    __slots__ = ("tier",)

    def __init__(self, candidate: Candidate, tier: str) -> None:
        super().__init__(candidate.limits, candidate.source, candidate.block, candidate.until_s)
        self.tier = tier  # that was asked for a word; "": none was


class Index:
    """All accounts, by what they are called. Making it takes a fifth of a second for 100,000 users, and any thread."""

    def __init__(self, accounts: Accounts = NOBODY) -> None:
        self.sequence = accounts.sequence
        self._limits: dict[_Limits, _Limits] = {}  # custom ones that were loaded: equal ones are one object
        self.tiers = {tier.name: tier for tier in accounts.tiers}
        self.users = {user.user_id: user for user in self._compact(accounts.users)}
        self.blocks = {user.user_id: user.block for user in accounts.users if user.block is not None}
        self.keys = {key.key_id: key for key in accounts.keys}
        keys_of: dict[str, list[str]] = {}
        for key in accounts.keys:
            keys_of.setdefault(key.user_id, []).append(key.key_id)
        self.keys_of = {user_id: tuple(key_ids) for user_id, key_ids in keys_of.items()}

    def put_user(self, user_id: str, user: User | None) -> None:
        """None: there is none of that name any more."""
        self.blocks.pop(user_id, None)
        if user is None:
            self.users.pop(user_id, None)
            return
        self.users[user_id] = self._shared(user)
        if user.block is not None:
            self.blocks[user_id] = user.block

    def _shared(self, user: User) -> User:
        """The same user, with limits that others may have, too."""
        limits = self._limits.get(user.limits)
        return user if limits is None or limits is user.limits else replace(user, limits=limits)

    def _compact(self, users: Iterable[User]) -> Iterator[User]:
        """Most of those with custom limits have one of a few sets of them, each then held once.

        Comparing limits takes longer than all the rest, so what is the same object already is not compared.
        """
        known: dict[int, _Limits] = {}  # by identity, which lasts as long as what is loaded
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
    """core.standing.Standings, and who is behind an id."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._index = Index()
        self._standings: WeakValueDictionary[_Key, _Held] = WeakValueDictionary()
        self.version = 0  # another after every change: what was worked out under it does not hold any more

    @property
    def sequence(self) -> int:
        return self._index.sequence

    @property
    def sizes(self) -> Sizes:
        return Sizes(len(self._index.tiers), len(self._index.users), len(self._index.keys), len(self._standings))

    def load(self, accounts: Accounts | Index) -> None:
        """Everything anew, in place of what was there."""
        self.version += 1
        self._index = accounts if isinstance(accounts, Index) else Index(accounts)
        self._forget(list(self._standings.items()))

    def apply(self, changed: Changed) -> None:
        """What is different. When this returns, no standing that it touches is believed any more."""
        self.version += 1
        for name, tier in changed.tiers.items():
            self._apply_tier(name, tier)
        for key_id, key in changed.keys.items():
            self._apply_key(key_id, key)
        for user_id, user in changed.users.items():
            self._index.put_user(user_id, user)
            self._forget_subject(Subject.USER, user_id)
            for key_id in self._index.keys_of.get(user_id, ()):
                self._forget_subject(Subject.API_KEY, key_id)
        self._index.sequence = changed.sequence

    def of(self, kind: Subject, subject: str, tier: str) -> Standing:
        at = kind, subject, tier if tier in self._index.tiers or not tier else _UNKNOWN
        now_s = self._clock()
        standing = self._standings.get(at)
        if standing is None or now_s >= standing.until_s:
            if standing is not None:
                standing.stale = True
            standing = self._standings[at] = self._new(*at, now_s)
        return standing

    def key(self, key_id: str) -> ApiKey | None:
        return self._index.keys.get(key_id)

    def user(self, user_id: str) -> User | None:
        return self._index.users.get(user_id)

    def block(self, user_id: str) -> Block | None:
        """Whether it has ended or not. Few have one: looking among them costs less than finding the user."""
        return self._index.blocks.get(user_id)

    def tier(self, name: str) -> Tier | None:
        return self._index.tiers.get(name)

    def effective(self, user_id: str, now_s: float) -> Effective:
        """Of somebody nobody knows, too: what holds is then what the rules say."""
        user = self._index.users.get(user_id)
        considered: list[Candidate] = []
        winner: Candidate | None = None
        for candidate in order.of_user(user, self._tier_of(user, None, ""), now_s):
            if winner is None and not candidate.why_not:
                winner = candidate
            elif winner is not None and not candidate.why_not:
                candidate = candidate._replace(why_not=f"{winner.source} comes first")
            considered.append(candidate)
        assert winner is not None  # the rules always have a word
        return Effective(winner.limits, winner.source, winner.until_s, winner.block, tuple(considered))

    def _new(self, kind: Subject, subject: str, tier: str, now_s: float) -> _Held:
        if kind is Subject.USER:
            user, key = self._index.users.get(subject), None
        else:
            key = self._index.keys.get(subject)
            user = self._index.users.get(key.user_id) if key is not None else None
        named = self._tier_of(user, key, tier)
        if kind is Subject.USER:
            winner = order.first(order.of_user(user, named, now_s))
        else:
            winner = order.first(order.of_key(key, user, named, now_s))
        asked_tier = winner.source == order.RULE or winner.source.startswith(order.TIER)
        return _Held(winner, named.name if asked_tier else "")

    def _tier_of(self, user: User | None, key: ApiKey | None, asked: str) -> NamedTier:
        name = (key.tier if key is not None else "") or (user.tier if user is not None else "") or asked
        return NamedTier(name, self._index.tiers.get(name))

    def _apply_tier(self, name: str, tier: Tier | None) -> None:
        """Looks through all standings: a tier changes seldom, and often it is that of most of them."""
        is_new = name not in self._index.tiers
        if tier is None:
            self._index.tiers.pop(name, None)
        else:
            self._index.tiers[name] = tier
        # Those asked for under the name of a tier that goes cannot be found by it afterwards; those asked for under a
        # name that nobody knew may have meant the one that comes.
        self._forget(
            [
                (at, standing)
                for at, standing in self._standings.items()
                if standing.tier == name or at[2] == name or (is_new and standing.tier == _UNKNOWN)
            ]
        )

    def _apply_key(self, key_id: str, key: ApiKey | None) -> None:
        before = self._index.keys.pop(key_id, None)
        if before is not None:
            others = tuple(other for other in self._index.keys_of[before.user_id] if other != key_id)
            if others:
                self._index.keys_of[before.user_id] = others
            else:
                del self._index.keys_of[before.user_id]
        if key is not None:
            self._index.keys[key_id] = key
            self._index.keys_of[key.user_id] = (*self._index.keys_of.get(key.user_id, ()), key_id)
        self._forget_subject(Subject.API_KEY, key_id)

    def _forget_subject(self, kind: Subject, subject: str) -> None:
        ats = ((kind, subject, tier) for tier in ("", _UNKNOWN, *self._index.tiers))
        self._forget([(at, standing) for at in ats if (standing := self._standings.get(at)) is not None])

    def _forget(self, standings: Iterable[tuple[_Key, _Held]]) -> None:
        for at, standing in standings:
            standing.stale = True
            self._standings.pop(at, None)
