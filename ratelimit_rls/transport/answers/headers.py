"""Headers, one function per family: the lines that a telling makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ratelimit_rls.core.model import Reading, State, Status, Step
from ratelimit_rls.core.style import Family
from ratelimit_rls.transport.answers import structured
from ratelimit_rls.transport.answers.options import AnswerOptions
from ratelimit_rls.transport.answers.subject import refusing, spoken_of
from ratelimit_rls.transport.answers.telling import Telling
from ratelimit_rls.transport.answers.words import moment, remaining, seconds, until_us, visible

Line = tuple[str, str]
Lines = Iterable[Line]

_STATES = tuple(state.name.lower() for state in State)


def families(options: AnswerOptions) -> Mapping[Family, Callable[[Telling], Lines]]:
    """How each family is written; the reference's three have the names that the settings give them."""
    names = options.limit_header, options.remaining_header, options.reset_header

    def reference(telling: Telling) -> Lines:
        status = spoken_of(telling.decision)
        if status is None or status.step is None:
            return ()
        numbers = status.step.limit.requests_per_unit, status.remaining, status.reset_s
        return zip(names, map(str, numbers), strict=True)

    return {
        Family.REFERENCE: reference,
        Family.LEGACY: _legacy,
        Family.LEGACY_EPOCH: _legacy_epoch,
        Family.WINDOWS: _windows,
        Family.IETF: _ietf,
        Family.RETRY_AFTER: _retry_after,
        Family.RULE: _rule,
    }


def state(status: Status) -> Lines:
    """Of a rule with `warn_at`, whatever families it chooses."""
    return () if status.state is None else (("X-RateLimit-State", _STATES[status.state]),)


def _legacy(telling: Telling) -> Lines:
    return _three(telling, telling.status.reset_s)


def _legacy_epoch(telling: Telling) -> Lines:
    return _three(telling, seconds(telling.reset_at_us))  # rounded up, so it is never in the past


def _three(telling: Telling, reset: int) -> Lines:
    limit = telling.step.limit.requests_per_unit
    return (
        ("X-RateLimit-Limit", str(limit)),
        # Those who read these headers take it for granted that no more than the limit is left; a burst may be.
        ("X-RateLimit-Remaining", str(min(telling.status.remaining, limit))),
        ("X-RateLimit-Reset", str(reset)),
    )


def _windows(telling: Telling) -> Iterator[Line]:
    status, now_us = telling.status, telling.decision.now_us
    labels = telling.vocabulary.labels(status.slot)
    for label, step, reading in zip(labels, status.slot.steps, status.readings, strict=True):
        told = status.cooldown or reading  # until its end none of the windows lets anything pass
        limit = step.limit.requests_per_unit
        yield f"X-RateLimit-Limit-{label}", str(limit)
        yield f"X-RateLimit-Remaining-{label}", str(min(remaining(told), limit) if told.allowed else 0)
        yield f"X-RateLimit-Reset-{label}", moment(now_us + until_us(told))


def _ietf(telling: Telling) -> Lines:
    policies = telling.vocabulary.policies
    if telling.retry_after_s:
        # Retry-After must not be earlier than any of these. It would be where one limit refuses for good (and its wait
        # means little, then) and another for a while.
        limits = [
            (policies.strings[id(step)], 0, min(seconds(until_us(reading)), telling.retry_after_s))
            for step, reading in refusing(telling.blamed)
        ]
    else:
        limits = [
            (policies.strings[id(step)], remaining(reading) if reading.allowed else 0, seconds(until_us(reading)))
            for step, reading in _every(telling.decision.statuses)
        ]
    lines = (("RateLimit-Policy", policies.field), ("RateLimit", structured.limit_field(limits)))
    return [line for line in lines if line[1]]  # an empty list is no field at all


def _every(statuses: Iterable[Status]) -> Iterator[tuple[Step, Reading]]:
    for status in statuses:
        for step, reading in zip(status.slot.steps, status.readings, strict=True):
            if not step.shadow_mode:
                yield step, reading


def _retry_after(telling: Telling) -> Lines:
    return (("Retry-After", str(telling.retry_after_s)),) if telling.retry_after_s else ()


def _rule(telling: Telling) -> Lines:
    return (("X-RateLimit-Rule", visible(telling.path)),)
