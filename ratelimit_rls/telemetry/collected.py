"""What was measured by a moment: a value for every series, of one process or of several put together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ratelimit_rls.telemetry.instruments import BY_NAME, DURATIONS_S, Instrument, Kind, Together


class Distribution(NamedTuple):
    """The value of a histogram."""

    counts: tuple[int, ...]  # one per bound of DURATIONS_S, and one for all above
    sum_s: float


class Series(NamedTuple):
    instrument: str  # its name
    attributes: tuple[str, ...]  # values, in the instrument's order


Value = float | Distribution  # a counter's is an integer, where it counts
Collected = dict[Series, Value]


class Durations:
    """A histogram under way: an observation costs a search among thirteen bounds and two additions."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(DURATIONS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(DURATIONS_S, seconds)] += times
        self._sum_s += seconds * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def value(self) -> Distribution:
        return Distribution(tuple(self._counts), self._sum_s)


def together(parts: Iterable[Collected]) -> Collected:
    """What several processes measured, as if they were one."""
    whole: Collected = {}
    for part in parts:
        for series, value in part.items():
            before = whole.get(series)
            whole[series] = value if before is None else _joined(BY_NAME[series.instrument], before, value)
    return whole


def _joined(instrument: Instrument, one: Value, other: Value) -> Value:
    if isinstance(one, Distribution) or isinstance(other, Distribution):
        assert isinstance(one, Distribution)
        assert isinstance(other, Distribution)
        counts = tuple(mine + theirs for mine, theirs in zip(one.counts, other.counts, strict=True))
        return Distribution(counts, one.sum_s + other.sum_s)
    match instrument.together:
        case Together.SUM:
            return one + other
        case Together.MOST:
            return max(one, other)
        case Together.LEAST:
            return min(one, other)


def lasting(collected: Collected) -> Collected:
    """What stays true when the process that measured it is gone: what happened, and not how things stand."""
    return {series: value for series, value in collected.items() if BY_NAME[series.instrument].kind is not Kind.GAUGE}


def to_json(collected: Mapping[Series, Value]) -> list[Any]:
    return [[*series, value] for series, value in collected.items()]


def from_json(rows: list[Any]) -> Collected:
    """As it was before it was JSON, in which a tuple is a list."""
    return {
        Series(name, tuple(attributes)): Distribution(tuple(value[0]), value[1]) if isinstance(value, list) else value
        for name, attributes, value in rows
    }
