"""Which descriptors of a call an answer speaks of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ratelimit_rls.core.model import Code, Decision, Reading, Status, Step

_OVER_LIMIT = Code.OVER_LIMIT  # every refusal asks for it several times


def spoken_of(decision: Decision) -> Status | None:
    """The status whose numbers become headers, whatever the verdict; None when no limit applied at all.

    The last refusal that is not a quota's, else the first status with the least remaining (reference behaviour): a
    quota's refusal is one among many, and need not be why the call was refused.
    """
    least: Status | None = None
    refusal: Status | None = None
    for status in decision.statuses:
        if status.step is None:
            continue
        if least is None or status.remaining < least.remaining:
            least = status
        if status.code is _OVER_LIMIT and not status.step.quota_mode:
            refusal = status
    return refusal or least


def subject(decision: Decision, blamed: Sequence[Status]) -> Status | None:
    """The same, but of a refusal always one that refuses.

    Where all quotas of a call are used up, the reference may speak of a limit that has nothing left and still let the
    call pass. Its three headers are kept as they are; whatever else is told names what refused.
    """
    return blamed[-1] if blamed else spoken_of(decision)


def blamed(decision: Decision) -> Sequence[Status]:
    """What a refused caller has to wait for: the call passes once all of these would. Nothing for a call that passes.

    Every refusal, except that of used-up quotas only one must come back, and only if no other is left: it is the one
    that does so first, and stands before the others. One that the call would never fit into does not come back for it.
    """
    if decision.code is not _OVER_LIMIT:
        return ()
    if len(decision.statuses) == 1:  # as most calls have; it refused, since the call is refused
        return decision.statuses
    refusals: list[Status] = []
    quotas: list[Status] = []
    quota_passes = decision.outline.quota_passes
    for status in decision.statuses:
        step = status.step
        if step is None:
            continue
        if status.code is _OVER_LIMIT:
            (quotas if step.quota_mode else refusals).append(status)
        elif step.quota_mode:
            quota_passes = True
    if quotas and not quota_passes:
        return [min(quotas, key=lambda status: (_never_passes(status), status.reset_s)), *refusals]
    return refusals


def _never_passes(status: Status) -> bool:
    """Whether the call costs more than one of the limits ever has, be there a cooldown or not."""
    return any(reading.retry_us == -1 for reading in status.readings)


def retry_after_s(blamed: Sequence[Status]) -> int:
    """Whole seconds after which the call passes if nobody else comes; at least one, since now it does not."""
    longest_s = 1
    for status in blamed:
        if status.reset_s > longest_s:
            longest_s = status.reset_s
    return longest_s


def refusing(blamed: Iterable[Status]) -> Iterator[tuple[Step, Reading]]:
    """The limits that refuse, and for how long; during a cooldown all of the descriptor's, for as long as it lasts."""
    for status in blamed:
        cooldown = status.cooldown
        for step, reading in zip(status.slot.steps, status.readings, strict=True):
            if not step.shadow_mode and (cooldown is not None or not reading.allowed):
                yield step, cooldown or reading
