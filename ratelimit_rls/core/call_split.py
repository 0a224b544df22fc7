"""Calls split by descriptor: parts decided in different places, combined into one verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ratelimit_rls.core.model import DescriptorPlan, PlanTemplate, Reading
from ratelimit_rls.core.plan import per_template


@per_template
def _parts_cache(_: PlanTemplate) -> dict[tuple[int, ...], PlanTemplate]:
    return {}


def select_descriptors(template: PlanTemplate, numbers: tuple[int, ...]) -> PlanTemplate:
    """Return the template restricted to the descriptors with these indexes. The result is cached.

    A quota in another part of the call may still pass, so the quotas of a part never deny it by themselves.
    """
    parts = _parts_cache(template)
    part = parts.get(numbers)
    if part is None:
        descriptor_plans = tuple(template.descriptor_plans[number] for number in numbers)
        others = [one for number, one in enumerate(template.descriptor_plans) if number not in numbers]
        quota_elsewhere = any(step.quota_mode for descriptor_plan in others for step in descriptor_plan.steps)
        part = parts[numbers] = replace(
            template,
            descriptor_plans=descriptor_plans,
            steps=tuple(step for descriptor_plan in descriptor_plans for step in descriptor_plan.steps),
            quota_passes=template.quota_passes or quota_elsewhere,
            can_wait=any(step.max_delay_us and step.cost > 0 for one in descriptor_plans for step in one.steps),
        )
    return part


def key_ranges(descriptor_plans: Sequence[DescriptorPlan]) -> list[range]:
    """Return, for each descriptor, the indexes of its keys in the plan."""
    ranges = []
    at = 0
    for descriptor_plan in descriptor_plans:
        ranges.append(range(at, at + len(descriptor_plan.steps) + len(descriptor_plan.watchers)))
        at = ranges[-1].stop
    return ranges


def is_denied(descriptor_plans: Sequence[DescriptorPlan], readings: Sequence[Reading], quota_passes: bool) -> bool:
    """Return the verdict over states from several places, as lua/calls.lua computes it for states from one."""
    quotas = [True] if quota_passes else []
    for descriptor_plan, numbers in zip(descriptor_plans, key_ranges(descriptor_plans), strict=True):
        if not descriptor_plan.steps:
            continue
        fails = not all(_passes(descriptor_plan, readings[numbers.start : numbers.stop]))
        if descriptor_plan.steps[0].quota_mode:
            quotas.append(not fails)
        elif fails:
            return True
    return bool(quotas) and not any(quotas)


def _passes(descriptor_plan: DescriptorPlan, readings: Sequence[Reading]) -> Iterator[bool]:
    for step, reading in zip(descriptor_plan.steps, readings, strict=False):
        yield step.shadow_mode or reading.allowed
    for reading in readings[len(descriptor_plan.steps) :]:  # a cooldown denies, a warning never does
        yield reading.allowed
