"""What stands between a transport and the meaning of its messages: a batch of bytes in, what to do with each call out.

A transport knows calls and deadlines and nothing of messages; a door knows messages and nothing of calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import NamedTuple, Protocol

from ratelimit_rls.telemetry.traces import TracedBatch


class FailureCode(IntEnum):
    """The gRPC status codes that a call can fail with here."""

    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
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


class Asked(Protocol):
    """A batch that was read and is on its way. Each of its calls is answered once: by `due`, or else by `answers`."""

    @property
    def due_s(self) -> float:
        """When `due` will have something to say, on the monotonic clock. Negative: it has already; inf: never."""
        ...

    def due(self, now_s: float) -> Sequence[tuple[int, bytes | Failure]]:
        """Answers to those, by their number in the batch, who cannot or need not wait any longer."""
        ...

    async def answers(self) -> Sequence[Answered | None]:
        """What to do with each call, in order; None: `due` has answered it. Never raises. To be called once."""
        ...


class Door(Protocol):
    def ask(
        self,
        messages: Sequence[bytes],
        deadlines_s: Sequence[float],
        request_ids: Sequence[bytes | None] | None = None,
        traced: TracedBatch | None = None,
    ) -> Asked:
        """Read a batch. Never raises. Nothing is asked of anybody before `answers` is awaited.

        `deadlines_s` are the callers', on the monotonic clock, inf where there is none. `request_ids` are what callers
        sent along as the ids of their calls. `traced` has the spans that are told what was decided.
        """
        ...
