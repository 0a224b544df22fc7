"""Whose word counts: the one order in which a caller's limits are looked for. The first that has something to say wins.

    a user      block ─► override, while it lasts ─► custom limits ─► tier ─► what the rule itself says
    an API key  block of its user ─► revoked or expired ─► its own limits ─► tier ─► what the rule itself says

A user's tier is that of its record, a key's is its own or else its user's; the tier that a request names is for those
who have neither. Where limits are to be written and none are, nothing was said: a tier without limits leaves them to
the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from ratelimit_rls.core.accounts import ApiKey, Block, Tier, User
from ratelimit_rls.core.model import Limit

BLOCK, KEY, OVERRIDE, CUSTOM, TIER, RULE = "block", "key", "override", "custom", "tier", ""
"""Sources, as Standing has them. That of a tier is followed by its name; of what the rule says there is none."""

REVOKED = Block("the key was revoked")
EXPIRED = Block("the key has expired")


class Candidate(NamedTuple):
    """What one of those who may speak says of a caller, or why it is not heard."""

    source: str
    limits: tuple[Limit, ...] | None = None
    why_not: str = ""  # "": it may be heard
    block: Block | None = None
    until_s: float = inf  # what it says is true for so long


class NamedTier(NamedTuple):
    """The tier that counts for a caller; `tier` is None where there is none of that name."""

    name: str
    tier: Tier | None


def of_user(user: User | None, tier: NamedTier, now_s: float) -> Iterator[Candidate]:
    """Everyone who may speak of a user's limits, in order; the last one always does."""
    yield _block(user, now_s)
    override = user.override if user is not None else None
    if override is None:
        yield Candidate(OVERRIDE, why_not="there is none")
    elif now_s >= override.until_s:
        yield Candidate(OVERRIDE, override.limits, "it has ended")
    else:
        yield _limits(OVERRIDE, override.limits, override.until_s)
    yield _limits(CUSTOM, user.limits if user is not None else ())
    yield _tier(tier)
    yield Candidate(RULE)


def of_key(key: ApiKey | None, user: User | None, tier: NamedTier, now_s: float) -> Iterator[Candidate]:
    """The same of an API key."""
    yield _block(user, now_s)
    end_s = inf
    if key is not None:
        end_s = ends_s(key)
        if now_s >= end_s:
            yield Candidate(KEY, block=EXPIRED if key.revoked_s is None else REVOKED)
            end_s = inf
        yield _limits(CUSTOM, key.limits, end_s)
    yield _tier(tier)._replace(until_s=end_s)
    yield Candidate(RULE, until_s=end_s)


def ends_s(key: ApiKey) -> float:
    """From when on the key is good for nothing."""
    return min(inf if key.expires_s is None else key.expires_s, inf if key.revoked_s is None else key.revoked_s)


def first(candidates: Iterator[Candidate]) -> Candidate:
    """The one that counts. Whoever is blocked has limits all the same: by them is counted what cannot be refused."""
    heard = (candidate for candidate in candidates if not candidate.why_not)
    winner = next(heard)
    if winner.block is None:
        return winner
    limits = next(candidate for candidate in heard if candidate.block is None)
    return limits._replace(block=winner.block, until_s=min(winner.until_s, limits.until_s))


def _block(user: User | None, now_s: float) -> Candidate:
    block = user.block if user is not None else None
    if block is None:
        return Candidate(BLOCK, why_not="there is none")
    until_s = inf if block.until_s is None else block.until_s
    return Candidate(BLOCK, why_not="it has ended" if now_s >= until_s else "", block=block, until_s=until_s)


def _limits(source: str, limits: tuple[Limit, ...], until_s: float = inf) -> Candidate:
    return Candidate(source, limits, until_s=until_s) if limits else Candidate(source, why_not="there are none")


def _tier(named: NamedTier) -> Candidate:
    if not named.name:
        return Candidate(TIER, why_not="there is none")
    source = f"{TIER} {named.name}"
    if named.tier is None:
        return Candidate(source, why_not="there is no tier of that name")
    return _limits(source, named.tier.limits)
