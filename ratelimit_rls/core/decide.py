"""decide: what to tell the caller, from what the store said.

The verdict itself is the store's: what was spent hung on it, so it is computed once, where the spending is
(lua/decide.lua). Here it is put into words.
"""

from __future__ import annotations

from ratelimit_rls.core.model import Answer, Code, Decision, Outline, Reading, Slot, Status, Step

UNLIMITED_REMAINING = 2**32 - 1
"""What the reference tells of an unlimited descriptor: the largest uint32."""


def decide(outline: Outline, answer: Answer | None) -> Decision:
    """`answer` is None exactly when the outline has no steps."""
    if answer is None:
        return Decision(Code.OK, tuple([_unmetered(slot) for slot in outline.slots]), outline)
    readings = iter(answer.readings)
    statuses = [
        _unmetered(slot) if slot.step is None else _metered(slot, slot.step, next(readings)) for slot in outline.slots
    ]
    over = answer.refused
    code = Code.OVER_LIMIT if over and not outline.shadow_mode else Code.OK
    return Decision(code, tuple(statuses), outline, over and outline.shadow_mode, answer.now_us)


def _unmetered(slot: Slot) -> Status:
    return Status(Code.OK, None, UNLIMITED_REMAINING if slot.unlimited else 0, 0, slot)


def _metered(slot: Slot, step: Step, reading: Reading) -> Status:
    left, retry_us, reset_us = reading
    if retry_us == 0:
        remaining = 0 if left < 0 else left if left < UNLIMITED_REMAINING else UNLIMITED_REMAINING
        return Status(Code.OK, step.limit, remaining, _seconds(reset_us), slot, reading)
    # Envoy turns duration_until_reset of a refusal into Retry-After, so a refusal tells when to come back; a request
    # that can never be admitted is told when the limit is whole again.
    wait_us = retry_us if retry_us > 0 else reset_us
    code = Code.OK if step.shadow_mode else Code.OVER_LIMIT
    return Status(code, step.limit, 0, _seconds(wait_us), slot, reading)


def _seconds(us: int) -> int:
    """Whole seconds, rounded up: Envoy cuts fractions off, and a client told 0 would come back too early."""
    return -(-us // 1_000_000)
