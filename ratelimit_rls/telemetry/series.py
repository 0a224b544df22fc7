"""Collected metrics: a value for every series, of one process or merged from several."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ratelimit_rls.telemetry.instruments import (
    BY_NAME,
    DURATIONS_S,
    EXTERNAL_INSTRUMENTS,
    REFERENCE_TIMES,
    Instrument,
    InstrumentKind,
    MergeRule,
)


class Distribution(NamedTuple):
    """The value of a histogram."""

    counts: tuple[int, ...]  # one per bound of DURATIONS_S, and one for all above
    sum_s: float


class Series(NamedTuple):
    """A metric with a set of attribute values."""

    instrument: str  # its name
    attributes: tuple[str, ...]  # values, in the instrument's order


Value = float | Distribution  # a counter of events is an integer
Collected = dict[Series, Value]


class Durations:
    """A histogram that is being filled: an observation costs a search among thirteen bounds and two additions."""

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


def quantile(share: float, counts: Sequence[int]) -> float | None:
    """Return the duration in seconds below which this share of observations is, interpolated within its bucket.

    None without observations. If it is above the highest bound, that bound is returned, as in Prometheus.
    """
    rank, below = share * sum(counts), 0
    for (low_s, high_s), count in zip(pairwise((0.0, *DURATIONS_S)), counts, strict=False):
        if count and below + count >= rank:
            return low_s + (high_s - low_s) * (rank - below) / count
        below += count
    return DURATIONS_S[-1] if sum(counts) else None


def merge(parts: Iterable[Collected]) -> Collected:
    """Merge the metrics of several processes into those of one."""
    whole: Collected = {}
    for part in parts:
        for series, value in part.items():
            before = whole.get(series)
            whole[series] = value if before is None else _merge_values(BY_NAME[series.instrument], before, value)
    return whole


def _merge_values(instrument: Instrument, one: Value, other: Value) -> Value:
    if isinstance(one, Distribution) or isinstance(other, Distribution):
        assert isinstance(one, Distribution)
        assert isinstance(other, Distribution)
        counts = tuple(first + second for first, second in zip(one.counts, other.counts, strict=True))
        return Distribution(counts, one.sum_s + other.sum_s)
    match instrument.merge_rule:
        case MergeRule.SUM:
            return one + other
        case MergeRule.MAX:
            return max(one, other)
        case MergeRule.MIN:
            return min(one, other)


def without_gauges(collected: Collected) -> Collected:
    """Return the part that stays valid when the process has ended: counts of events, not current states.

    Counters of other servers, which every worker reports, are not part of it: after a restart of such a server, the
    last value of an ended worker would hide the new ones.
    """
    return {
        series: value
        for series, value in collected.items()
        if (instrument := BY_NAME[series.instrument]).kind is not InstrumentKind.GAUGE
        and instrument.merge_rule is MergeRule.SUM
    }


def to_json(collected: Mapping[Series, Value]) -> list[Any]:
    return [[*series, value] for series, value in collected.items()]


def from_json(rows: list[Any]) -> Collected:
    """Restore what `to_json` made; JSON has lists instead of tuples."""
    return {
        Series(name, tuple(attributes)): Distribution(tuple(value[0]), value[1]) if isinstance(value, list) else value
        for name, attributes, value in rows
    }


def kind_of(name: str) -> InstrumentKind:
    """Return the kind of a name in Metrics.names(): external values have their own, all others are counters."""
    external = EXTERNAL_INSTRUMENTS.get(name)
    return external.kind if external is not None else InstrumentKind.COUNTER


def timers(collected: Collected) -> Iterator[tuple[str, Distribution]]:
    """Yield the durations of calls by method, under their statsd names."""
    for series, value in collected.items():
        if series.instrument == REFERENCE_TIMES.name and isinstance(value, Distribution):
            yield f"ratelimit_server.{series.attributes[0]}.response_time", value
