"""Conversion of a process's counters to series of the instruments, the input of every exporter.

Series that any rule may have are present from its first call on, at zero, since the first increase of a new series is
lost when rates are computed. Series that few rules have appear once they have a value.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ratelimit_rls import __version__
from ratelimit_rls.telemetry import instruments
from ratelimit_rls.telemetry.instruments import Instrument, InstrumentKind, MergeRule
from ratelimit_rls.telemetry.metrics import (
    OTHER,
    OUTCOMES,
    SOURCES,
    CallTimes,
    LimitCounters,
    LimitSeries,
    Metrics,
    ServiceCounters,
    sanitised,
    short_method,
)
from ratelimit_rls.telemetry.series import Collected, Distribution, Series, Value, merge, without_gauges

_PROC = Path("/proc/self")

MAX_UNKNOWN_DOMAINS = 100
"""Distinguished by name. Misspelled domains are few; clients that invent domains must not create series."""


class ExternalValues(NamedTuple):
    """Values that other components keep. Reading them is fast, and must happen in the event loop's thread."""

    named: list[tuple[str, int]]
    measured: list[tuple[Series, Value]]


class MetricsSnapshot(NamedTuple):
    """All metrics of a process, by envoyproxy/ratelimit name and as series."""

    names: dict[str, int]
    series: Collected


def read_external(metrics: Metrics) -> ExternalValues:
    return ExternalValues(metrics.external_values(), metrics.external_series())


def snapshot(metrics: Metrics, external_values: ExternalValues) -> MetricsSnapshot:
    """Collect all metrics. May run in another thread than the counting one if `external_values` was read there."""
    return MetricsSnapshot(metrics.names(external_values.named), collect(metrics, external_values))


def collect(metrics: Metrics, external_values: ExternalValues | None = None) -> Collected:
    named, measured = external_values or read_external(metrics)
    totals: defaultdict[Series, float] = defaultdict(int)
    for one, number in _number_series(metrics):
        totals[one] += number
    collected: Collected = dict(totals)
    collected.update(distributions(metrics))
    collected.update({series(instruments.EXTERNAL_INSTRUMENTS[name]): number for name, number in named})
    collected.update(measured)
    return collected


