"""What stands between a transport and the meaning of its messages: a batch of bytes in, what to do with each call out.

A transport knows calls and deadlines and nothing of messages; a door knows messages and nothing of calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import NamedTuple, Protocol


class FailureCode(IntEnum):
    """The gRPC status codes that a call can fail with here."""

    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no answer."""

    code: FailureCode
    message: str


class Held(NamedTuple):
    """An answer that is ready but must not be given yet (`action: throttle`)."""

    answer: bytes
    wait_s: float  # from now
    queue: Hashable  # calls of one queue are answered in turn, and the slot of one is good for any other
    give_back: Callable[[], Awaitable[None]]  # for a caller that leaves before: its slot is somebody else's
    latest_s: float = inf  # from now: the caller waits no longer than this, whatever its turn


Answered = bytes | Failure | Held


class Door(Protocol):
    async def answer(self, messages: Sequence[bytes], time_left_s: Sequence[float | None]) -> list[Answered]:
        """What to do with each call, in order. Never raises.

        `time_left_s` is until the caller's deadline, None where it has none.
        """
        ...
