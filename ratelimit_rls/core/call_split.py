"""Calls split by descriptor: parts decided in different places, combined into one verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ratelimit_rls.core.model import DescriptorPlan, LimitState, PlanTemplate
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
        slots = tuple(template.slots[number] for number in numbers)
        others = [slot for number, slot in enumerate(template.slots) if number not in numbers]
        quota_elsewhere = any(step.quota_mode for slot in others for step in slot.steps)
        part = parts[numbers] = replace(
            template,
            slots=slots,
            steps=tuple(step for slot in slots for step in slot.steps),
            quota_passes=template.quota_passes or quota_elsewhere,
            can_wait=any(step.max_delay_us and step.cost > 0 for slot in slots for step in slot.steps),
        )
    return part


def key_ranges(slots: Sequence[DescriptorPlan]) -> list[range]:
    """Return, for each descriptor, the indexes of its keys in the plan."""
    ranges = []
    at = 0
    for slot in slots:
        ranges.append(range(at, at + len(slot.steps) + len(slot.watchers)))
        at = ranges[-1].stop
    return ranges


def is_denied(slots: Sequence[DescriptorPlan], readings: Sequence[LimitState], quota_passes: bool) -> bool:
    """Return the verdict over states from several places, as lua/decide.lua computes it for states from one."""
    quotas = [True] if quota_passes else []
    for slot, numbers in zip(slots, key_ranges(slots), strict=True):
        if not slot.steps:
            continue
        fails = not all(_passes(slot, readings[numbers.start : numbers.stop]))
        if slot.steps[0].quota_mode:
            quotas.append(not fails)
        elif fails:
            return True
    return bool(quotas) and not any(quotas)


def _passes(slot: DescriptorPlan, readings: Sequence[LimitState]) -> Iterator[bool]:
    for step, reading in zip(slot.steps, readings, strict=False):
        yield step.shadow_mode or reading.allowed
    for reading in readings[len(slot.steps) :]:  # a cooldown denies, a warning never does
        yield reading.allowed
