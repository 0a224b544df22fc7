"""Interface of an API: decodes its messages into prepared requests, and encodes decisions as its responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import time
from typing import Generic, TypeVar

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.identity import Verifier
from ratelimit_rls.core.model import Decision, PlanTemplate, Request, StoreResult
from ratelimit_rls.pipeline.limiter import PlannedCall, RateLimiter
from ratelimit_rls.pipeline.message_bounds import DEFAULT_BOUNDS, MessageBounds
from ratelimit_rls.pipeline.request_cache import PreparedRequest, RequestCache

T = TypeVar("T")


class Codec(ABC, Generic[T]):
    """Codec of the messages of one method. T is what it precomputes for the response to a request."""

    messages_carry_request_ids = False

    encode: Callable[[Decision, T], bytes]
    """Encode the response to a decision. An attribute, so that a codec can use the method of its encoder."""

    def __init__(
        self, limiter: RateLimiter, verifier: Verifier | None = None, bounds: MessageBounds = DEFAULT_BOUNDS
    ) -> None:
        """`verifier` verifies credentials; without one all callers are unauthenticated."""
        self.limiter = limiter
        self.verifier = verifier
        self.bounds = bounds
        self.lookup: Callable[[bytes], PreparedRequest[T] | None] = _not_cached
        """Return the prepared request of a message that was decoded before, or None. An attribute, so that a codec can
        use the method of a dictionary: it runs for every call."""
        # Whether any request that was decoded under the rules in force may be throttled, or needs no store.
        self.may_throttle = False
        self.may_skip_store = False
        self._rules = limiter.rules

    @property
    @abstractmethod
    def max_message_bytes(self) -> int:
        """Longer messages are rejected, so that a transport need not receive or decompress more."""

    @abstractmethod
    def decode(self, message: bytes) -> PreparedRequest[T]:
        """Decode and prepare a message. Raises BadRequest if it is invalid, NotReady if there are no rules yet."""

    def encode_pass(self, template: PlanTemplate, result: StoreResult, response_template: T) -> bytes:
        """Encode the response to a call that passes all its limits, by the result of the store."""
        return self.encode(decision_of(template, result), response_template)

    @abstractmethod
    def clear_cache(self) -> None:
        """Forget all prepared requests."""

    def refresh(self) -> None:
        """Forget what was prepared under other rules than those in force. Called before each batch."""
        if self.limiter.rules is not self._rules:
            self._rules = self.limiter.rules
            self.may_throttle = self.may_skip_store = False
            self.clear_cache()

    def prepare_cached(self, request: Request, cache: RequestCache[None]) -> PlannedCall:
        """Prepare a request, with a cache by its content: for messages that never repeat, or that must not be cached
        since they carry a credential."""
        key = _cache_key(request)
        cached = cache.get(key)
        if cached is not None and ((valid := cached.call.valid) is None or valid.holds(time())):
            return cached.call
        call = self.limiter.prepare(request)
        cache.put(key, PreparedRequest(call, None))
        return call


def _not_cached(message: bytes) -> None:
    """Look up a message of a codec whose messages never repeat."""


def _cache_key(request: Request) -> bytes:
    """Return a key that is equal for equal requests only: every text follows its length."""
    parts = [f"{len(request.domain)}:{request.domain};{request.hits}"]
    for entries, limit, hits, is_refund in request.descriptors:
        parts.append(f";{hits}{limit or ''}{is_refund or ''}")
        for key, value in entries:
            parts.append(f",{len(key)}:{key}{len(value)}:{value}")
    return "".join(parts).encode()
