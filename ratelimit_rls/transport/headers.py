"""Which descriptor of a call the three RateLimit headers speak of."""

from __future__ import annotations

from ratelimit_rls.core.model import Code, Decision, Status


def spoken_of(decision: Decision) -> Status | None:
    """The status whose numbers become headers, whatever the verdict; None when no limit applied at all.

    The last refusal that is not a quota's, else the first status with the least remaining (reference behaviour): a
    quota's refusal is one among many, and need not be why the call was refused.
    """
    least: Status | None = None
    refusal: Status | None = None
    for status in decision.statuses:
        if status.step is None:
            continue
        if least is None or status.remaining < least.remaining:
            least = status
        if status.code is Code.OVER_LIMIT and not _is_quota(status):
            refusal = status
    return refusal or least


def _is_quota(status: Status) -> bool:
    return status.step is not None and status.step.quota_mode
