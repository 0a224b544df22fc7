"""What the service answers, as values, and what stands in for an answer that did not come."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import grpc

OnError = Literal["allow", "deny", "raise"]
"""What a check tells that has no answer: the service is away, or too slow. A call that it does not understand is told
to be refused under `allow`, too: it is the caller's words that decide about that, and they must not turn limits off."""

_log = logging.getLogger(__name__)


class RateLimiterError(Exception):
    """The service gave no answer, or said that it cannot give one."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a check. The numbers are those of the limit that refuses, or that has the least left; 0 if none applied."""

    allowed: bool
    current_count: int = 0
    limit: int = 0
    remaining: int = 0
    reset_at: int = 0  # in seconds since the epoch
    retry_after: int = 0  # whole seconds; 0: it passes now, or nobody knows when it would
    rule: str = ""  # the path of the rule that is spoken of
    reason: str = ""  # of a refusal: over_limit, blocked, unauthorized; or no_answer, not_understood
    http_status: int = 0  # of a refusal: what an HTTP service should tell its own client
    error: RateLimiterError | None = None  # then this is not the service's word, but `on_error`

    @property
    def is_limited(self) -> bool:
        """Whether the numbers are those of a limit."""
        return self.reset_at > 0 and self.reason in ("", "over_limit")


@dataclass(frozen=True, slots=True)
class Quota:
    """How one limit stands."""

    rule: str
    limit: int
    window: str  # `minute`, `5 minutes`, `month`
    remaining: int
    reset_at: int  # in seconds since the epoch


@dataclass(frozen=True, slots=True)
class Remaining:
    """Every limit that a check would meet."""

    allowed: bool  # one more
    reason: str  # if not
    limits: tuple[Quota, ...]


def answer_of(response: Any) -> Answer:
    return Answer(
        allowed=response.allowed,
        current_count=response.current_count,
        limit=response.limit,
        remaining=response.remaining,
        reset_at=response.reset_at,
        retry_after=response.retry_after,
        rule=response.rule,
        reason=response.reason,
        http_status=response.http_status,
    )


def remaining_of(response: Any) -> Remaining:
    return Remaining(
        allowed=response.allowed,
        reason=response.reason,
        limits=tuple(
            Quota(quota.rule, quota.limit, quota.window, quota.remaining, quota.reset_at) for quota in response.limits
        ),
    )


def error_of(fault: grpc.RpcError) -> RateLimiterError:
    """Every error of a call has a code and details; the library does not say so of its type."""
    call: Any = fault
    return RateLimiterError(call.code(), call.details() or "")


class Instead:
    """What a client tells in place of an answer. Each kind of error is logged when first met: `allow` must not hide
    that nothing is limited."""

    def __init__(self, on_error: OnError) -> None:
        if on_error not in ("allow", "deny", "raise"):
            raise ValueError(f"on_error is {on_error!r}; say 'allow', 'deny' or 'raise'")
        self._on_error = on_error
        self._logged: set[grpc.StatusCode] = set()

    def of(self, error: RateLimiterError) -> Answer:
        """Raises the error, if that is what was chosen."""
        if self._on_error == "raise":
            raise error
        if error.code not in self._logged:
            self._logged.add(error.code)
            _log.warning("the rate limiter gave no answer (on_error=%s): %s", self._on_error, error)
        if error.code is grpc.StatusCode.INVALID_ARGUMENT:
            return Answer(allowed=False, reason="not_understood", http_status=400, error=error)
        if self._on_error == "allow":
            return Answer(allowed=True, error=error)
        return Answer(allowed=False, retry_after=1, reason="no_answer", http_status=503, error=error)
