"""Turn the result of the store into a decision, or make one without the store.

The store computes the verdict (lua/calls.lua), because charging depends on it. This module derives what is reported
for each descriptor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ratelimit_rls.core.model import (
    Code,
    Decision,
    DescriptorPlan,
    OnStoreFailure,
    PlanTemplate,
    Purpose,
    Reading,
    Rejection,
    Status,
    Step,
    StoreResult,
    WarnAt,
    WarningState,
    construct,
)

UNLIMITED_REMAINING = 2**32 - 1
"""Remaining hits that envoyproxy/ratelimit reports for an unlimited descriptor: the largest uint32."""

_OK, _OVER_LIMIT, _REPORT = Code.OK, Code.OVER_LIMIT, Purpose.REPORT  # module globals: faster than attribute access

SECOND_US = 1_000_000
STORE_RETRY_US = SECOND_US
"""Retry-after for calls denied because the store did not reply: about how long a store takes to come back."""


def decision_of(template: PlanTemplate, result: StoreResult | None) -> Decision:
    """Return the decision of a call. `result` is None exactly when the template has no steps."""
    if result is None:
        if template.rejection is not None:
            return _decide_rejected(template, template.rejection)
        return Decision(Code.OK, tuple([unlimited_status(one) for one in template.descriptor_plans]), template)
    statuses = []
    at = 0
    readings = result.readings
    for descriptor_plan in template.descriptor_plans:
        first, at = at, at + len(descriptor_plan.steps)
        if first == at:
            statuses.append(unlimited_status(descriptor_plan))
        elif not descriptor_plan.watchers:
            statuses.append(_limit_status(descriptor_plan, readings[first:at]))
        else:
            limits, at = at, at + len(descriptor_plan.watchers)
            statuses.append(_watched_status(descriptor_plan, readings[first:limits], readings[limits:at]))
    denied, now_us, _, _, remembered, replayed, decided_at_us = result
    over = denied and template.purpose is not _REPORT  # what has already happened cannot be denied
    shadowed = over and template.shadow_mode
    code = _OVER_LIMIT if over and not shadowed else _OK
    fields = (code, tuple(statuses), template, shadowed, now_us, 0, -1, None, remembered, decided_at_us, replayed, None)
    decision = construct(Decision, fields)
    return _with_delay(decision, readings) if template.can_wait and not over else decision


def passes(template: PlanTemplate, result: StoreResult) -> bool:
    """Return True if the result has no more to report than that every limit passes, what it has left and its reset."""
    return template.is_plain and not (result.replayed or result.remembered or any(result.numbers[1::3]))


def reported_limit(numbers: Sequence[int], first: int, limits: int) -> int:
    """Return the index of the reading that is reported for a descriptor that passes: of the limit with the least left.

    `numbers` are those of a StoreResult. The readings of the descriptor begin at `first`.
    """
    return first if limits == 1 else min(range(first, first + 3 * limits, 3), key=numbers.__getitem__)


def _decide_rejected(template: PlanTemplate, rejection: Rejection) -> Decision:
    statuses = tuple(
        Status(Code.OVER_LIMIT, None, 0, 0, one) if number == rejection.descriptor_index else unlimited_status(one)
        for number, one in enumerate(template.descriptor_plans)
    )
    code = Code.OK if template.shadow_mode else Code.OVER_LIMIT
    return Decision(code, statuses, template, shadowed=template.shadow_mode)


def allow_without_store(template: PlanTemplate) -> Decision:
    """Return the decision for `on_store_failure: allow`. No limit is reported, since none is known."""
    statuses = tuple([unlimited_status(descriptor_plan) for descriptor_plan in template.descriptor_plans])
    return Decision(Code.OK, statuses, template, without_store=OnStoreFailure.ALLOW)


def deny_without_store(template: PlanTemplate, now_us: int) -> Decision:
    """Return the decision for `on_store_failure: deny`: every limit that can deny a call does."""
    statuses = tuple(
        [_denied_status(one) if _can_deny(one) else unlimited_status(one) for one in template.descriptor_plans]
    )
    over = template.purpose is not Purpose.REPORT and _is_over_limit(template, statuses)
    code = Code.OVER_LIMIT if over and not template.shadow_mode else Code.OK
    shadowed = over and template.shadow_mode
    return Decision(code, statuses, template, shadowed, now_us, without_store=OnStoreFailure.DENY)


def _can_deny(descriptor_plan: DescriptorPlan) -> bool:
    """Return whether a descriptor can deny a call. Refunds and limits in shadow mode cannot."""
    return (
        bool(descriptor_plan.steps) and not descriptor_plan.steps[0].shadow_mode and descriptor_plan.steps[0].cost >= 0
    )


def _denied_status(descriptor_plan: DescriptorPlan) -> Status:
    reading = Reading(0, STORE_RETRY_US, STORE_RETRY_US)
    readings = (reading,) * len(descriptor_plan.steps)
    return Status(
        Code.OVER_LIMIT, descriptor_plan.steps[0], 0, _ceil_seconds(STORE_RETRY_US), descriptor_plan, reading, readings
    )


def _is_over_limit(template: PlanTemplate, statuses: Sequence[Status]) -> bool:
    """Return the verdict as in lua/calls.lua: any limit denies a call, quotas only if none of them passes."""
    denying = [status.step for status in statuses if status.step is not None]
    if not all(step.quota_mode for step in denying):
        return True
    quotas = sum(one.steps[0].quota_mode for one in template.descriptor_plans if one.steps) + template.quota_passes
    return bool(denying) and len(denying) == quotas


def _with_delay(decision: Decision, readings: Sequence[Reading]) -> Decision:
    """Delay the decision until the latest slot of all limits."""
    wait_us, number = max((reading.wait_us, -number) for number, reading in enumerate(readings))
    return decision._replace(wait_us=wait_us, delayed_by=-number) if wait_us else decision


def unlimited_status(descriptor_plan: DescriptorPlan) -> Status:
    """Return the status of a descriptor that has no limits."""
    return Status(Code.OK, None, UNLIMITED_REMAINING if descriptor_plan.unlimited else 0, 0, descriptor_plan)


def _limit_status(descriptor_plan: DescriptorPlan, readings: tuple[Reading, ...]) -> Status:
    step, reading = descriptor_plan.steps[0], readings[0]
    if len(readings) > 1:
        step, reading = _select_limit(descriptor_plan, readings)
    left, retry_us, reset_us = reading
    if retry_us == 0 or retry_us < -1:
        remaining = 0 if left < 0 else left if left < UNLIMITED_REMAINING else UNLIMITED_REMAINING
        return construct(
            Status, (_OK, step, remaining, -(-reset_us // SECOND_US), descriptor_plan, reading, readings, None, 0, None)
        )
    # Envoy turns duration_until_reset of a denial into Retry-After, so a denial reports when to retry. A request that
    # can never be admitted gets the time until the counter is reset.
    wait_us = retry_us if retry_us > 0 else reset_us
    code = _OK if step.shadow_mode else _OVER_LIMIT
    return construct(
        Status, (code, step, 0, -(-wait_us // SECOND_US), descriptor_plan, reading, readings, None, 0, None)
    )


def _watched_status(
    descriptor_plan: DescriptorPlan, readings: tuple[Reading, ...], watched: Sequence[Reading]
) -> Status:
    status = _limit_status(descriptor_plan, readings)
    for watcher, (number, retry_us, reset_us) in zip(descriptor_plan.watchers, watched, strict=True):
        if isinstance(watcher, WarnAt):
            status = status._replace(state=WarningState(number))
            continue
        status = status._replace(violations=number)
        if retry_us > 0:  # never shorter than the wait of the limits
            cooldown = Reading(0, retry_us, reset_us)
            status = status._replace(
                code=Code.OVER_LIMIT, remaining=0, reset_s=_ceil_seconds(retry_us), reading=cooldown, cooldown=cooldown
            )
    return status


def _select_limit(descriptor_plan: DescriptorPlan, readings: Sequence[Reading]) -> tuple[Step, Reading]:
    """Return the limit to report: the one that denies (for the longest time), else the one with least left."""
    pairs = list(zip(descriptor_plan.steps, readings, strict=True))
    denying = [pair for pair in pairs if not pair[1].allowed]
    if denying:
        # -1 means never, which is longer than any wait.
        return max(denying, key=lambda pair: pair[1].retry_us if pair[1].retry_us > 0 else math.inf)
    return min(pairs, key=lambda pair: pair[1].left)


def _ceil_seconds(us: int) -> int:
    """Return whole seconds, rounded up: Envoy truncates fractions, and a client that gets 0 would retry too early."""
    return -(-us // SECOND_US)
