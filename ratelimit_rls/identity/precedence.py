"""Precedence of the sources of a subject's limits. The first source with limits wins.

    a user      block ─► override, while it lasts ─► custom limits ─► tier ─► limits of the rule
    an API key  block of its user ─► revoked or expired ─► its own limits ─► tier ─► limits of the rule

The tier of a user is that of its account; the tier of a key is its own, or else its user's. A tier named by the request
applies to subjects without either. Empty limits count as not set: with a tier without limits, those of the rule apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.model import Limit
from ratelimit_rls.identity.accounts import ApiKey, Tier, User

BLOCK, KEY, OVERRIDE, CUSTOM, TIER, RULE = "block", "key", "override", "custom", "tier", ""
"""Sources of limits, as in Entitlement.source. A tier is followed by its name; the rule itself is empty."""

REVOKED = Block("the key was revoked")
EXPIRED = Block("the key has expired")


class Candidate(NamedTuple):
    """One source of limits for a subject, or why it does not apply."""

    source: str
    limits: tuple[Limit, ...] | None = None
    why_not: str = ""  # "": it applies
    block: Block | None = None
    until_s: float = inf  # end of its validity


class NamedTier(NamedTuple):
    """The tier of a subject. `tier` is None if no tier has that name."""

    name: str
    tier: Tier | None


def user_candidates(user: User | None, tier: NamedTier, now_s: float) -> Iterator[Candidate]:
    """Yield the sources of a user's limits, in order of precedence. The last one always applies."""
    yield _block(user, now_s)
    override = user.override if user is not None else None
    if override is None:
        yield Candidate(OVERRIDE, why_not="not set")
    elif now_s >= override.until_s:
        yield Candidate(OVERRIDE, override.limits, "it has ended")
    else:
        yield _limits(OVERRIDE, override.limits, override.until_s)
    yield _limits(CUSTOM, user.limits if user is not None else ())
    yield _tier(tier)
    yield Candidate(RULE)


def key_candidates(key: ApiKey | None, user: User | None, tier: NamedTier, now_s: float) -> Iterator[Candidate]:
    """Yield the sources of an API key's limits, in order of precedence. The last one always applies."""
    yield _block(user, now_s)
    end_s = inf
    if key is not None:
        end_s = key_end_s(key)
        if now_s >= end_s:
            yield Candidate(KEY, block=EXPIRED if key.revoked_s is None else REVOKED)
            end_s = inf
        yield _limits(CUSTOM, key.limits, end_s)
    yield _tier(tier)._replace(until_s=end_s)
    yield Candidate(RULE, until_s=end_s)


def key_end_s(key: ApiKey) -> float:
    """Return the time from which the key is expired or revoked; infinity if never."""
    return min(inf if key.expires_s is None else key.expires_s, inf if key.revoked_s is None else key.revoked_s)


def winning_candidate(candidates: Iterator[Candidate]) -> Candidate:
    """Return the candidate that applies. A block keeps the limits below it: they count what cannot be rejected."""
    applicable = (candidate for candidate in candidates if not candidate.why_not)
    winner = next(applicable)
    if winner.block is None:
        return winner
    limits = next(candidate for candidate in applicable if candidate.block is None)
    return limits._replace(block=winner.block, until_s=min(winner.until_s, limits.until_s))


def _block(user: User | None, now_s: float) -> Candidate:
    block = user.block if user is not None else None
    if block is None:
        return Candidate(BLOCK, why_not="not set")
    until_s = inf if block.until_s is None else block.until_s
    return Candidate(BLOCK, why_not="it has ended" if now_s >= until_s else "", block=block, until_s=until_s)


def _limits(source: str, limits: tuple[Limit, ...], until_s: float = inf) -> Candidate:
    return Candidate(source, limits, until_s=until_s) if limits else Candidate(source, why_not="no limits are set")


def _tier(named: NamedTier) -> Candidate:
    if not named.name:
        return Candidate(TIER, why_not="not set")
    source = f"{TIER} {named.name}"
    if named.tier is None:
        return Candidate(source, why_not="there is no tier of that name")
    return _limits(source, named.tier.limits)