def merge_snapshots(parts: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
    """Merge the metrics of several processes into those of one."""
    names: dict[str, int] = {}
    for part in parts:
        for name, count in part.names.items():
            before = names.get(name, 0)
            names[name] = max(before, count) if _merges_by_max(name) else before + count
    return MetricsSnapshot(dict(sorted(names.items())), merge([part.series for part in parts]))


def snapshot_without_gauges(whole: MetricsSnapshot) -> MetricsSnapshot:
    """Return the part that stays valid when the process has ended: counts of events, not current states."""
    names = {name: count for name, count in whole.names.items() if not _is_gauge(name)}
    return MetricsSnapshot(names, without_gauges(whole.series))


def _is_gauge(name: str) -> bool:
    instrument = instruments.EXTERNAL_INSTRUMENTS.get(name)
    return instrument is not None and instrument.kind is InstrumentKind.GAUGE


def _merges_by_max(name: str) -> bool:
    instrument = instruments.EXTERNAL_INSTRUMENTS.get(name)
    return instrument is not None and instrument.merge_rule is MergeRule.MAX


def series(instrument: Instrument, *attributes: str) -> Series:
    return Series(instrument.name, attributes)


def _number_series(metrics: Metrics) -> Iterator[tuple[Series, float]]:
    """Yield values; those of the same series must be added: paths of one rule, domains that are not distinguished."""
    for limit, counters in list(metrics.limits.items()):
        yield from _limit_series(limit, counters)
    for named, passed in list(metrics.passes.items()):
        yield series(instruments.DECISIONS, *named, "rules"), passed.count
    for number, (domain, count) in enumerate(list(metrics.domains_not_found.items())):
        yield series(instruments.UNKNOWN_DOMAINS, domain if number < MAX_UNKNOWN_DOMAINS else OTHER), count
    yield from _service_series(metrics.service)
    for method, times in metrics.calls.items():
        yield series(instruments.REFERENCE_REQUESTS, short_method(method)), times.count
    yield series(instruments.WORKERS), 1
    yield series(instruments.BUILD, __version__), 1
    yield from _process_series()


def _limit_series(limit: LimitSeries, counters: LimitCounters) -> Iterator[tuple[Series, float]]:
    rule = limit.domain, limit.rule
    for number, count in enumerate(counters.outcomes):
        outcome, source = OUTCOMES[number // len(SOURCES)], SOURCES[number % len(SOURCES)]
        if count or (outcome != "shadowed" and source == "store"):
            yield series(instruments.DECISIONS, *rule, outcome, source), count
    yield series(instruments.HITS, *rule, "ok"), counters.within_limit
    yield series(instruments.HITS, *rule, "over_limit"), counters.denied
    if counters.shadow_mode:
        yield series(instruments.HITS, *rule, "shadowed"), counters.shadow_mode
    yield series(instruments.NEAR_LIMIT, *rule), counters.near_limit
    for state, count in ("warning", counters.state_warning), ("throttled", counters.state_throttled):
        if count:
            yield series(instruments.STATES, *rule, state), count
    keys = _reference_keys(limit)
    for name, instrument in instruments.REFERENCE_LIMITS.items():
        yield series(instrument, *keys), getattr(counters, name)


def _reference_keys(limit: LimitSeries) -> tuple[str, str, str]:
    """Return domain, key1 and key2: levels below the second are summed in it, as in envoyproxy/ratelimit."""
    if limit.path == OTHER:
        return limit.domain, OTHER, ""
    key1, _, rest = sanitised(limit.path.removeprefix(f"{limit.domain}.")).partition(".")
    return sanitised(limit.domain), key1, rest.partition(".")[0]


def _service_series(service: ServiceCounters) -> Iterator[tuple[Series, float]]:
    yield series(instruments.GLOBAL_SHADOW), service.global_shadow_mode
    yield series(instruments.CALL_ERRORS), service.service_error
    for reason in "deadline_exceeded", "overloaded", "unavailable", "unknown_state":
        yield series(instruments.STORE_FAILURES, reason), getattr(service, reason)
    for policy in "allow", "deny", "local", "error":
        yield series(instruments.FALLBACK_DECISIONS, policy), getattr(service, f"store_failure_{policy}")
    yield series(instruments.RULES_LOADS, "success"), service.config_load_success
    yield series(instruments.RULES_LOADS, "error"), service.config_load_error
    yield series(instruments.REFERENCE_LOADED), service.config_load_success
    yield series(instruments.REFERENCE_REJECTED), service.config_load_error
    yield series(instruments.REFERENCE_ERRORS, "redis_error"), service.redis_error
    yield series(instruments.REFERENCE_ERRORS, "service_error"), service.service_error


def distributions(metrics: Metrics) -> Iterator[tuple[Series, Value]]:
    """Yield the histograms."""
    for method, times in metrics.calls.items():
        for status, durations in list(times.by_status.items()):
            yield series(instruments.CALL_DURATION, "grpc", method.removeprefix("/"), status), durations.value
        yield series(instruments.REFERENCE_TIMES, short_method(method)), _all_statuses(times)
    for (store, error), durations in list(metrics.store_times.items()):
        yield series(instruments.STORE_DURATION, store, error), durations.value


def _all_statuses(times: CallTimes) -> Distribution:
    one = series(instruments.REFERENCE_TIMES)
    whole = merge({one: durations.value} for durations in list(times.by_status.values()))[one]
    assert isinstance(whole, Distribution)
    return whole


def _process_series() -> Iterator[tuple[Series, float]]:
    """Yield CPU time, memory and open files of the process, as far as available: /proc exists on Linux only."""
    times = os.times()
    yield series(instruments.CPU_TIME), times.user + times.system
    try:
        resident_pages = int((_PROC / "statm").read_text().split()[1])
        yield series(instruments.MEMORY), resident_pages * resource.getpagesize()
        yield series(instruments.OPEN_FILES), len(os.listdir(_PROC / "fd"))
    except OSError:
        return
