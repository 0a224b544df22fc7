"""The counters of a process as series of the instruments: what every exporter begins with.

What any rule may have is there from its first call on, at zero, since the first increase of a series that was not there
is lost to whoever computes rates. What few rules have is there once it has happened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ratelimit_rls import __version__
from ratelimit_rls.telemetry import instruments, process
from ratelimit_rls.telemetry.collected import Collected, Distribution, Series, Value, lasting, together
from ratelimit_rls.telemetry.instruments import Instrument, Kind, Together
from ratelimit_rls.telemetry.metrics import (
    OTHER,
    OUTCOMES,
    SOURCES,
    CallTimes,
    Limit,
    LimitCounters,
    Metrics,
    ServiceCounters,
    sanitised,
    short_method,
)

MOST_UNKNOWN_DOMAINS = 100
"""Told apart. Whoever misspells a domain does so in few ways; whoever invents domains must not make series."""


class Kept(NamedTuple):
    """What is known to those who keep it alone, and is quickly told."""

    named: list[tuple[str, int]]
    measured: list[tuple[Series, Value]]


class Told(NamedTuple):
    """All that a process knows, by the reference's names and as series."""

    names: dict[str, int]
    series: Collected


def kept_by_others(metrics: Metrics) -> Kept:
    return Kept(metrics.kept(), [one for measured in metrics.measured for one in measured()])


def tell(metrics: Metrics, kept: Kept) -> Told:
    """May be done in another thread than the one that counts, if `kept` was asked for in that one."""
    return Told(metrics.names(kept.named), collect(metrics, kept))


def collect(metrics: Metrics, kept: Kept | None = None) -> Collected:
    named, measured = kept or kept_by_others(metrics)
    totals: defaultdict[Series, float] = defaultdict(int)
    for one, number in _numbers(metrics):
        totals[one] += number
    collected: Collected = dict(totals)
    collected.update(distributions(metrics))
    collected.update({series(instruments.KEPT_BY_OTHERS[name]): number for name, number in named})
    collected.update(measured)
    return collected


def told_together(parts: Sequence[Told]) -> Told:
    """What several processes know, as if they were one."""
    names: dict[str, int] = {}
    for part in parts:
        for name, count in part.names.items():
            before = names.get(name, 0)
            names[name] = max(before, count) if _is_the_most(name) else before + count
    return Told(dict(sorted(names.items())), together([part.series for part in parts]))


def lasting_of(told: Told) -> Told:
    """What stays true when the process that told it is gone: what happened, and not how things stand."""
    names = {name: count for name, count in told.names.items() if not _is_gauge(name)}
    return Told(names, lasting(told.series))


def _is_gauge(name: str) -> bool:
    kept = instruments.KEPT_BY_OTHERS.get(name)
    return kept is not None and kept.kind is Kind.GAUGE


def _is_the_most(name: str) -> bool:
    kept = instruments.KEPT_BY_OTHERS.get(name)
    return kept is not None and kept.together is Together.MOST


def series(instrument: Instrument, *attributes: str) -> Series:
    return Series(instrument.name, attributes)


def _numbers(metrics: Metrics) -> Iterator[tuple[Series, float]]:
    """Several of one series are to be added up: paths of the same rule, domains that are not told apart."""
    for limit, counters in list(metrics.limits.items()):
        yield from _of_limit(limit, counters)
    for named, passed in list(metrics.passes.items()):
        yield series(instruments.DECISIONS, *named, "rules"), passed.count
    for number, (domain, count) in enumerate(list(metrics.domains_not_found.items())):
        yield series(instruments.UNKNOWN_DOMAINS, domain if number < MOST_UNKNOWN_DOMAINS else OTHER), count
    yield from _of_service(metrics.service)
    for method, times in metrics.calls.items():
        yield series(instruments.REFERENCE_REQUESTS, short_method(method)), times.count
    yield series(instruments.WORKERS), 1
    yield series(instruments.BUILD, __version__), 1
    yield from process.series()


def _of_limit(limit: Limit, counters: LimitCounters) -> Iterator[tuple[Series, float]]:
    rule = limit.domain, limit.rule
    for number, count in enumerate(counters.outcomes):
        outcome, source = OUTCOMES[number // len(SOURCES)], SOURCES[number % len(SOURCES)]
        if count or (outcome != "shadowed" and source == "store"):
            yield series(instruments.DECISIONS, *rule, outcome, source), count
    yield series(instruments.HITS, *rule, "ok"), counters.within_limit
    yield series(instruments.HITS, *rule, "over_limit"), counters.refused
    if counters.shadow_mode:
        yield series(instruments.HITS, *rule, "shadowed"), counters.shadow_mode
    yield series(instruments.NEAR_LIMIT, *rule), counters.near_limit
    for state, count in ("warning", counters.state_warning), ("throttled", counters.state_throttled):
        if count:
            yield series(instruments.STATES, *rule, state), count
    keys = _reference_keys(limit)
    for name, instrument in instruments.REFERENCE_LIMITS.items():
        yield series(instrument, *keys), getattr(counters, name)


def _reference_keys(limit: Limit) -> tuple[str, str, str]:
    """domain, key1 and key2: levels below the second are summed in it, as the reference does."""
    if limit.path == OTHER:
        return limit.domain, OTHER, ""
    key1, _, rest = sanitised(limit.path.removeprefix(f"{limit.domain}.")).partition(".")
    return sanitised(limit.domain), key1, rest.partition(".")[0]


def _of_service(service: ServiceCounters) -> Iterator[tuple[Series, float]]:
    yield series(instruments.GLOBAL_SHADOW), service.global_shadow_mode
    yield series(instruments.CALL_ERRORS), service.service_error
    for reason in "late", "overloaded", "unavailable":
        yield series(instruments.STORE_FAILURES, reason), getattr(service, reason)
    for policy in "allow", "deny", "local", "error":
        yield series(instruments.FALLBACK_DECISIONS, policy), getattr(service, f"store_failure_{policy}")
    yield series(instruments.RULES_LOADS, "success"), service.config_load_success
    yield series(instruments.RULES_LOADS, "error"), service.config_load_error
    yield series(instruments.REFERENCE_LOADED), service.config_load_success
    yield series(instruments.REFERENCE_REFUSED), service.config_load_error
    yield series(instruments.REFERENCE_ERRORS, "redis_error"), service.redis_error
    yield series(instruments.REFERENCE_ERRORS, "service_error"), service.service_error


def distributions(metrics: Metrics) -> Iterator[tuple[Series, Value]]:
    """The histograms of it."""
    for method, times in metrics.calls.items():
        for status, durations in list(times.by_status.items()):
            yield series(instruments.CALL_DURATION, "grpc", method.removeprefix("/"), status), durations.value
        yield series(instruments.REFERENCE_TIMES, short_method(method)), _whatever_the_status(times)
    for (store, error), durations in list(metrics.store_times.items()):
        yield series(instruments.STORE_DURATION, store, error), durations.value


def _whatever_the_status(times: CallTimes) -> Distribution:
    one = series(instruments.REFERENCE_TIMES)
    whole = together({one: durations.value} for durations in list(times.by_status.values()))[one]
    assert isinstance(whole, Distribution)
    return whole
