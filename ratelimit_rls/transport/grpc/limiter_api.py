"""The doors for RateLimiter, our own API for services without Envoy: CheckRateLimit and GetRemainingQuota.

Every check brings its caller's clock, and may bring an API key, so what was worked out is kept by what it asks for and
not by its bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from time import time

from ratelimit_rls.core.identity import Verifier
from ratelimit_rls.core.model import Decision
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import NotReady
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.refusals import RefusalLog
from ratelimit_rls.transport.grpc.cache import DEFAULT_BYTES, Budget, CallCache, Known
from ratelimit_rls.transport.grpc.limiter_door import LimiterDoor
from ratelimit_rls.transport.grpc.limiter_encode import check_response, quota_response
from ratelimit_rls.transport.grpc.limiter_read import Asked, Reader, parse
from ratelimit_rls.transport.grpc.messages import LimiterCheckRequest, QuotaRequest
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

MOST_SKEW_S = 300
"""By how much a caller's clock may differ from ours before it is told of. Kerberos draws the line there, too."""

_log = logging.getLogger(__name__)


class _RateLimiterDoor(LimiterDoor[None]):
    """Nothing is worked out for the wording of an answer: it is a few numbers of the decision."""

    def __init__(
        self,
        limiter: RateLimiter,
        metrics: Metrics,
        *,
        room: WaitingRoom,
        default_domain: str = "",
        verifier: Verifier | None = None,
        budget: Budget | None = None,
        refusal_log: RefusalLog | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        """`default_domain` is that of calls that name none; `verifier` knows whose API keys are sent. The clock is in
        seconds since the epoch."""
        super().__init__(limiter, metrics, room, refusal_log, verifier)
        self._cache: CallCache[None] = CallCache(budget or Budget(DEFAULT_BYTES))
        self._reader = Reader(default_domain, verifier, clock)
        self._clock = clock

    def forget(self) -> None:
        self._cache.clear()

    def _tree(self) -> Tree:
        loaded = self.limiter.rules
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        return loaded.tree

    def _known(self, asked: Asked, cost: int) -> Known[None]:
        if asked.refusal is not None:
            return Known(self.limiter.refuse(asked.request(self._tree(), cost), asked.refusal), None)
        key = _key(asked, cost)
        known = self._cache.get(key)
        if known is None or not ((valid := known.call.valid) is None or valid.holds(self._clock())):
            known = Known(self.limiter.prepare(asked.request(self._tree(), cost)), None)
            self._cache.put(key, known)
        return known


class CheckRateLimitDoor(_RateLimiterDoor):
    skewed = 0  # calls whose caller's clock is far from ours

    def read(self, message: bytes) -> Known[None]:
        request = parse(LimiterCheckRequest, message)
        if request.timestamp:
            self._compare_clocks(request.timestamp)
        return self._known(self._reader.asked(request, self._tree()), request.cost if request.HasField("cost") else 1)

    def word(self, decision: Decision, wording: None) -> bytes:
        return check_response(decision, self._clock())

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield "ratelimit.limiter.clock_skew_total", self.skewed

    def _compare_clocks(self, timestamp_s: int) -> None:
        """Only to tell: windows go by the store's clock, whatever the callers' say."""
        skew_s = timestamp_s - self._clock()
        if abs(skew_s) <= MOST_SKEW_S:
            return
        if not self.skewed:
            _log.warning(
                "a caller of CheckRateLimit has a clock that differs from ours by %d seconds; limits go by the store's",
                skew_s,
            )
        self.skewed += 1


class RemainingQuotaDoor(_RateLimiterDoor):
    def read(self, message: bytes) -> Known[None]:
        return self._known(self._reader.asked(parse(QuotaRequest, message), self._tree()), 0)

    def word(self, decision: Decision, wording: None) -> bytes:
        return quota_response(decision)


def _key(asked: Asked, cost: int) -> bytes:
    """The same for two exactly if they ask for the same: every text stands after its length."""
    texts = (asked.domain, asked.path, asked.tier, *[text for entry in asked.subjects for text in entry])
    return f"{cost};{''.join([f'{len(text)}:{text}' for text in texts])}".encode()
