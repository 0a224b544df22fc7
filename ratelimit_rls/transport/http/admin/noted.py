"""What is recorded of counters that were forgotten, whichever way an administrator asked for it."""

from __future__ import annotations

from ratelimit_rls.core.model import Descriptor, Request
from ratelimit_rls.errors import one_line
from ratelimit_rls.records.desk import Change

LONGEST_WORDS = 1000
"""Of a descriptor."""


async def note_reset(change: Change, request: Request, forgotten: int) -> None:
    """`request` names callers, and carries no credential."""
    descriptors = [_words(descriptor) for descriptor in request.descriptors]
    await change.note("reset", "counters", request.domain, {"descriptors": descriptors, "forgotten": forgotten})


def _words(descriptor: Descriptor) -> str:
    return one_line(",".join(f"{key}={value}" for key, value in descriptor.entries)[:LONGEST_WORDS])
