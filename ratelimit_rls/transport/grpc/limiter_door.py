"""A door behind which the rate limiter decides: all that does not depend on how its messages are written.

Every fault becomes a status here and nowhere else, and the trouble of one call is never another's.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Generic, TypeVar

from ratelimit_rls.core.model import Decision
from ratelimit_rls.errors import BadRequest, NotReady, StoreError
from ratelimit_rls.service import Call, RateLimiter
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.cache import CallCache, Known
from ratelimit_rls.transport.grpc.door import Answered, Failure, FailureCode, Held
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

MOST_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own default for what a server receives."""

_log = logging.getLogger(__name__)

W = TypeVar("W")


class LimiterDoor(ABC, Generic[W]):
    """W is what a door works out beforehand for the wording of a call's answer."""

    def __init__(self, limiter: RateLimiter, metrics: Metrics, room: WaitingRoom, cache_bytes: int) -> None:
        self.limiter = limiter
        self.counters = metrics.service
        self.cache: CallCache[W] = CallCache(cache_bytes)  # empty again whenever the rules change
        self._room = room
        self._rules = limiter.rules
        self._some_can_wait = False  # under the rules in force, as far as calls were seen

    @abstractmethod
    def read(self, message: bytes) -> Known[W]:
        """What a message asks for. Raises BadRequest if it has no meaning, NotReady if there are no rules yet."""

    @abstractmethod
    def word(self, decision: Decision, wording: W) -> bytes:
        """The answer's bytes."""

    def known(self, messages: Sequence[bytes]) -> list[Known[W] | Failure]:
        """What each message asks for; a door whose messages come again and again looks them up in the cache first."""
        return [self.understood(message) for message in messages]

    def understood(self, message: bytes) -> Known[W] | Failure:
        """`read`, with its troubles told."""
        if len(message) > MOST_MESSAGE_BYTES:
            self.counters.service_error += 1
            return Failure(
                FailureCode.RESOURCE_EXHAUSTED,
                f"a message of {len(message)} bytes; at most {MOST_MESSAGE_BYTES} are read",
            )
        try:
            known = self.read(message)
        except Exception as fault:
            return self._failure(fault)
        if known.call.outline.can_wait:
            self._some_can_wait = True
        return known

    async def answer(self, messages: Sequence[bytes], time_left_s: Sequence[float | None]) -> list[Answered]:
        """What to do with each gRPC call, in order. Never raises."""
        return await self.check(messages, time_left_s)

    async def check(self, messages: Sequence[bytes], time_left_s: Sequence[float | None]) -> list[Answered]:
        """The same for callers that are not counted as gRPC calls."""
        if self.limiter.rules is not self._rules:
            self._rules = self.limiter.rules
            self._some_can_wait = False
            self.cache.clear()
        ready = self.known(messages)
        asked = [known.call for known in ready if isinstance(known, Known)]
        waits_us, reserved = self._waits(ready, time_left_s) if self._some_can_wait else (None, 0)
        sent_s = monotonic()
        try:
            decisions = iter(await self.limiter.check(asked, waits_us))
        except Exception as fault:
            # Whether the batch was counted is unknown, so it is not tried again call by call.
            failure = self._failure(fault)
            return [failure if isinstance(known, Known) else known for known in ready]
        finally:
            self._room.release(reserved)
        if waits_us is None:
            return [self._told(known, next(decisions)) if isinstance(known, Known) else known for known in ready]
        under_way_s = monotonic() - sent_s
        waits = iter(waits_us)
        return [
            self._told_or_held(known, next(decisions), next(waits), under_way_s) if isinstance(known, Known) else known
            for known in ready
        ]

    def _waits(
        self, ready: list[Known[W] | Failure], time_left_s: Sequence[float | None]
    ) -> tuple[list[int | None], int]:
        """How long each call can be held, as the rate limiter is told it, and how many places that has reserved."""
        waits_us: list[int | None] = []
        reserved = 0
        for known, left_s in zip(ready, time_left_s, strict=True):
            if isinstance(known, Failure):
                continue
            wait_us = None
            if known.call.outline.can_wait:
                wait_us = self._room.reserve(left_s)
                reserved += wait_us != 0
            waits_us.append(wait_us)
        return waits_us, reserved

    def _told_or_held(
        self, known: Known[W], decision: Decision | StoreError, longest_us: int | None, under_way_s: float
    ) -> Answered:
        """A wait is counted from now.

        The store said how long from its own moment, which lies between sending and now. Later is the safe side:
        counted from sending, a call could be answered before its slot. What that is too late by must not cost a caller
        its deadline, so there the time under way is taken off.
        """
        answer = self._told(known, decision)
        if isinstance(answer, Failure) or isinstance(decision, StoreError) or not decision.wait_us:
            return answer
        latest_s = inf if longest_us is None else longest_us / 1e6 - under_way_s
        return Held(
            answer,
            min(decision.wait_us / 1e6, latest_s),
            _queue(known.call, decision),
            partial(self.limiter.give_back, known.call, decision),
            latest_s,
        )

    def _told(self, known: Known[W], decision: Decision | StoreError) -> bytes | Failure:
        if isinstance(decision, StoreError):
            return self._failure(decision)
        try:
            return self.word(decision, known.wording)
        except Exception as fault:
            return self._failure(fault)

    def _failure(self, fault: Exception) -> Failure:
        match fault:
            case StoreError():  # counted as redis_error where it was met
                return Failure(FailureCode.UNAVAILABLE, str(fault))
            case BadRequest():
                code, message = FailureCode.INVALID_ARGUMENT, str(fault)
            case NotReady():
                code, message = FailureCode.UNAVAILABLE, str(fault)
            case _:
                _log.error("a rate limit call failed unexpectedly", exc_info=fault)
                code, message = FailureCode.INTERNAL, "internal error"
        self.counters.service_error += 1
        return Failure(code, message)


def _queue(call: Call, decision: Decision) -> Hashable:
    """Calls that wait for slots of one limit, all of the same size: each can take the other's.

    A call that waits for several limits at once stands by itself, since moving up for one may be too early for another.
    """
    assert call.prepared is not None
    sizes = [
        step.cost
        for status in decision.statuses
        for step, reading in zip(status.slot.steps, status.readings, strict=True)
        if reading.wait_us
    ]
    return (call.prepared.keys[decision.held_by], sizes[0]) if len(sizes) == 1 else object()
