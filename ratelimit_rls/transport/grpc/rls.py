"""The door for RateLimitRequests: ShouldRateLimit, and Kuadrant's two halves of it."""

from __future__ import annotations

from collections.abc import Sequence

from ratelimit_rls.core.model import Decision, Purpose
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.cache import Known
from ratelimit_rls.transport.grpc.decode import decode
from ratelimit_rls.transport.grpc.door import Answered, Failure
from ratelimit_rls.transport.grpc.encode import Encoder, Wording
from ratelimit_rls.transport.grpc.limiter_door import LimiterDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom


class RlsDoor(LimiterDoor[Wording]):
    def __init__(
        self,
        limiter: RateLimiter,
        metrics: Metrics,
        options: AnswerOptions | None = None,
        *,
        room: WaitingRoom,
        purpose: Purpose = Purpose.DECIDE,
        cache_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        super().__init__(limiter, metrics, room, cache_bytes)
        self._encoder = Encoder(options or AnswerOptions())
        self._purpose = purpose

    async def answer(self, messages: Sequence[bytes], time_left_s: Sequence[float | None]) -> list[Answered]:
        if self._purpose is Purpose.DECIDE:
            self.counters.total_requests += len(messages)
        return await self.check(messages, time_left_s)

    def known(self, messages: Sequence[bytes]) -> list[Known[Wording] | Failure]:
        recall = self.cache.get
        return [recall(message) or self.understood(message) for message in messages]

    def read(self, message: bytes) -> Known[Wording]:
        request = decode(message)._replace(purpose=self._purpose)
        call = self.limiter.prepare(request)
        known = Known(call, self._encoder.wording(request, call.outline))
        self.cache.put(message, known)
        return known

    def word(self, decision: Decision, wording: Wording) -> bytes:
        return self._encoder.encode(decision, wording)
