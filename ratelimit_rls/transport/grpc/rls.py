"""The door for ShouldRateLimit: a batch of messages in, an answer or a failure for each, whatever carries the bytes.

Every fault becomes a status here and nowhere else, and the trouble of one call is never another's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ratelimit_rls.core.model import Decision
from ratelimit_rls.errors import BadRequest, NotReady, StoreError
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.cache import CallCache, Known
from ratelimit_rls.transport.grpc.decode import decode
from ratelimit_rls.transport.grpc.encode import Encoder

MOST_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own default for what a server receives."""

_log = logging.getLogger(__name__)


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


class RlsDoor:
    def __init__(
        self,
        limiter: RateLimiter,
        metrics: Metrics,
        options: AnswerOptions | None = None,
        *,
        cache_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self._limiter = limiter
        self._counters = metrics.service
        self._encoder = Encoder(options or AnswerOptions())
        self._cache = CallCache(cache_bytes)
        self._rules = limiter.rules

    async def answer(self, messages: Sequence[bytes]) -> list[bytes | Failure]:
        """What to tell each gRPC caller, in order. Never raises."""
        self._counters.total_requests += len(messages)
        return await self.check(messages)

    async def check(self, messages: Sequence[bytes]) -> list[bytes | Failure]:
        """The same for callers that are not counted as gRPC calls."""
        if self._limiter.rules is not self._rules:
            self._rules = self._limiter.rules
            self._cache.clear()
        recall = self._cache.get
        ready = [recall(message) or self._prepare(message) for message in messages]
        asked = [known.call for known in ready if isinstance(known, Known)]
        try:
            decisions = iter(await self._limiter.check(asked))
        except Exception as fault:
            # Whether the batch was counted is unknown, so it is not tried again call by call.
            failure = self._failure(fault)
            return [failure if isinstance(known, Known) else known for known in ready]
        return [self._told(known, next(decisions)) if isinstance(known, Known) else known for known in ready]

    def _prepare(self, message: bytes) -> Known | Failure:
        """What a message that was not seen before asks for."""
        if len(message) > MOST_MESSAGE_BYTES:
            self._counters.service_error += 1
            return Failure(
                FailureCode.RESOURCE_EXHAUSTED,
                f"a message of {len(message)} bytes; at most {MOST_MESSAGE_BYTES} are read",
            )
        try:
            request = decode(message)
            call = self._limiter.prepare(request)
            known = Known(call, self._encoder.wording(request, call.outline))
        except Exception as fault:
            return self._failure(fault)
        self._cache.put(message, known)
        return known

    def _told(self, known: Known, decision: Decision | StoreError) -> bytes | Failure:
        if isinstance(decision, StoreError):
            return self._failure(decision)
        try:
            return self._encoder.encode(decision, known.wording)
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
        self._counters.service_error += 1
        return Failure(code, message)
