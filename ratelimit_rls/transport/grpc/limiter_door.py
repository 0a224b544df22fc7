"""A door behind which the rate limiter decides: all that does not depend on how its messages are written.

Every fault becomes a status here and nowhere else, and the trouble of one call is never another's.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from time import time
from typing import Generic, TypeVar

from ratelimit_rls.core.identity import Verifier
from ratelimit_rls.core.model import Decision, Request
from ratelimit_rls.errors import BadRequest, NotReady, Overloaded, StoreError
from ratelimit_rls.service import Call, RateLimiter
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.refusals import RefusalLog
from ratelimit_rls.telemetry.traces import TracedBatch
from ratelimit_rls.transport.grpc.asked import AskedLimiter
from ratelimit_rls.transport.grpc.cache import CallCache, Known
from ratelimit_rls.transport.grpc.door import Answered, Failure, FailureCode
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

MOST_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own default for what a server receives."""

_log = logging.getLogger(__name__)

W = TypeVar("W")


class LimiterDoor(ABC, Generic[W]):
    """W is what a door works out beforehand for the wording of a call's answer."""

    messages_have_ids = False

    def __init__(
        self,
        limiter: RateLimiter,
        metrics: Metrics,
        room: WaitingRoom,
        refusal_log: RefusalLog | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        """`verifier` knows whose credentials are whose; without one they are nobody's."""
        self.limiter = limiter
        self.verifier = verifier
        self.refusal_log = refusal_log or RefusalLog(0)
        self.counters = metrics.service
        self.room = room
        # Under the rules in force, as far as calls were seen.
        self.some_can_wait = False
        self.some_ask_nothing = False
        self._rules = limiter.rules

    @abstractmethod
    def read(self, message: bytes) -> Known[W]:
        """What a message asks for. Raises BadRequest if it has no meaning, NotReady if there are no rules yet."""

    @abstractmethod
    def forget(self) -> None:
        """What was worked out for requests: the rules have changed."""

    @abstractmethod
    def word(self, decision: Decision, wording: W) -> bytes:
        """The answer's bytes."""

    def known(self, messages: Sequence[bytes]) -> list[Known[W] | Failure]:
        """What each message asks for; a door whose messages come again and again looks them up in the cache first."""
        return [self.understood(message) for message in messages]

    def call_of(self, request: Request, cache: CallCache[None]) -> Call:
        """`prepare`, remembered by what the request says: for messages that are never the same twice, or must not be
        kept since they carry a credential."""
        key = _key(request)
        known = cache.get(key)
        if known is not None and ((valid := known.call.valid) is None or valid.holds(time())):
            return known.call
        call = self.limiter.prepare(request)
        cache.put(key, Known(call, None))
        return call

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
            return self.failure(fault)
        call = known.call
        if call.outline.can_wait:
            self.some_can_wait = True
        if call.prepared is None:
            self.some_ask_nothing = True
        return known

    def ask(
        self,
        messages: Sequence[bytes],
        deadlines_s: Sequence[float],
        request_ids: Sequence[bytes | None] | None = None,
        traced: TracedBatch | None = None,
    ) -> AskedLimiter[W]:
        if self.limiter.rules is not self._rules:
            self._rules = self.limiter.rules
            self.some_can_wait = self.some_ask_nothing = False
            self.forget()
        return AskedLimiter(self, self.known(messages), deadlines_s, request_ids, traced)

    async def check(self, message: bytes) -> Answered:
        """What to do with a call that has no deadline. Never raises."""
        (answer,) = await self.ask([message], [inf]).answers()
        assert answer is not None, "nobody has asked what is due"
        return answer

    def told(self, known: Known[W], decision: Decision | StoreError | Failure) -> bytes | Failure:
        if isinstance(decision, StoreError):
            return self.failure(decision)
        if isinstance(decision, Failure):
            return decision
        try:
            return self.word(decision, known.wording)
        except Exception as fault:
            return self.failure(fault)

    def instead(self, undecided: Sequence[tuple[Call, StoreError]]) -> Sequence[Decision | StoreError | Failure]:
        """What is decided where the store cannot be waited for. Nobody is held: there is no time, or place."""
        try:
            return self.limiter.instead(undecided)
        except Exception as fault:
            return [self.failure(fault)] * len(undecided)

    def failure(self, fault: Exception) -> Failure:
        match fault:
            case Overloaded():  # a StoreError is counted as redis_error where it was met
                return Failure(FailureCode.RESOURCE_EXHAUSTED, str(fault))
            case StoreError():
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


def _key(request: Request) -> bytes:
    """The same for two requests exactly if they are the same: every text stands after its length."""
    parts = [f"{len(request.domain)}:{request.domain};{request.hits}"]
    for entries, limit, hits, is_refund in request.descriptors:
        parts.append(f";{hits}{limit or ''}{is_refund or ''}")
        for key, value in entries:
            parts.append(f",{len(key)}:{key}{len(value)}:{value}")
    return "".join(parts).encode()
