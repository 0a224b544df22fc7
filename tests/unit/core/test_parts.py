"""A call in parts: what each is, and the one verdict over what they say."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Charge, Limit, Outline, Penalty, Reading, Slot, Step, Unit
from ratelimit_rls.core.parts import is_refused, key_numbers, part_of

OK = Reading(5, 0, 0)
HELD = Reading(-1, -1000, 0)
OVER = Reading(0, 1_000_000, 0)
NEVER = Reading(0, -1, 0)


def slot(limits: int = 1, *, shadow: bool = False, quota: bool = False, penalty: bool = False, delay: int = 0) -> Slot:
    step = Step(Limit(10, Unit.MINUTE), 1, Charge.ADMITTED, shadow, quota, delay)
    return Slot(None, (step,) * limits, 1, watchers=(Penalty(1, 1, (1,)),) if penalty else ())


def outline(*slots: Slot, quota_passes: bool = False) -> Outline:
    return Outline("d", True, tuple(step for one in slots for step in one.steps), slots, quota_passes)


def test_keys_are_numbered_limits_first_then_watchers_and_none_for_a_descriptor_without_limits() -> None:
    assert key_numbers([slot(2, penalty=True), slot(0), slot()]) == [range(3), range(3, 3), range(3, 4)]


def test_a_part_has_its_own_descriptors_only_and_is_made_once() -> None:
    first, second, third = slot(), slot(2), slot(delay=5)
    whole = outline(first, second, third)
    part = part_of(whole, (0, 1))

    assert part.slots == (first, second)
    assert len(part.steps) == 3
    assert not part.can_wait
    assert part_of(whole, (2,)).can_wait
    assert part_of(whole, (0, 1)) is part


def test_the_quotas_of_a_part_do_not_refuse_it_while_another_may_pass() -> None:
    assert part_of(outline(slot(quota=True), slot(quota=True)), (0,)).quota_passes
    assert not part_of(outline(slot(quota=True), slot()), (0,)).quota_passes
    assert part_of(outline(slot(quota=True), slot(), quota_passes=True), (0,)).quota_passes


@pytest.mark.parametrize(
    ("slots", "readings", "refused"),
    [
        ([slot(), slot()], [OK, OK], False),
        ([slot(), slot()], [OK, OVER], True),
        ([slot(), slot()], [NEVER, OK], True),
        ([slot(), slot()], [OK, HELD], False),
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
def test_one_refusal_refuses_the_call_and_quotas_only_all_together(
    slots: list[Slot], readings: list[Reading], refused: bool
) -> None:
    assert is_refused(slots, readings, quota_passes=False) is refused


def test_a_quota_without_a_limit_passes() -> None:
    assert not is_refused([slot(quota=True)], [OVER], quota_passes=True)
    assert is_refused([slot()], [OVER], quota_passes=True)
