"""refund: what to give back for an admitted call that does not go ahead: its caller left, or another place refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ratelimit_rls.core.model import Charge, Decision, Outline, Slot, Step
from ratelimit_rls.core.plan import per_outline


class Refund(NamedTuple):
    outline: Outline  # of nothing but negative costs
    numbers: tuple[int, ...]  # for each of its steps, which key of the plan it belongs to
    charged_at_us: tuple[int, ...]  # for each, when that was, on its store's clock


class _Charged(NamedTuple):
    number: int  # of the plan's key
    step: Step
    as_debt: bool  # for a slot to come


def refund(decision: Decision) -> Refund | None:
    """None if there is nothing to give back."""
    charged = tuple(_charged(decision))
    if not charged:
        return None
    numbers = tuple(one.number for one in charged)
    moments_us = decision.moments_us or (decision.now_us,) * (numbers[-1] + 1)
    made = _made(decision.outline)
    kind = tuple((one.number, one.as_debt) for one in charged)
    if kind not in made:
        made[kind] = _outline(decision.outline, charged)
    return Refund(made[kind], numbers, tuple(moments_us[number] for number in numbers))


@per_outline
def _made(_: Outline) -> dict[tuple[tuple[int, bool], ...], Outline]:
    """The outlines of its refunds so far, by what was charged: there are few, and what comes of each is kept, too."""
    return {}


def _outline(outline: Outline, charged: tuple[_Charged, ...]) -> Outline:
    # A limit that was charged as debt cannot have been unused since, which matters to how much it may be given back.
    steps = tuple(
        replace(step, cost=-step.cost, max_delay_us=step.max_delay_us if as_debt else 0) for _, step, as_debt in charged
    )
    return replace(outline, steps=steps, slots=tuple(Slot(None, (step,), 0) for step in steps))


def _charged(decision: Decision) -> Iterator[_Charged]:
    """What is charged whatever happens is not given back, and a limit that refused in shadow was never charged."""
    number = 0
    for status in decision.statuses:
        slot = status.slot
        for own, (step, reading) in enumerate(zip(slot.steps, status.readings, strict=True)):
            if step.charge is Charge.ADMITTED and step.cost > 0 and reading.allowed:
                yield _Charged(number + own, step, reading.wait_us > 0)
        number += len(slot.steps) + len(slot.watchers)
