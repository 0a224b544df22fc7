"""Compile `rate_limit` and `limits` to limits, with one error for each kind of mistake."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfoNotFoundError

from ratelimit_rls.core import calendar
from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.document import DescriptorDocument, RateLimitDocument
from ratelimit_rls.yaml.findings import Findings

_UNITS = {unit.name: unit for unit in Unit if unit is not Unit.UNKNOWN}

_shared = lru_cache(1024)(Limit)  # in large rules, most limits are equal


def compile_limits(document: DescriptorDocument, found: Findings, *, is_queue: bool = False) -> tuple[Limit, ...]:
    """Return the limits; () when unlimited, and only the valid ones after errors.

    `is_queue` is `action: throttle`: the defaults are then those of an even stream.
    """
    limits: list[Limit] = []
    seen: set[tuple[Algorithm, str]] = set()
    for written in document.rate_limits:
        if document.limits is not None and is_unlimited(written):
            found.error(written.position, diagnostics.unlimited_among_limits())
            continue
        default = _DEFAULT
        if is_queue:
            default = _QUEUE if document.limits is None and not _is_calendar(written) else _BESIDE_QUEUE
        limit = _compile_limit(written, default, found)
        if limit is None:
            continue
        if document.limits is not None:
            if (limit.algorithm, limit.window) in seen:
                found.error(written.position, diagnostics.same_window_twice(limit))
            seen.add((limit.algorithm, limit.window))
        limits.append(limit)
    if document.limits is not None and not document.limits.value:
        found.error(document.limits.position, diagnostics.no_limits())
    return tuple(limits)


def is_unlimited(written: RateLimitDocument) -> bool:
    return written.unlimited is not None and written.unlimited.value


def _is_calendar(written: RateLimitDocument) -> bool:
    return written.calendar is not None and written.calendar.value


class _Default(NamedTuple):
    """Defaults of one limit."""

    algorithm: Algorithm
    burst: int | None  # None: requests_per_unit


_DEFAULT = _Default(Algorithm.FIXED_WINDOW, None)
_QUEUE = _Default(Algorithm.LEAKY_BUCKET, 1)
_BESIDE_QUEUE = _Default(Algorithm.FIXED_WINDOW, 1)  # of several limits, only those with a bucket algorithm delay calls


def _compile_limit(written: RateLimitDocument, default: _Default, found: Findings) -> Limit | None:
    """Return the compiled limit; None when unlimited, and after an error."""
    name = written.name.value if written.name else ""
    _check_replaces(written, name, found)
    algorithm = _algorithm(written, default.algorithm, found)
    unit = _unit(written, found)
    multiplier = _multiplier(written, found)
    if unit is None or algorithm is None or written.is_broken:
        return None
    requests_per_unit = written.requests_per_unit.value if written.requests_per_unit else 0
    if written.burst and not algorithm.has_burst:
        found.error(written.burst.position, diagnostics.burst_without_bucket(algorithm))
    elif written.burst and requests_per_unit == 0:
        found.error(written.burst.position, diagnostics.burst_beside_zero())
    elif written.burst and written.burst.value == 0:
        found.error(written.burst.position, diagnostics.zero_burst())
    if requests_per_unit == 0:
        # With every algorithm every hit is over the limit; none of them has to handle a division by zero.
        algorithm = Algorithm.FIXED_WINDOW
    if algorithm is Algorithm.SLIDING_LOG and requests_per_unit > diagnostics.MAX_SLIDING_LOG:
        found.error((written.requests_per_unit or written).position, diagnostics.log_too_long(requests_per_unit))
    burst = 0
    if algorithm.has_burst:
        burst = written.burst.value if written.burst else default.burst or requests_per_unit
    timezone = _timezone(written, unit, algorithm, multiplier, found)
    limit = _shared(requests_per_unit, unit, algorithm, burst, name, multiplier, timezone)
    if burst and burst * limit.window_us > diagnostics.MAX_REFILL_US * requests_per_unit:
        found.error(
            (written.burst or written.unit_multiplier or written).position, diagnostics.refills_too_slowly(limit)
        )
    return limit


def _unit(written: RateLimitDocument, found: Findings) -> Unit | None:
    """Return the unit; None when unlimited, and after an error."""
    text = written.unit.value if written.unit else ""
    unit = _UNITS.get(text.upper())
    if is_unlimited(written):
        if unit is not None:
            found.error((written.unit or written).position, diagnostics.unit_when_unlimited())
        return None
    if unit is None and (written.unit or not written.is_broken):
        found.error((written.unit or written).position, diagnostics.invalid_unit(text))
    return unit


def _algorithm(written: RateLimitDocument, default: Algorithm, found: Findings) -> Algorithm | None:
    if written.algorithm is None:
        return default
    if written.algorithm.value not in diagnostics.ALGORITHMS:
        found.error(written.algorithm.position, diagnostics.unknown_algorithm(written.algorithm.value))
        return None
    return Algorithm(written.algorithm.value)


def _check_replaces(written: RateLimitDocument, name: str, found: Findings) -> None:
    for replaced in written.replaces:
        if not replaced.value:
            found.error(replaced.position, diagnostics.empty_replaces())
        elif replaced.value == name:
            found.error(replaced.position, diagnostics.replaces_itself())


def _multiplier(written: RateLimitDocument, found: Findings) -> int:
    multiplier = written.unit_multiplier
    if multiplier is None:
        return 1
    if not 1 <= multiplier.value <= diagnostics.MAX_MULTIPLIER:
        found.error(multiplier.position, diagnostics.bad_multiplier(multiplier.value))
        return 1
    return multiplier.value


def _timezone(written: RateLimitDocument, unit: Unit, algorithm: Algorithm, multiplier: int, found: Findings) -> str:
    """Return the time zone of the calendar; "" without `calendar: true`."""
    if written.calendar is None or not _is_calendar(written):
        if written.timezone is not None:
            found.error(written.timezone.position, diagnostics.timezone_without_calendar())
        return ""
    at = written.calendar.position
    if unit not in calendar.UNITS:
        found.error(at, diagnostics.no_calendar_for_unit(unit))
    if algorithm is not Algorithm.FIXED_WINDOW:
        found.error(at, diagnostics.no_calendar_for_algorithm(algorithm))
    if multiplier != 1:
        found.error(at, diagnostics.calendar_with_multiplier())
    if written.timezone is None:
        return "UTC"
    try:
        calendar.zone(written.timezone.value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        found.error(written.timezone.position, diagnostics.unknown_timezone(written.timezone.value))
        return ""
    return written.timezone.value
