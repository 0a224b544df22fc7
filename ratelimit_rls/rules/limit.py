"""`rate_limit` and `limits` to the limits they describe. Each way to be refused is told apart here."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfoNotFoundError

from ratelimit_rls.core import calendar
from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.document import DescriptorDocument, RateLimitDocument
from ratelimit_rls.rules.grammar import Findings

_UNITS = {unit.name: unit for unit in Unit if unit is not Unit.UNKNOWN}

_shared = lru_cache(1024)(Limit)  # of large rules, most are equal


def compile_limits(document: DescriptorDocument, found: Findings, *, is_queue: bool = False) -> tuple[Limit, ...]:
    """None when unlimited, and less than were written after errors.

    `is_queue` is `action: throttle`: what is not written is then as an even stream needs it.
    """
    limits: list[Limit] = []
    seen: set[tuple[Algorithm, str]] = set()
    for written in document.rate_limits:
        if document.limits is not None and is_unlimited(written):
            found.error(written.position, offences.unlimited_among_limits())
            continue
        default = _DEFAULT
        if is_queue:
            default = _QUEUE if document.limits is None and not _is_calendar(written) else _BESIDE_QUEUE
        limit = _compile_limit(written, default, found)
        if limit is None:
            continue
        if document.limits is not None:
            if (limit.algorithm, limit.window) in seen:
                found.error(written.position, offences.same_window_twice(limit))
            seen.add((limit.algorithm, limit.window))
        limits.append(limit)
    if document.limits is not None and not document.limits.value:
        found.error(document.limits.position, offences.no_limits())
    return tuple(limits)


def is_unlimited(written: RateLimitDocument) -> bool:
    return written.unlimited is not None and written.unlimited.value


def _is_calendar(written: RateLimitDocument) -> bool:
    return written.calendar is not None and written.calendar.value


class _Default(NamedTuple):
    """What is not written."""

    algorithm: Algorithm
    burst: int | None  # None: requests_per_unit


_DEFAULT = _Default(Algorithm.FIXED_WINDOW, None)
_QUEUE = _Default(Algorithm.LEAKY_BUCKET, 1)
_BESIDE_QUEUE = _Default(Algorithm.FIXED_WINDOW, 1)  # of several limits, only those that say so hold calls


def _compile_limit(written: RateLimitDocument, default: _Default, found: Findings) -> Limit | None:
    """None when unlimited, and after an error."""
    name = written.name.value if written.name else ""
    _check_replaces(written, name, found)
    algorithm = _algorithm(written, default.algorithm, found)
    unit = _unit(written, found)
    multiplier = _multiplier(written, found)
    if unit is None or algorithm is None or written.is_broken:
        return None
    requests_per_unit = written.requests_per_unit.value if written.requests_per_unit else 0
    if written.burst and not algorithm.has_burst:
        found.error(written.burst.position, offences.burst_without_bucket(algorithm))
    elif written.burst and requests_per_unit == 0:
        found.error(written.burst.position, offences.burst_beside_zero())
    elif written.burst and written.burst.value == 0:
        found.error(written.burst.position, offences.burst_of_nothing())
    if requests_per_unit == 0:
        # Whatever the algorithm, every hit is over: none of them has to know how to divide by it.
        algorithm = Algorithm.FIXED_WINDOW
    if algorithm is Algorithm.SLIDING_LOG and requests_per_unit > offences.LONGEST_SLIDING_LOG:
        found.error((written.requests_per_unit or written).position, offences.log_too_long(requests_per_unit))
    burst = 0
    if algorithm.has_burst:
        burst = written.burst.value if written.burst else default.burst or requests_per_unit
    timezone = _timezone(written, unit, algorithm, multiplier, found)
    limit = _shared(requests_per_unit, unit, algorithm, burst, name, multiplier, timezone)
    if burst and burst * limit.window_us > offences.LONGEST_FILL_US * requests_per_unit:
        found.error((written.burst or written.unit_multiplier or written).position, offences.fills_too_slowly(limit))
    return limit


def _unit(written: RateLimitDocument, found: Findings) -> Unit | None:
    """None when unlimited, and after an error."""
    text = written.unit.value if written.unit else ""
    unit = _UNITS.get(text.upper())
    if is_unlimited(written):
        if unit is not None:
            found.error((written.unit or written).position, offences.unit_when_unlimited())
        return None
    if unit is None and (written.unit or not written.is_broken):
        found.error((written.unit or written).position, offences.invalid_unit(text))
    return unit


def _algorithm(written: RateLimitDocument, default: Algorithm, found: Findings) -> Algorithm | None:
    if written.algorithm is None:
        return default
    if written.algorithm.value not in offences.ALGORITHMS:
        found.error(written.algorithm.position, offences.unknown_algorithm(written.algorithm.value))
        return None
    return Algorithm(written.algorithm.value)


def _check_replaces(written: RateLimitDocument, name: str, found: Findings) -> None:
    for replaced in written.replaces:
        if not replaced.value:
            found.error(replaced.position, offences.empty_replaces())
        elif replaced.value == name:
            found.error(replaced.position, offences.replaces_itself())


def _multiplier(written: RateLimitDocument, found: Findings) -> int:
    multiplier = written.unit_multiplier
    if multiplier is None:
        return 1
    if not 1 <= multiplier.value <= offences.LARGEST_MULTIPLIER:
        found.error(multiplier.position, offences.bad_multiplier(multiplier.value))
        return 1
    return multiplier.value


def _timezone(written: RateLimitDocument, unit: Unit, algorithm: Algorithm, multiplier: int, found: Findings) -> str:
    """The zone whose calendar counts; "" when none does."""
    if written.calendar is None or not _is_calendar(written):
        if written.timezone is not None:
            found.error(written.timezone.position, offences.timezone_without_calendar())
        return ""
    at = written.calendar.position
    if unit not in calendar.UNITS:
        found.error(at, offences.no_calendar_for_unit(unit))
    if algorithm is not Algorithm.FIXED_WINDOW:
        found.error(at, offences.no_calendar_for_algorithm(algorithm))
    if multiplier != 1:
        found.error(at, offences.calendar_with_multiplier())
    if written.timezone is None:
        return "UTC"
    try:
        calendar.zone(written.timezone.value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        found.error(written.timezone.position, offences.unknown_timezone(written.timezone.value))
        return ""
    return written.timezone.value
