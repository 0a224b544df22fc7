"""Decision ─► the answers of RateLimiter, which tell in numbers what other doors tell in headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from random import randrange

from ratelimit_rls.core.model import Code, Decision, OnStoreFailure, Reading, Refusal, Rule, Status, Step
from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.transport.answers.subject import blamed, retry_after_s, subject
from ratelimit_rls.transport.answers.words import remaining, rule_path, seconds, until_us, used, window
from ratelimit_rls.transport.grpc.messages import LimiterCheckResponse, QuotaResponse

OVER_LIMIT = "over_limit"
"""Why a call is refused that its limits refuse; other reasons are Refusal's."""

_REFUSED = 429

Draw = Callable[[int], int]


def check_response(decision: Decision, now_s: float, draw: Draw = randrange) -> bytes:
    """`now_s` is in seconds since the epoch, for what the store was not asked. `draw` as in Answers."""
    is_refused = decision.code is Code.OVER_LIMIT
    refusal = decision.outline.refusal
    if is_refused and refusal is not None:
        return _refused(decision, refusal, now_s)
    refusals = blamed(decision)
    status = subject(decision, refusals)
    if status is None or status.step is None or status.reading is None or status.slot.rule is None:
        return bytes(LimiterCheckResponse(allowed=True, rule=_exempting(decision)).SerializeToString())
    limit, rule, reading = status.step.limit, status.slot.rule, status.reading
    answer = LimiterCheckResponse(
        allowed=not is_refused,
        current_count=used(limit, reading),
        limit=limit.requests_per_unit,
        remaining=status.remaining,
        reset_at=seconds(decision.now_us + until_us(reading)),
        rule=rule_path(decision.outline.domain, rule),
    )
    if is_refused:
        answer.retry_after = retry_after_s(refusals) + _jitter_s(rule, draw)
        answer.reason = OVER_LIMIT
        answer.http_status = rule.deny.status if rule.deny is not None else _REFUSED
    return bytes(answer.SerializeToString())


def quota_response(decision: Decision) -> bytes:
    """Raises StoreUnavailable where nothing is known: an answer without numbers would read as one without limits."""
    if decision.without_store in (OnStoreFailure.ALLOW, OnStoreFailure.DENY):
        raise StoreUnavailable("the store did not answer, so what is left is not known")
    answer = QuotaResponse(allowed=decision.code is not Code.OVER_LIMIT)
    if not answer.allowed:
        refusal = decision.outline.refusal
        answer.reason = refusal.reason if refusal is not None else OVER_LIMIT
    for status, rule, step, reading in _limits(decision):
        told = status.cooldown or reading  # until its end none of the limits lets anything pass
        answer.limits.add(
            rule=rule_path(decision.outline.domain, rule),
            limit=step.limit.requests_per_unit,
            window=window(step.limit),
            remaining=remaining(told),
            reset_at=seconds(decision.now_us + until_us(told)),
        )
    return bytes(answer.SerializeToString())


def _refused(decision: Decision, refusal: Refusal, now_s: float) -> bytes:
    """By something else than limits: who is blocked, or has no valid key."""
    slots = decision.outline.slots
    rule = slots[refusal.slot].rule if refusal.slot < len(slots) else None
    answer = LimiterCheckResponse(
        reason=refusal.reason,
        http_status=refusal.status,
        rule=rule_path(decision.outline.domain, rule) if rule is not None else "",
    )
    if refusal.until_s is not None:
        answer.reset_at = ceil(refusal.until_s)
        answer.retry_after = max(1, ceil(refusal.until_s - now_s))
    return bytes(answer.SerializeToString())


def _exempting(decision: Decision) -> str:
    return next((one.slot.rule.path for one in decision.statuses if one.slot.unlimited and one.slot.rule), "")


def _jitter_s(rule: Rule, draw: Draw) -> int:
    jitter_us = rule.style.retry_jitter_us
    return draw(seconds(jitter_us) + 1) if jitter_us else 0


def _limits(decision: Decision) -> Iterator[tuple[Status, Rule, Step, Reading]]:
    """All that hold: those on trial refuse nobody."""
    for status in decision.statuses:
        if status.slot.rule is not None:
            for step, reading in zip(status.slot.steps, status.readings, strict=True):
                if not step.shadow_mode:
                    yield status, status.slot.rule, step, reading
