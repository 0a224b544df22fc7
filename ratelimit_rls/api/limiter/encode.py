"""Encoder: Decision ─► responses of RateLimiter, whose fields contain what other APIs send in headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from random import randrange

from ratelimit_rls.api.responses.formatting import remaining, rule_path, seconds, until_us, used, window
from ratelimit_rls.api.responses.status_selection import denying_statuses, reported_status, retry_after_s
from ratelimit_rls.core.model import Code, Decision, OnStoreFailure, Reading, Rejection, Rule, Status, Step
from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.protos.messages import LimiterCheckResponse, QuotaResponse

OVER_LIMIT = "over_limit"
"""Reason of a denial by a limit; other reasons are those of Rejection."""

_DEFAULT_DENY_STATUS = 429

Draw = Callable[[int], int]


def check_response(decision: Decision, now_s: float, draw: Draw = randrange) -> bytes:
    """Encode a CheckResponse.

    `now_s` is in seconds since the epoch, and is used for rejections, which the store did not decide. `draw` is as in
    ResponseBuilder.
    """
    is_denied = decision.code is Code.OVER_LIMIT
    rejection = decision.template.rejection
    if is_denied and rejection is not None:
        return _denied_response(decision, rejection, now_s)
    denying = denying_statuses(decision)
    status = reported_status(decision, denying)
    if status is None or status.step is None or status.reading is None or status.descriptor_plan.rule is None:
        return bytes(LimiterCheckResponse(allowed=True, rule=_exempting_path(decision)).SerializeToString())
    limit, rule, reading = status.step.limit, status.descriptor_plan.rule, status.reading
    response = LimiterCheckResponse(
        allowed=not is_denied,
        current_count=used(limit, reading),
        limit=limit.requests_per_unit,
        remaining=status.remaining,
        reset_at=seconds(decision.now_us + until_us(reading)),
        rule=rule_path(decision.template.domain, rule),
    )
    if is_denied:
        response.retry_after = retry_after_s(denying) + _jitter_s(rule, draw)
        response.reason = OVER_LIMIT
        response.http_status = rule.deny.status if rule.deny is not None else _DEFAULT_DENY_STATUS
    return bytes(response.SerializeToString())


def quota_response(decision: Decision) -> bytes:
    """Encode a QuotaResponse. Raises StoreUnavailable if the state is unknown: an empty response would mean no
    limits."""
    if decision.without_store in (OnStoreFailure.ALLOW, OnStoreFailure.DENY):
        raise StoreUnavailable("the store did not respond, so the remaining quota is unknown")
    response = QuotaResponse(allowed=decision.code is not Code.OVER_LIMIT)
    if not response.allowed:
        rejection = decision.template.rejection
        response.reason = rejection.reason if rejection is not None else OVER_LIMIT
    for status, rule, step, reading in _enforced_limits(decision):
        current = status.cooldown or reading  # until it ends, no limit allows anything
        response.limits.add(
            rule=rule_path(decision.template.domain, rule),
            limit=step.limit.requests_per_unit,
            window=window(step.limit),
            remaining=remaining(current),
            reset_at=seconds(decision.now_us + until_us(current)),
        )
    return bytes(response.SerializeToString())


def _denied_response(decision: Decision, rejection: Rejection, now_s: float) -> bytes:
    """Encode a denial that no limit caused: the caller is blocked, or its key is invalid."""
    descriptor_plans = decision.template.descriptor_plans
    rule = (
        descriptor_plans[rejection.descriptor_index].rule
        if rejection.descriptor_index < len(descriptor_plans)
        else None
    )
    response = LimiterCheckResponse(
        reason=rejection.reason,
        http_status=rejection.status,
        rule=rule_path(decision.template.domain, rule) if rule is not None else "",
    )
    if rejection.until_s is not None:
        response.reset_at = ceil(rejection.until_s)
        response.retry_after = max(1, ceil(rejection.until_s - now_s))
    return bytes(response.SerializeToString())


def _exempting_path(decision: Decision) -> str:
    return next(
        (
            status.descriptor_plan.rule.path
            for status in decision.statuses
            if status.descriptor_plan.unlimited and status.descriptor_plan.rule
        ),
        "",
    )


def _jitter_s(rule: Rule, draw: Draw) -> int:
    jitter_us = rule.response_policy.retry_jitter_us
    return draw(seconds(jitter_us) + 1) if jitter_us else 0


def _enforced_limits(decision: Decision) -> Iterator[tuple[Status, Rule, Step, Reading]]:
    """Yield all limits except those in shadow mode, which deny nothing."""
    for status in decision.statuses:
        if status.descriptor_plan.rule is not None:
            for step, reading in zip(status.descriptor_plan.steps, status.readings, strict=True):
                if not step.shadow_mode:
                    yield status, status.descriptor_plan.rule, step, reading
