"""Calls split by descriptor: the parts, and the verdict over all of them."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.call_split import is_denied, key_ranges, select_descriptors
from ratelimit_rls.core.model import Charge, DescriptorPlan, Limit, Penalty, PlanTemplate, Reading, Step, Unit

OK = Reading(5, 0, 0)
DELAYED = Reading(-1, -1000, 0)
OVER = Reading(0, 1_000_000, 0)
NEVER = Reading(0, -1, 0)


def descriptor_plan(
    limits: int = 1, *, shadow: bool = False, quota: bool = False, penalty: bool = False, delay: int = 0
) -> DescriptorPlan:
    step = Step(Limit(10, Unit.MINUTE), 1, Charge.ADMITTED, shadow, quota, delay)
    return DescriptorPlan(None, (step,) * limits, 1, watchers=(Penalty(1, 1, (1,)),) if penalty else ())


def template(*descriptor_plans: DescriptorPlan, quota_passes: bool = False) -> PlanTemplate:
    return PlanTemplate(
        "d", True, tuple(step for one in descriptor_plans for step in one.steps), descriptor_plans, quota_passes
    )


def test_key_ranges_cover_limits_then_watchers() -> None:
    assert key_ranges([descriptor_plan(2, penalty=True), descriptor_plan(0), descriptor_plan()]) == [
        range(3),
        range(3, 3),
        range(3, 4),
    ]


def test_part_has_selected_descriptors_and_is_cached() -> None:
    first, second, third = descriptor_plan(), descriptor_plan(2), descriptor_plan(delay=5)
    whole = template(first, second, third)
    part = select_descriptors(whole, (0, 1))

    assert part.descriptor_plans == (first, second)
    assert len(part.steps) == 3
    assert not part.can_wait
    assert select_descriptors(whole, (2,)).can_wait
    assert select_descriptors(whole, (0, 1)) is part


def test_quotas_of_a_part_do_not_deny_if_another_part_has_quotas() -> None:
    assert select_descriptors(template(descriptor_plan(quota=True), descriptor_plan(quota=True)), (0,)).quota_passes
    assert not select_descriptors(template(descriptor_plan(quota=True), descriptor_plan()), (0,)).quota_passes
    assert select_descriptors(
        template(descriptor_plan(quota=True), descriptor_plan(), quota_passes=True), (0,)
    ).quota_passes


@pytest.mark.parametrize(
    ("descriptor_plans", "readings", "denied"),
    [
        ([descriptor_plan(), descriptor_plan()], [OK, OK], False),
        ([descriptor_plan(), descriptor_plan()], [OK, OVER], True),
        ([descriptor_plan(), descriptor_plan()], [NEVER, OK], True),
        ([descriptor_plan(), descriptor_plan()], [OK, DELAYED], False),
        ([descriptor_plan(shadow=True), descriptor_plan()], [OVER, OK], False),
        ([descriptor_plan(2), descriptor_plan()], [OK, OVER, OK], True),
        ([descriptor_plan(penalty=True)], [OK, OVER], True),
        ([descriptor_plan(penalty=True)], [OK, OK], False),
        ([descriptor_plan(quota=True), descriptor_plan(quota=True)], [OVER, OK], False),
        ([descriptor_plan(quota=True), descriptor_plan(quota=True)], [OVER, OVER], True),
        ([descriptor_plan(2, quota=True), descriptor_plan(quota=True)], [OVER, OK, OVER], True),
        ([descriptor_plan(quota=True), descriptor_plan()], [OK, OVER], True),
        ([descriptor_plan(0), descriptor_plan()], [OK], False),
    ],
)
def test_any_limit_denies_but_quotas_only_together(
    descriptor_plans: list[DescriptorPlan], readings: list[Reading], denied: bool
) -> None:
    assert is_denied(descriptor_plans, readings, quota_passes=False) is denied


def test_quota_without_limit_passes() -> None:
    assert not is_denied([descriptor_plan(quota=True)], [OVER], quota_passes=True)
    assert is_denied([descriptor_plan()], [OVER], quota_passes=True)
