"""The door for RateLimitRequests: ShouldRateLimit, and Kuadrant's two halves of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ratelimit_rls.core.model import Decision, Purpose, Request
from ratelimit_rls.core.plan import check
from ratelimit_rls.service import NO_LIMIT, RateLimiter
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.refusals import RefusalLog
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.cache import Known
from ratelimit_rls.transport.grpc.decode import decode
from ratelimit_rls.transport.grpc.door import Failure
from ratelimit_rls.transport.grpc.encode import Encoder, Wording
from ratelimit_rls.transport.grpc.limiter_door import LimiterDoor
from ratelimit_rls.transport.grpc.request_id import identified
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
        request_id_entry: str = "",
        cache_bytes: int = 64 * 1024 * 1024,
        refusal_log: RefusalLog | None = None,
    ) -> None:
        """`request_id_entry` is the key of descriptor entries that say which call it is, and not what to count."""
        super().__init__(limiter, metrics, room, cache_bytes, refusal_log)
        self._encoder = Encoder(options or AnswerOptions())
        self._purpose = purpose
        self._request_id_entry = request_id_entry
        self.messages_have_ids = bool(request_id_entry)

    def known(self, messages: Sequence[bytes]) -> list[Known[Wording] | Failure]:
        recall = self.cache.get
        return [recall(message) or self.understood(message) for message in messages]

    def read(self, message: bytes) -> Known[Wording]:
        request = decode(message)._replace(purpose=self._purpose)
        if self._request_id_entry:
            known = self._read_identified(request)
        else:
            call = self.limiter.prepare(request)
            known = Known(call, self._encoder.wording(request, call.outline))
        if known.request_id is None:  # one that has an id is not seen again but in a retry
            self.cache.put(message, known)
        return known

    def _read_identified(self, request: Request) -> Known[Wording]:
        """A descriptor that had nothing but the id is not decided about, and told that no limit applied."""
        check(request)
        rest, request_id, dropped = identified(request, self._request_id_entry)
        call = self.limiter.prepare(rest) if rest.descriptors else NO_LIMIT
        wording = self._encoder.wording(rest, call.outline)
        return Known(call, replace(wording, undecided=dropped) if dropped else wording, request_id)

    def word(self, decision: Decision, wording: Wording) -> bytes:
        return self._encoder.encode(decision, wording)
