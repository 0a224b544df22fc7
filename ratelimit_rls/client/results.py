"""Results of calls, and the policy for calls without a response."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import grpc

OnError = Literal["allow", "deny", "raise"]
"""Result of a check if the service is unavailable or too slow.

A call that the service rejects as invalid is denied under `allow`, too: its content may come from the caller, who must
not be able to turn limits off.
"""

_log = logging.getLogger(__name__)


class RateLimiterError(Exception):
    """The service did not respond, or responded with an error status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check.

    The numbers are those of the denying limit, else of the limit with least remaining; 0 if none applied.
    """

    allowed: bool
    current_count: int = 0
    limit: int = 0
    remaining: int = 0
    reset_at: int = 0  # Unix time in seconds
    retry_after: int = 0  # whole seconds; 0: allowed now, or unknown
    rule: str = ""  # path of the rule that the numbers belong to
    reason: str = ""  # of a denial: over_limit, blocked, unauthorized; or no_answer, not_understood
    http_status: int = 0  # of a denial: status an HTTP service should respond with
    error: RateLimiterError | None = None  # set if there was no response and `on_error` decided

    @property
    def is_limited(self) -> bool:
        """True if the numbers are those of a limit."""
        return self.reset_at > 0 and self.reason in ("", "over_limit")


@dataclass(frozen=True, slots=True)
class Quota:
    """Current state of one limit."""

    rule: str
    limit: int
    window: str  # `minute`, `5 minutes`, `month`
    remaining: int
    reset_at: int  # Unix time in seconds


@dataclass(frozen=True, slots=True)
class Remaining:
    """Every limit that a check would apply."""

    allowed: bool  # one more hit would be allowed
    reason: str  # why not; empty if allowed
    limits: tuple[Quota, ...]


def parse_check(response: Any) -> CheckResult:
    return CheckResult(
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


def parse_remaining(response: Any) -> Remaining:
    return Remaining(
        allowed=response.allowed,
        reason=response.reason,
        limits=tuple(
            Quota(quota.rule, quota.limit, quota.window, quota.remaining, quota.reset_at) for quota in response.limits
        ),
    )


def to_error(fault: grpc.RpcError) -> RateLimiterError:
    """Convert an error of grpc. Errors of calls have code() and details(), but the type stubs lack them."""
    call: Any = fault
    return RateLimiterError(call.code(), call.details() or "")


class ErrorPolicy:
    """Decides calls without a response. The first error of each status is logged, so that `allow` is not silent."""

    def __init__(self, on_error: OnError) -> None:
        if on_error not in ("allow", "deny", "raise"):
            raise ValueError(f"on_error is {on_error!r}; must be 'allow', 'deny' or 'raise'")
        self._on_error = on_error
        self._logged: set[grpc.StatusCode] = set()

    def of(self, error: RateLimiterError) -> CheckResult:
        """Return the result for an error, or raise it if `on_error` is `raise`."""
        if self._on_error == "raise":
            raise error
        if error.code not in self._logged:
            self._logged.add(error.code)
            _log.warning("no response from the rate limiter (on_error=%s): %s", self._on_error, error)
        if error.code is grpc.StatusCode.INVALID_ARGUMENT:
            return CheckResult(allowed=False, reason="not_understood", http_status=400, error=error)
        if self._on_error == "allow":
            return CheckResult(allowed=True, error=error)
        return CheckResult(allowed=False, retry_after=1, reason="no_answer", http_status=503, error=error)
