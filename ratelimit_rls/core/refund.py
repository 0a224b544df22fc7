"""refund: what to give back for an admitted call whose caller left before it was answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ratelimit_rls.core.model import Charge, Decision, Outline, Slot, Step


class Refund(NamedTuple):
    outline: Outline  # of nothing but negative costs
    numbers: tuple[int, ...]  # for each of its steps, which key of the plan it belongs to
    charged_at_us: int  # on the store's clock


def refund(decision: Decision) -> Refund | None:
    """None if there is nothing to give back."""
    charged = list(_charged(decision))
    if not charged:
        return None
    steps = tuple(replace(step, cost=-step.cost) for _, step in charged)
    slots = tuple(Slot(None, (step,), 0) for step in steps)
    outline = replace(decision.outline, steps=steps, slots=slots)
    return Refund(outline, tuple(number for number, _ in charged), decision.now_us)


def _charged(decision: Decision) -> Iterator[tuple[int, Step]]:
    """What is charged whatever happens is not given back, and a limit that refused in shadow was never charged."""
    number = 0
    for status in decision.statuses:
        slot = status.slot
        for own, (step, reading) in enumerate(zip(slot.steps, status.readings, strict=True)):
            if step.charge is Charge.ADMITTED and step.cost > 0 and reading.allowed:
                yield number + own, step
        number += len(slot.steps) + len(slot.watchers)
