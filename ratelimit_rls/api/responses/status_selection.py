"""Selection of the descriptors that a response reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ratelimit_rls.core.model import Code, Decision, Reading, Status, Step

_OVER_LIMIT = Code.OVER_LIMIT  # used several times for each denied call


def headline_status(decision: Decision) -> Status | None:
    """Return the status whose numbers become headers, as envoyproxy/ratelimit does; None if no limit applied.

    It is the last denial that is not a quota's, otherwise the first status with the least remaining. A quota's denial
    need not be the reason why the call was denied.
    """
    least: Status | None = None
    denial: Status | None = None
    for status in decision.statuses:
        if status.step is None:
            continue
        if least is None or status.remaining < least.remaining:
            least = status
        if status.code is _OVER_LIMIT and not status.step.quota_mode:
            denial = status
    return denial or least


def reported_status(decision: Decision, denying: Sequence[Status]) -> Status | None:
    """Return the headline status, but for a denied call always one that denies it.

    If all quotas of a call are exhausted, envoyproxy/ratelimit may report a limit that has nothing remaining but
    allowed the call. Its three headers stay compatible; everything else reports what denied the call.
    """
    return denying[-1] if denying else headline_status(decision)


def denying_statuses(decision: Decision) -> Sequence[Status]:
    """Return the statuses that a denied caller has to wait for; empty for an allowed call.

    The call passes once all of them would allow it:
    * every limit that denies,
    * and one quota, if all quotas are exhausted: the one that recovers first. It comes before the others. A quota that
      the call can never fit into does not count.
    """
    if decision.code is not _OVER_LIMIT:
        return ()
    if len(decision.statuses) == 1:  # the common case; it denied the call, because the call is denied
        return decision.statuses
    denials: list[Status] = []
    quotas: list[Status] = []
    quota_passes = decision.template.quota_passes
    for status in decision.statuses:
        step = status.step
        if step is None:
            continue
        if status.code is _OVER_LIMIT:
            (quotas if step.quota_mode else denials).append(status)
        elif step.quota_mode:
            quota_passes = True
    if quotas and not quota_passes:
        return [min(quotas, key=lambda status: (_never_passes(status), status.reset_s)), *denials]
    return denials


def _never_passes(status: Status) -> bool:
    """Return whether the call costs more than one of the limits can ever allow, regardless of a cooldown."""
    return any(reading.retry_us == -1 for reading in status.readings)


def retry_after_s(denying: Sequence[Status]) -> int:
    """Return the whole seconds after which the call passes if no other call comes; at least one."""
    wait_s = 1
    for status in denying:
        if status.reset_s > wait_s:
            wait_s = status.reset_s
    return wait_s


def denying_limits(denying: Iterable[Status]) -> Iterator[tuple[Step, Reading]]:
    """Yield the denying limits with their states; during a cooldown, all limits of the descriptor with the cooldown."""
    for status in denying:
        cooldown = status.cooldown
        for step, reading in zip(status.descriptor_plan.steps, status.readings, strict=True):
            if not step.shadow_mode and (cooldown is not None or not reading.allowed):
                yield step, cooldown or reading
