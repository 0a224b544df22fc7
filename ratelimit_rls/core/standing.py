"""How a caller stands: which limits are its own at this moment, until when, and whether it may call at all.

A rule with `limits_of: user` asks for the standing of the user whose descriptor it meets. What a plan was made from is
kept beside it (Validity), so that no plan outlives it: a change marks the standings it touches as stale, and whoever
kept a plan made from one makes it anew. Nothing is searched for, and nothing else is forgotten.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from ratelimit_rls.core.accounts import Block
from ratelimit_rls.core.model import Descriptor, Limit, Purpose, Refusal, Request, Subject

BLOCKED = "this caller is blocked"
"""The reason is for administrators: it is in the record of the block, and not in answers."""


class Standing:
    """Of one subject. Shared by every plan that was made from it."""

    __slots__ = ("__weakref__", "block", "limits", "source", "stale", "until_s")

    def __init__(
        self,
        limits: tuple[Limit, ...] | None = None,
        source: str = "",
        block: Block | None = None,
        until_s: float = inf,
    ) -> None:
        self.limits = limits  # None: none of its own, so that the rule's hold
        self.source = source  # "override", "custom", "tier gold", "" where the rule's hold
        self.block = block  # then nothing passes; what cannot be refused is counted by the limits
        self.until_s = until_s  # when an override or a block ends: what is true after that is another standing
        self.stale = False


class Standings(Protocol):
    def of(self, kind: Subject, subject: str, tier: str) -> Standing:
        """Never raises, and waits for nothing. `tier` is what the request itself says, for those nobody knows."""
        ...


def refusal_of(block: Block, status: int, slot: int = 0) -> Refusal:
    """`slot` is the descriptor that names whoever is blocked."""
    return Refusal("blocked", BLOCKED, status, block.until_s, slot)


def can_be_refused(request: Request, descriptor: Descriptor) -> bool:
    """What has happened, and what is given back, is counted whoever it is."""
    return request.purpose is not Purpose.REPORT and not descriptor.is_refund


class Validity:
    """For how long a plan holds that was made from standings."""

    __slots__ = ("_standings", "_until_s")

    def __init__(self, standings: tuple[Standing, ...]) -> None:
        self._standings = standings
        self._until_s = min(standing.until_s for standing in standings)

    def holds(self, now_s: float) -> bool:
        if now_s >= self._until_s:
            return False
        for standing in self._standings:  # noqa: SIM110, few: a loop costs half of all()
            if standing.stale:
                return False
        return True
