"""decide: what to tell the caller, from what the store said, or from nothing if it said nothing.

The verdict itself is the store's: what was spent hung on it, so it is computed once, where the spending is
(lua/decide.lua). Here it is put into words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ratelimit_rls.core.model import (
    Answer,
    Code,
    Decision,
    OnStoreFailure,
    Outline,
    Purpose,
    Reading,
    Refusal,
    Slot,
    State,
    Status,
    Step,
    WarnAt,
    filled,
)

UNLIMITED_REMAINING = 2**32 - 1
"""What the reference tells of an unlimited descriptor: the largest uint32."""

_OK, _OVER_LIMIT, _REPORT = Code.OK, Code.OVER_LIMIT, Purpose.REPORT  # looking them up takes its time

SECOND_US = 1_000_000
COME_BACK_US = SECOND_US
"""What is told to those who are refused for want of a store: about how long it takes until one is there again."""


def decide(outline: Outline, answer: Answer | None) -> Decision:
    """`answer` is None exactly when the outline has no steps."""
    if answer is None:
        if outline.refusal is not None:
            return _refused(outline, outline.refusal)
        return Decision(Code.OK, tuple([_unmetered(slot) for slot in outline.slots]), outline)
    statuses = []
    at = 0
    readings = answer.readings
    for slot in outline.slots:
        first, at = at, at + len(slot.steps)
        if first == at:
            statuses.append(_unmetered(slot))
        elif not slot.watchers:
            statuses.append(_metered(slot, readings[first:at]))
        else:
            limits, at = at, at + len(slot.watchers)
            statuses.append(_watched(slot, readings[first:limits], readings[limits:at]))
    refused, now_us, _, _, remembered, _, moments_us = answer
    over = refused and outline.purpose is not _REPORT  # what has happened cannot be refused
    shadowed = over and outline.shadow_mode
    code = _OVER_LIMIT if over and not shadowed else _OK
    told = (code, tuple(statuses), outline, shadowed, now_us, 0, -1, None, remembered, moments_us)
    decision = filled(Decision, told)
    return _held(decision, readings) if outline.can_wait and not over else decision


def _refused(outline: Outline, refusal: Refusal) -> Decision:
    statuses = tuple(
        Status(Code.OVER_LIMIT, None, 0, 0, slot) if number == refusal.slot else _unmetered(slot)
        for number, slot in enumerate(outline.slots)
    )
    code = Code.OK if outline.shadow_mode else Code.OVER_LIMIT
    return Decision(code, statuses, outline, shadowed=outline.shadow_mode)


def allowed(outline: Outline) -> Decision:
    """`on_store_failure: allow`. Nothing is known of any limit, so none is spoken of."""
    statuses = tuple([_unmetered(slot) for slot in outline.slots])
    return Decision(Code.OK, statuses, outline, without_store=OnStoreFailure.ALLOW)


def denied(outline: Outline, now_us: int) -> Decision:
    """`on_store_failure: deny`. Every limit that could refuse does, except those that no store would hear."""
    statuses = tuple([_denied(slot) if _can_refuse(slot) else _unmetered(slot) for slot in outline.slots])
    over = outline.purpose is not Purpose.REPORT and _is_over(outline, statuses)
    code = Code.OVER_LIMIT if over and not outline.shadow_mode else Code.OK
    shadowed = over and outline.shadow_mode
    return Decision(code, statuses, outline, shadowed, now_us, without_store=OnStoreFailure.DENY)


def _can_refuse(slot: Slot) -> bool:
    """What is given back is always taken, and a limit on trial refuses nobody."""
    return bool(slot.steps) and not slot.steps[0].shadow_mode and slot.steps[0].cost >= 0


def _denied(slot: Slot) -> Status:
    reading = Reading(0, COME_BACK_US, COME_BACK_US)
    readings = (reading,) * len(slot.steps)
    return Status(Code.OVER_LIMIT, slot.steps[0], 0, _seconds(COME_BACK_US), slot, reading, readings)


def _is_over(outline: Outline, statuses: Sequence[Status]) -> bool:
    """As lua/decide.lua has it: any limit refuses a call, quotas only if none of them passes."""
    refusing = [status.step for status in statuses if status.step is not None]
    if not all(step.quota_mode for step in refusing):
        return True
    quotas = sum(slot.steps[0].quota_mode for slot in outline.slots if slot.steps) + outline.quota_passes
    return bool(refusing) and len(refusing) == quotas


def _held(decision: Decision, readings: Sequence[Reading]) -> Decision:
    """All slots must have come: the last one is waited for."""
    wait_us, number = max((reading.wait_us, -number) for number, reading in enumerate(readings))
    return decision._replace(wait_us=wait_us, held_by=-number) if wait_us else decision


def _unmetered(slot: Slot) -> Status:
    return Status(Code.OK, None, UNLIMITED_REMAINING if slot.unlimited else 0, 0, slot)


def _metered(slot: Slot, readings: tuple[Reading, ...]) -> Status:
    step, reading = slot.steps[0], readings[0]
    if len(readings) > 1:
        step, reading = _spoken_of(slot, readings)
    left, retry_us, reset_us = reading
    if retry_us == 0 or retry_us < -1:
        remaining = 0 if left < 0 else left if left < UNLIMITED_REMAINING else UNLIMITED_REMAINING
        return filled(Status, (_OK, step, remaining, -(-reset_us // SECOND_US), slot, reading, readings, None, 0, None))
    # Envoy turns duration_until_reset of a refusal into Retry-After, so a refusal tells when to come back; a request
    # that can never be admitted is told when the limit is whole again.
    wait_us = retry_us if retry_us > 0 else reset_us
    code = _OK if step.shadow_mode else _OVER_LIMIT
    return filled(Status, (code, step, 0, -(-wait_us // SECOND_US), slot, reading, readings, None, 0, None))


def _watched(slot: Slot, readings: tuple[Reading, ...], watched: Sequence[Reading]) -> Status:
    status = _metered(slot, readings)
    for watcher, (number, retry_us, reset_us) in zip(slot.watchers, watched, strict=True):
        if isinstance(watcher, WarnAt):
            status = status._replace(state=State(number))
            continue
        status = status._replace(violations=number)
        if retry_us > 0:  # never shorter than what the limits ask for
            cooldown = Reading(0, retry_us, reset_us)
            status = status._replace(
                code=Code.OVER_LIMIT, remaining=0, reset_s=_seconds(retry_us), reading=cooldown, cooldown=cooldown
            )
    return status


def _spoken_of(slot: Slot, readings: Sequence[Reading]) -> tuple[Step, Reading]:
    """Of several limits the one that refuses (the longest, if several do), else the one with the least left."""
    pairs = list(zip(slot.steps, readings, strict=True))
    refusing = [pair for pair in pairs if not pair[1].allowed]
    if refusing:
        # Never (-1) is longer than any wait.
        return max(refusing, key=lambda pair: pair[1].retry_us if pair[1].retry_us > 0 else math.inf)
    return min(pairs, key=lambda pair: pair[1].left)


def _seconds(us: int) -> int:
    """Whole seconds, rounded up: Envoy cuts fractions off, and a client told 0 would come back too early."""
    return -(-us // SECOND_US)
