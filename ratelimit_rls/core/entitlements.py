"""Entitlements: the limits of a subject at the current time, how long they apply, and whether the subject is blocked.

A rule with `limits_of: user` looks up the entitlement of the user named by the matching descriptor. Each plan keeps the
entitlements it was made from (EntitlementValidity), so that no plan outlives them: a change marks the affected
entitlements as stale, and a cached plan made from one is replanned. The change of a user needs
no search; that of a tier scans the entitlements in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ratelimit_rls.core.model import Descriptor, Limit, Purpose, Rejection, Request, Subject

BLOCKED = "this caller is blocked"
"""Message for blocked clients. The reason of a block is for administrators: it is stored, but not in responses."""


@dataclass(frozen=True, slots=True)
class Block:
    """Block of a user: all calls are rejected."""

    reason: str = ""
    until_s: float | None = None  # None: until it is removed


class Entitlement(Protocol):
    """Limits and block of one subject. Shared by all plans that were made from it."""

    @property
    def limits(self) -> tuple[Limit, ...] | None:
        """None: the rule's limits apply."""
        ...

    @property
    def source(self) -> str:
        """ "override", "custom" or "tier gold"; "" if the rule's limits apply."""
        ...

    @property
    def block(self) -> Block | None:
        """The block of the subject, if any: calls are rejected. What cannot be rejected counts towards the limits."""
        ...

    @property
    def until_s(self) -> float:
        """The end of an override or a block: another entitlement applies afterwards."""
        ...

    @property
    def stale(self) -> bool:
        """Return True if another entitlement applies already, because the account was changed."""
        ...


class Entitlements(Protocol):
    def of(self, kind: Subject, subject: str, tier: str) -> Entitlement:
        """Return the entitlement of a subject. Never raises and never blocks.

        `tier` is the tier named by the request, which applies to unknown subjects.
        """
        ...


def block_rejection(block: Block, status: int, descriptor_index: int = 0) -> Rejection:
    """Return the rejection for a block. `descriptor_index` is that of the descriptor with the blocked subject."""
    return Rejection("blocked", BLOCKED, status, block.until_s, descriptor_index)


def can_be_rejected(request: Request, descriptor: Descriptor) -> bool:
    """Return False for reports and refunds: they are counted even for blocked subjects."""
    return request.purpose is not Purpose.REPORT and not descriptor.is_refund


class EntitlementValidity:
    """A plan is valid until one of its entitlements ends or becomes stale."""

    __slots__ = ("_entitlements", "_until_s")

    def __init__(self, entitlements: tuple[Entitlement, ...]) -> None:
        self._entitlements = entitlements
        self._until_s = min(entitlement.until_s for entitlement in entitlements)

    def holds(self, now_s: float) -> bool:
        if now_s >= self._until_s:
            return False
        for entitlement in self._entitlements:  # noqa: SIM110, there are few: a loop costs half of all()
            if entitlement.stale:
                return False
        return True
