"""A call in parts: some of its descriptors decided here and some there, and one verdict over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ratelimit_rls.core.model import Outline, Reading, Slot
from ratelimit_rls.core.plan import per_outline


@per_outline
def _parts_made(_: Outline) -> dict[tuple[int, ...], Outline]:
    return {}


def part_of(outline: Outline, numbers: tuple[int, ...]) -> Outline:
    """The same call with only these of its descriptors, made once.

    A quota elsewhere in the call may still pass, so the quotas of a part never refuse it by themselves.
    """
    parts = _parts_made(outline)
    part = parts.get(numbers)
    if part is None:
        slots = tuple(outline.slots[number] for number in numbers)
        others = [slot for number, slot in enumerate(outline.slots) if number not in numbers]
        quota_elsewhere = any(step.quota_mode for slot in others for step in slot.steps)
        part = parts[numbers] = replace(
            outline,
            slots=slots,
            steps=tuple(step for slot in slots for step in slot.steps),
            quota_passes=outline.quota_passes or quota_elsewhere,
            can_wait=any(step.max_delay_us and step.cost > 0 for slot in slots for step in slot.steps),
        )
    return part


def key_numbers(slots: Sequence[Slot]) -> list[range]:
    """For each descriptor, the numbers of its keys in the plan."""
    ranges = []
    at = 0
    for slot in slots:
        ranges.append(range(at, at + len(slot.steps) + len(slot.watchers)))
        at = ranges[-1].stop
    return ranges


def is_refused(slots: Sequence[Slot], readings: Sequence[Reading], quota_passes: bool) -> bool:
    """The verdict over readings from several places: what lua/decide.lua says of readings from one."""
    quotas = [True] if quota_passes else []
    for slot, numbers in zip(slots, key_numbers(slots), strict=True):
        if not slot.steps:
            continue
        fails = not all(_passes(slot, readings[numbers.start : numbers.stop]))
        if slot.steps[0].quota_mode:
            quotas.append(not fails)
        elif fails:
            return True
    return bool(quotas) and not any(quotas)


def _passes(slot: Slot, readings: Sequence[Reading]) -> Iterator[bool]:
    for step, reading in zip(slot.steps, readings, strict=False):
        yield step.shadow_mode or reading.allowed
    for reading in readings[len(slot.steps) :]:  # a cooldown refuses, a warning never does
        yield reading.allowed
