"""The counters of a process as series of the instruments: what every exporter begins with.

A series that any rule may have is there from the first, at zero, since the first increase of one that was not is lost
to whoever computes rates. What few rules have is there once it has happened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ratelimit_rls import __version__
from ratelimit_rls.telemetry import instruments, process
from ratelimit_rls.telemetry.collected import Collected, Distribution, Series, Value, together
from ratelimit_rls.telemetry.instruments import Instrument
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


def collect(metrics: Metrics, kept: Collected | None = None) -> Collected:
    """Everything. May be done in another thread than the one that counts, if `kept` was asked for in that one."""
    totals: defaultdict[Series, float] = defaultdict(int)
    for one, number in _numbers(metrics):
        totals[one] += number
    collected: Collected = dict(totals)
    collected.update(distributions(metrics))
    collected.update(kept_by_others(metrics) if kept is None else kept)
    return collected


def kept_by_others(metrics: Metrics) -> Collected:
    """What is known to those who keep it alone, and is quickly told."""
    collected: Collected = {}
    for gauges in metrics.gauges:
        for name, number in gauges():
            collected[series(instruments.KEPT_BY_OTHERS[name])] = number
    for measured in metrics.measured:
        collected.update(measured())
    return collected


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
    shadowed = counters.shadow_mode
    yield series(instruments.HITS, *rule, "ok"), counters.within_limit
    yield series(instruments.HITS, *rule, "over_limit"), counters.over_limit - shadowed
    if shadowed:
        yield series(instruments.HITS, *rule, "shadowed"), shadowed
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
    unavailable = service.redis_error - service.late - service.overloaded
    for reason, count in ("late", service.late), ("overloaded", service.overloaded), ("unavailable", unavailable):
        yield series(instruments.STORE_FAILURES, reason), count
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
