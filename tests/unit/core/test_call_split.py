"""Calls split by descriptor: the parts, and the verdict over all of them."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.call_split import is_denied, key_ranges, select_descriptors
from ratelimit_rls.core.model import Charge, CounterOp, DescriptorPlan, Limit, LimitState, Penalty, PlanTemplate, Unit

OK = LimitState(5, 0, 0)
DELAYED = LimitState(-1, -1000, 0)
OVER = LimitState(0, 1_000_000, 0)
NEVER = LimitState(0, -1, 0)


def slot(
    limits: int = 1, *, shadow: bool = False, quota: bool = False, penalty: bool = False, delay: int = 0
) -> DescriptorPlan:
    step = CounterOp(Limit(10, Unit.MINUTE), 1, Charge.ADMITTED, shadow, quota, delay)
    return DescriptorPlan(None, (step,) * limits, 1, watchers=(Penalty(1, 1, (1,)),) if penalty else ())


def template(*slots: DescriptorPlan, quota_passes: bool = False) -> PlanTemplate:
    return PlanTemplate("d", True, tuple(step for one in slots for step in one.steps), slots, quota_passes)


def test_key_ranges_cover_limits_then_watchers() -> None:
    assert key_ranges([slot(2, penalty=True), slot(0), slot()]) == [range(3), range(3, 3), range(3, 4)]


def test_part_has_selected_descriptors_and_is_cached() -> None:
    first, second, third = slot(), slot(2), slot(delay=5)
    whole = template(first, second, third)
    part = select_descriptors(whole, (0, 1))

    assert part.slots == (first, second)
    assert len(part.steps) == 3
    assert not part.can_wait
    assert select_descriptors(whole, (2,)).can_wait
    assert select_descriptors(whole, (0, 1)) is part


def test_quotas_of_a_part_do_not_deny_if_another_part_has_quotas() -> None:
    assert select_descriptors(template(slot(quota=True), slot(quota=True)), (0,)).quota_passes
    assert not select_descriptors(template(slot(quota=True), slot()), (0,)).quota_passes
    assert select_descriptors(template(slot(quota=True), slot(), quota_passes=True), (0,)).quota_passes


@pytest.mark.parametrize(
    ("slots", "readings", "denied"),
    [
        ([slot(), slot()], [OK, OK], False),
        ([slot(), slot()], [OK, OVER], True),
        ([slot(), slot()], [NEVER, OK], True),
        ([slot(), slot()], [OK, DELAYED], False),
        ([slot(shadow=True), slot()], [OVER, OK], False),
        ([slot(2), slot()], [OK, OVER, OK], True),
        ([slot(penalty=True)], [OK, OVER], True),
        ([slot(penalty=True)], [OK, OK], False),
        ([slot(quota=True), slot(quota=True)], [OVER, OK], False),
        ([slot(quota=True), slot(quota=True)], [OVER, OVER], True),
        ([slot(2, quota=True), slot(quota=True)], [OVER, OK, OVER], True),
        ([slot(quota=True), slot()], [OK, OVER], True),
        ([slot(0), slot()], [OK], False),
    ],
)
def test_any_limit_denies_but_quotas_only_together(
    slots: list[DescriptorPlan], readings: list[LimitState], denied: bool
) -> None:
    assert is_denied(slots, readings, quota_passes=False) is denied


def test_quota_without_limit_passes() -> None:
    assert not is_denied([slot(quota=True)], [OVER], quota_passes=True)
    assert is_denied([slot()], [OVER], quota_passes=True)
