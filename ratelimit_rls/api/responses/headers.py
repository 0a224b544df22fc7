"""Response headers, with one function per family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ratelimit_rls.api.responses import ratelimit_fields
from ratelimit_rls.api.responses.formatting import remaining, seconds, timestamp, until_us, visible
from ratelimit_rls.api.responses.options import ResponseOptions
from ratelimit_rls.api.responses.response_context import ResponseContext
from ratelimit_rls.api.responses.status_selection import denying_limits, headline_status
from ratelimit_rls.core.model import Reading, Status, Step, WarningState
from ratelimit_rls.core.response_policy import HeaderFamily

HeaderLine = tuple[str, str]
HeaderLines = Iterable[HeaderLine]

_STATES = tuple(state.name.lower() for state in WarningState)


def header_families(options: ResponseOptions) -> Mapping[HeaderFamily, Callable[[ResponseContext], HeaderLines]]:
    """Return the function of each family. The three headers of envoyproxy/ratelimit have configurable names."""
    names = options.limit_header, options.remaining_header, options.reset_header

    def reference(context: ResponseContext) -> HeaderLines:
        status = headline_status(context.decision)
        if status is None or status.step is None:
            return ()
        numbers = status.step.limit.requests_per_unit, status.remaining, status.reset_s
        return zip(names, map(str, numbers), strict=True)

    return {
        HeaderFamily.REFERENCE: reference,
        HeaderFamily.LEGACY: _legacy,
        HeaderFamily.LEGACY_EPOCH: _legacy_epoch,
        HeaderFamily.WINDOWS: _windows,
        HeaderFamily.IETF: _ietf,
        HeaderFamily.RETRY_AFTER: _retry_after,
        HeaderFamily.RULE: _rule,
    }


def state_header(status: Status) -> HeaderLines:
    """Return the state header of a rule with `warn_at`, whichever families the rule chooses."""
    return () if status.state is None else (("X-RateLimit-State", _STATES[status.state]),)


def _legacy(context: ResponseContext) -> HeaderLines:
    return _legacy_headers(context, context.status.reset_s)


def _legacy_epoch(context: ResponseContext) -> HeaderLines:
    return _legacy_headers(context, seconds(context.reset_at_us))  # rounded up, so it is never in the past


def _legacy_headers(context: ResponseContext, reset: int) -> HeaderLines:
    limit = context.step.limit.requests_per_unit
    return (
        ("X-RateLimit-Limit", str(limit)),
        # Clients assume that no more than the limit can remain, but with a burst more can.
        ("X-RateLimit-Remaining", str(min(context.status.remaining, limit))),
        ("X-RateLimit-Reset", str(reset)),
    )


def _windows(context: ResponseContext) -> Iterator[HeaderLine]:
    status, now_us = context.status, context.decision.now_us
    labels = context.limit_labels.labels(status.descriptor_plan)
    for label, step, reading in zip(labels, status.descriptor_plan.steps, status.readings, strict=True):
        current = status.cooldown or reading  # until it ends, no window allows anything
        limit = step.limit.requests_per_unit
        yield f"X-RateLimit-Limit-{label}", str(limit)
        yield f"X-RateLimit-Remaining-{label}", str(min(remaining(current), limit) if current.allowed else 0)
        yield f"X-RateLimit-Reset-{label}", timestamp(now_us + until_us(current))


def _ietf(context: ResponseContext) -> HeaderLines:
    policies = context.limit_labels.policies
    if context.retry_after_s:
        # Retry-After must not be earlier than any of these. It would be if one limit denies the call forever (and then
        # its wait means little) and another one temporarily.
        limits = [
            (policies.strings[id(step)], 0, min(seconds(until_us(reading)), context.retry_after_s))
            for step, reading in denying_limits(context.denying)
        ]
    else:
        limits = [
            (policies.strings[id(step)], remaining(reading) if reading.allowed else 0, seconds(until_us(reading)))
            for step, reading in _enforced_limits(context.decision.statuses)
        ]
    lines = (("RateLimit-Policy", policies.field), ("RateLimit", ratelimit_fields.limit_field(limits)))
    return [line for line in lines if line[1]]  # an empty list must be omitted


def _enforced_limits(statuses: Iterable[Status]) -> Iterator[tuple[Step, Reading]]:
    for status in statuses:
        if not status.readings:  # decided without the store, which a limit in shadow mode or a refund cannot deny
            continue
        for step, reading in zip(status.descriptor_plan.steps, status.readings, strict=True):
            if not step.shadow_mode:
                yield step, reading


def _retry_after(context: ResponseContext) -> HeaderLines:
    return (("Retry-After", str(context.retry_after_s)),) if context.retry_after_s else ()


def _rule(context: ResponseContext) -> HeaderLines:
    return (("X-RateLimit-Rule", visible(context.path)),)
