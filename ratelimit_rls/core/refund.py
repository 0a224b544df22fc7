"""Refunds for admitted calls that do not go ahead, because the client cancelled or another part denied the call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ratelimit_rls.core.model import Charge, Decision, DescriptorPlan, PlanTemplate, Request, Step
from ratelimit_rls.core.plan import per_template


class Refund(NamedTuple):
    template: PlanTemplate  # all costs are negative
    numbers: tuple[int, ...]  # for each of its steps, the index of the key in the plan
    charged_at_us: tuple[int, ...]  # for each, the time of the charge, on its store's clock


class _Charged(NamedTuple):
    number: int  # index of the key in the plan
    step: Step
    as_debt: bool  # charged for a future slot


def as_refund(request: Request) -> Request:
    """Return the request with refunds as descriptors: only refunds are planned for blocked callers, too."""
    return request._replace(descriptors=tuple([one._replace(is_refund=True) for one in request.descriptors]))


def refund(decision: Decision) -> Refund | None:
    """Return the refund of a decision; None if there is nothing to refund."""
    charged = tuple(_charged_ops(decision))
    if not charged:
        return None
    numbers = tuple(one.number for one in charged)
    moments_us = decision.decided_at_us or (decision.now_us,) * (numbers[-1] + 1)
    made = _refund_templates(decision.template)
    kind = tuple((one.number, one.as_debt) for one in charged)
    if kind not in made:
        made[kind] = _refund_template(decision.template, charged)
    return Refund(made[kind], numbers, tuple(moments_us[number] for number in numbers))


@per_template
def _refund_templates(_: PlanTemplate) -> dict[tuple[tuple[int, bool], ...], PlanTemplate]:
    """Return the cache of refund templates, by what was charged. There are few, and their derived data is kept too."""
    return {}


def _refund_template(template: PlanTemplate, charged: tuple[_Charged, ...]) -> PlanTemplate:
    # A counter charged as debt cannot have been unused since, which affects how much may be refunded.
    steps = tuple(
        replace(step, cost=-step.cost, max_delay_us=step.max_delay_us if as_debt else 0) for _, step, as_debt in charged
    )
    return replace(template, steps=steps, descriptor_plans=tuple(DescriptorPlan(None, (step,), 0) for step in steps))


def _charged_ops(decision: Decision) -> Iterator[_Charged]:
    """Yield the charges to refund.

    `charge: always` is not refunded, and a limit that denied in shadow mode was never charged.
    """
    number = 0
    for status in decision.statuses:
        descriptor_plan = status.descriptor_plan
        for own, (step, reading) in enumerate(zip(descriptor_plan.steps, status.readings, strict=True)):
            if step.charge is Charge.ADMITTED and step.cost > 0 and reading.allowed:
                yield _Charged(number + own, step, reading.wait_us > 0)
        number += len(descriptor_plan.steps) + len(descriptor_plan.watchers)
