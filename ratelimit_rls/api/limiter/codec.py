"""Codecs of RateLimiter, our own API for services without Envoy: CheckRateLimit and GetRemainingQuota.

Every message contains the client's clock, and may contain an API key, so the cache key is the target of a message and
not its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import time
from typing import Any

import structlog

from ratelimit_rls.api.limiter.decode import LimiterDecoder, LimiterTarget, parse
from ratelimit_rls.api.limiter.encode import check_response, quota_response
from ratelimit_rls.core.identity import Verifier
from ratelimit_rls.core.model import Decision
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import NotReady
from ratelimit_rls.pipeline.codec import Codec
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.message_bounds import DEFAULT_BOUNDS, MAX_LIMITER_MESSAGE_BYTES, MessageBounds
from ratelimit_rls.pipeline.request_cache import DEFAULT_CACHE_BYTES, CacheBudget, PreparedRequest, RequestCache
from ratelimit_rls.protos.messages import LimiterCheckRequest, QuotaRequest

MAX_SKEW_S = 300
"""Difference between a client's clock and ours above which the call is reported. Kerberos uses the same value."""

_log = structlog.get_logger()


class _RateLimiterCodec(Codec[None]):
    """Common part of both codecs. There are no response templates: a response is a few numbers of the decision."""

    message_class: Any

    def __init__(
        self,
        limiter: RateLimiter,
        *,
        default_domain: str = "",
        verifier: Verifier | None = None,
        budget: CacheBudget | None = None,
        clock: Callable[[], float] = time,
        bounds: MessageBounds = DEFAULT_BOUNDS,
    ) -> None:
        """`default_domain` is used for calls without a domain; `verifier` identifies API keys. The clock is in seconds
        since the epoch."""
        super().__init__(limiter, verifier, bounds)
        self._scan = bounds.limiter_scan(self.message_class)
        self._cache: RequestCache[None] = RequestCache(budget or CacheBudget(DEFAULT_CACHE_BYTES))
        self._decoder = LimiterDecoder(default_domain, verifier, clock)
        self._clock = clock

    @property
    def max_message_bytes(self) -> int:
        return min(MAX_LIMITER_MESSAGE_BYTES, self.bounds.message_bytes)

    def clear_cache(self) -> None:
        self._cache.clear()

    def _tree(self) -> Tree:
        loaded = self.limiter.rules
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        return loaded.tree

    def _prepare(self, target: LimiterTarget, cost: int) -> PreparedRequest[None]:
        if target.rejection is not None:
            return PreparedRequest(self.limiter.reject(target.request(self._tree(), cost), target.rejection), None)
        key = _cache_key(target, cost)
        prepared = self._cache.get(key)
        if prepared is None or not ((valid := prepared.call.valid) is None or valid.holds(self._clock())):
            prepared = PreparedRequest(self.limiter.prepare(target.request(self._tree(), cost)), None)
            self._cache.put(key, prepared)
        return prepared


class CheckRateLimitCodec(_RateLimiterCodec):
    """Codec of CheckRateLimit."""

    message_class = LimiterCheckRequest
    skewed_calls = 0  # calls of clients whose clock differs by more than MAX_SKEW_S

    def decode(self, message: bytes) -> PreparedRequest[None]:
        request = parse(self.message_class, message, self._scan)
        if request.timestamp:
            self._compare_clocks(request.timestamp)
        return self._prepare(
            self._decoder.target(request, self._tree()), request.cost if request.HasField("cost") else 1
        )

    def encode(self, decision: Decision, response_template: None) -> bytes:
        return check_response(decision, self._clock())

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield "ratelimit.limiter.clock_skew", self.skewed_calls

    def _compare_clocks(self, timestamp_s: int) -> None:
        """Count calls with a skewed clock, and log the first. Windows always use the store's clock."""
        skew_s = timestamp_s - self._clock()
        if abs(skew_s) <= MAX_SKEW_S:
            return
        if not self.skewed_calls:
            _log.warning("client_clock_skewed", skew_s=round(skew_s), effect="none: limits use the store's clock")
        self.skewed_calls += 1


class RemainingQuotaCodec(_RateLimiterCodec):
    """Codec of GetRemainingQuota."""

    message_class = QuotaRequest

    def decode(self, message: bytes) -> PreparedRequest[None]:
        return self._prepare(self._decoder.target(parse(self.message_class, message, self._scan), self._tree()), 0)

    def encode(self, decision: Decision, response_template: None) -> bytes:
        return quota_response(decision)


def _cache_key(target: LimiterTarget, cost: int) -> bytes:
    """Return a key that is equal for equal targets only: every string is preceded by its length."""
    texts = (target.domain, target.path, target.tier, *[text for entry in target.subjects for text in entry])
    return f"{cost};{''.join([f'{len(text)}:{text}' for text in texts])}".encode()
