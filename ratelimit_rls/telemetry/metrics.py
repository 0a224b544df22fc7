"""Counters of what happened, by rule and outcome. instruments.py declares the metrics that are made from them.

Some have the names of envoyproxy/ratelimit.
A counter is a plain integer on an object that the caller holds: counting costs an addition. Exporters (/stats,
Prometheus, statsd, OTLP) read the counters on their own schedule, so that no call waits for them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from struct import pack, unpack
from typing import NamedTuple

from ratelimit_rls.core.decision import reported_limit
from ratelimit_rls.core.model import (
    Charge,
    Code,
    Decision,
    DescriptorPlan,
    OnStoreFailure,
    PlanTemplate,
    Purpose,
    Reading,
    Step,
    StoreResult,
    WarningState,
)
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.telemetry.rule_labels import rule_label
from ratelimit_rls.telemetry.series import Durations, Series, Value

MAX_PATHS = 10_000
"""Maximum number of distinct metric paths. Some contain request values (detailed_metric, value_to_metric, overrides,
unknown domains). envoyproxy/ratelimit keeps all of them for ever; here the rest is counted under `_other`."""

MAX_RULES = 10_000
"""Rules and domains distinguished during the life of a process; reloads add new ones. The rest is `_other`."""

MAX_PATH_LENGTH = 512
"""A longer path contains a request's value, and is counted under `_other`, too."""

OTHER = "_other"

ValueSource = Callable[[], Iterable[tuple[str, int]]]
"""Returns values that another component keeps, by the names of instruments.EXTERNAL_INSTRUMENTS."""

SeriesSource = Callable[[], Iterable[tuple[Series, Value]]]
"""Returns series that another component keeps."""

OUTCOMES = ("ok", "over_limit", "shadowed")
SOURCES = ("store", "cache", "fallback")
# Indexes into LimitCounters.outcomes: [outcome + source].
_OK, _OVER_LIMIT, _SHADOWED = range(0, len(OUTCOMES) * len(SOURCES), len(SOURCES))
_STORE, _CACHE, _FALLBACK = range(len(SOURCES))

# Looked up once: accessing an enum member is slow, and these are needed for every descriptor.
_OVER, _REPORT = Code.OVER_LIMIT, Purpose.REPORT


@dataclass(slots=True)
class LimitCounters:
    """The counters of one limit."""

    total_hits: int = 0
    over_limit: int = 0
    near_limit: int = 0
    over_limit_with_local_cache: int = 0
    within_limit: int = 0
    shadow_mode: int = 0
    total_negative_hits: int = 0
    # Calls, not hits, that were answered in one of the states of `warn_at`. Not in envoyproxy/ratelimit.
    state_warning: int = 0
    state_throttled: int = 0
    # The part of over_limit that was denied and did not pass in shadow mode. Not in envoyproxy/ratelimit.
    denied: int = field(default=0, compare=False)
    # Decisions, not hits: for each of OUTCOMES one count per source.
    outcomes: list[int] = field(default_factory=lambda: [0] * (len(OUTCOMES) * len(SOURCES)), compare=False)


@dataclass(slots=True)
class PassCounter:
    """The number of descriptors that passed without a counter."""

    count: int = 0


MetricCounters = tuple[LimitCounters | PassCounter, ...]
"""The metrics that a call counts in: one element per descriptor."""

_LIMIT_NAMES = tuple(each.name for each in fields(LimitCounters) if each.compare)
_STATE_NAMES = ("state_warning", "state_throttled")  # exported only above 0: few rules use them


@dataclass(slots=True)
class ServiceCounters:
    """The counters of calls and of rules updates."""

    config_load_success: int = 0
    config_load_error: int = 0
    global_shadow_mode: int = 0
    redis_error: int = 0
    service_error: int = 0
    # Not in envoyproxy/ratelimit: the kinds of redis_error, and all of them by the fallback.
    overloaded: int = 0
    deadline_exceeded: int = 0
    unavailable: int = 0
    unknown_state: int = 0
    store_failure_allow: int = 0
    store_failure_deny: int = 0
    store_failure_local: int = 0
    store_failure_error: int = 0


class CallTimes:
    """Durations of the calls of one gRPC method, by status."""

    def __init__(self) -> None:
        self.by_status: defaultdict[str, Durations] = defaultdict(Durations)
        self._ok = self.by_status["OK"]

    def answered(self, seconds: float, times: int) -> None:
        self._ok.observe(seconds, times)

    def failed(self, seconds: float, status: str) -> None:
        """`status` is the name of a gRPC status code."""
        self.by_status[status].observe(seconds)

    @property
    def count(self) -> int:
        return sum(durations.count for durations in self.by_status.values())


@lru_cache(4096)
def near_limit(capacity: int, ratio: float) -> int:
    """Return the count above which hits are near the limit, in single precision as in envoyproxy/ratelimit."""
    return int(_single(_single(capacity) * _single(ratio)))


def _single(number: float) -> float:
    """Return the nearest 32-bit float."""
    nearest: float = unpack("f", pack("f", number))[0]
    return nearest


_IPV4 = re.compile(r"\d+\.\d+\.\d+\.\d+")


def sanitised(path: str) -> str:
    """Replace what has a meaning in statsd: colons, bars, and the dots of addresses (as in envoyproxy/ratelimit)."""
    return _IPV4.sub(lambda found: found[0].replace(".", "_"), path.replace(":", "_").replace("|", "_"))


def short_method(method: str) -> str:
    """Return `ShouldRateLimit` for `/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit`."""
    return method.rpartition("/")[2]


_Thresholds = tuple[int, int, int]
"""Hits of a call, capacity of the limit, and the count above which hits are near it."""


class LimitSeries(NamedTuple):
    """The labels by which hits are counted."""

    path: str  # as in envoyproxy/ratelimit
    domain: str
    rule: str


class Metrics:
    def __init__(self, near_limit_ratio: float = 0.8) -> None:
        self.service = ServiceCounters()
        self.limits: dict[LimitSeries, LimitCounters] = {}
        self.passes: dict[tuple[str, str, str], PassCounter] = {}  # by domain, rule and outcome
        self.domains_not_found: dict[str, int] = {}
        self.calls: dict[str, CallTimes] = {}  # by the full name of a method
        self.store_times: dict[tuple[str, str], Durations] = {}  # by store and type of error, "" for none
        self._value_sources: list[ValueSource] = []
        self._series_sources: list[SeriesSource] = []
        self._near_limit_ratio = near_limit_ratio
        self._thresholds_of = per_template(self._thresholds)
        self._paths: set[str] = set()
        self._labels: set[str] = set()

    def export_values(self, source: ValueSource) -> None:
        """Export the values of this source, too, everywhere."""
        self._value_sources.append(source)

    def export_series(self, source: SeriesSource) -> None:
        """Export the series of this source, too, in Prometheus and OTLP; names in /stats and statsd have no labels."""
        self._series_sources.append(source)

    def metric_counters(self, template: PlanTemplate) -> MetricCounters:
        """Return the counters for calls of this template. Keep them: looking them up is the expensive part."""
        return tuple(self._descriptor_counters(template, one) for one in template.descriptor_plans)

    def _descriptor_counters(
        self, template: PlanTemplate, descriptor_plan: DescriptorPlan
    ) -> LimitCounters | PassCounter:
        domain = self._bounded(template.domain) if template.domain_known else OTHER
        rule = descriptor_plan.rule
        if template.rejection is not None:
            name = self._bounded(rule.path) if rule else ""
            return self.passes.setdefault((domain, name, template.rejection.reason), PassCounter())
        if not descriptor_plan.steps:
            outcome = "no_rule" if rule is None else "unlimited" if descriptor_plan.unlimited else "replaced"
            return self.passes.setdefault((domain, self._bounded(rule.path) if rule else "", outcome), PassCounter())
        return self.limit(descriptor_plan.metric_path, domain, rule_label(rule))

    def limit(self, path: str, domain: str = "", rule: str = "") -> LimitCounters:
        """Return the counters of a limit, by its metric path and its rule."""
        if path not in self._paths:
            if len(self._paths) >= MAX_PATHS or len(path) > MAX_PATH_LENGTH:
                path = OTHER
            else:
                self._paths.add(path)
        return self.limits.setdefault(LimitSeries(path, domain, self._bounded(rule)), LimitCounters())

    def _bounded(self, name: str) -> str:
        """Return the name of a rule or domain, or `_other` if there are too many."""
        if name not in self._labels:
            if len(self._labels) >= MAX_RULES:
                return OTHER
            self._labels.add(name)
        return name

    def domain_not_found(self, domain: str, descriptors: int) -> None:
        if domain not in self.domains_not_found and (
            len(self.domains_not_found) >= MAX_PATHS or len(domain) > MAX_PATH_LENGTH
        ):
            domain = OTHER
        self.domains_not_found[domain] = self.domains_not_found.get(domain, 0) + descriptors

    def record(self, decision: Decision, counters: MetricCounters) -> None:
        """Count one finished decision; `counters` are those of its template.

        A replayed decision was counted before. A local one counts against this process's share of the limits.
        """
        if decision.replayed:
            return
        without_store = decision.without_store
        if without_store is not None:
            if without_store is not OnStoreFailure.LOCAL:
                self._record_policy(decision, counters)
                return
            decision = decision.share or decision
        if not decision.template.domain_known:
            self.domain_not_found(decision.template.domain, len(decision.statuses))
        if decision.shadowed:
            self.service.global_shadow_mode += 1
        remembered = decision.remembered
        source = _FALLBACK if without_store is not None else _CACHE if remembered else _STORE
        denied_outcome = _SHADOWED if decision.shadowed else _OVER_LIMIT
        is_decided = decision.template.purpose is not _REPORT  # a report only records what has happened
        for number, (code, step, _, _, _, reading, _, state, _, _) in enumerate(decision.statuses):
            counted = counters[number]
            if isinstance(counted, PassCounter):
                counted.count += 1
            elif step is not None and reading is not None:
                is_allowed = self._record_limit(counted, step, reading, code)
                if is_decided:
                    outcome = denied_outcome if code is _OVER else _OK if is_allowed else _SHADOWED
                    counted.outcomes[outcome + source] += 1
                if remembered and code is _OVER:
                    counted.over_limit_with_local_cache += step.cost
                if state:  # neither None nor NORMAL
                    counted.state_warning += state is WarningState.WARNING
                    counted.state_throttled += state is WarningState.THROTTLED

    def record_pass(self, template: PlanTemplate, result: StoreResult, counters: MetricCounters) -> None:
        """Count one call that passes all its limits, like `record`, by the result of the store."""
        numbers, at = result.numbers, 0
        for counted, thresholds in zip(counters, self._thresholds_of(template), strict=True):
            if isinstance(counted, PassCounter):
                counted.count += 1
                continue
            reported = reported_limit(numbers, at, len(thresholds))
            hits, capacity, near = thresholds[(reported - at) // 3]
            at += 3 * len(thresholds)
            counted.total_hits += hits
            counted.within_limit += hits
            counted.outcomes[_OK + _STORE] += 1
            after = capacity - numbers[reported]
            if after > near:
                counted.near_limit += hits if after - hits >= near else after - near

    def _thresholds(self, template: PlanTemplate) -> tuple[tuple[_Thresholds, ...], ...]:
        return tuple(
            tuple(self._limit_thresholds(step) for step in descriptor_plan.steps)
            for descriptor_plan in template.descriptor_plans
        )

    def _limit_thresholds(self, step: Step) -> _Thresholds:
        capacity = step.limit.burst or step.limit.requests_per_unit
        return step.cost, capacity, near_limit(capacity, self._near_limit_ratio)

    def _record_policy(self, decision: Decision, counters: MetricCounters) -> None:
        """Count a decision for which no counter moved, since the store did not answer."""
        for status, counted in zip(decision.statuses, counters, strict=True):
            if isinstance(counted, PassCounter):
                counted.count += 1
            else:
                counted.outcomes[(_OVER_LIMIT if status.code is Code.OVER_LIMIT else _OK) + _FALLBACK] += 1

    def _record_limit(self, counted: LimitCounters, step: Step, reading: Reading, code: Code) -> bool:
        """Count the hits of one limit as envoyproxy/ratelimit does: hits that cross a threshold are split at it.

        Return True if the limit allows the call.
        """
        is_allowed = reading.allowed
        hits = step.cost
        if hits < 0:
            counted.total_negative_hits -= hits
            return is_allowed
        counted.total_hits += hits
        limit = step.limit
        capacity = limit.burst or limit.requests_per_unit
        near = near_limit(capacity, self._near_limit_ratio)
        if is_allowed:
            counted.within_limit += hits
            after = capacity - reading.left
            if after > near:
                before = after - hits
                counted.near_limit += hits if before >= near else after - near
            return True
        # A denial under `admitted` spends nothing, so `left` is the value before it; under `always`, after it.
        before = capacity - reading.left - (hits if step.charge is Charge.ALWAYS else 0)
        if before >= capacity:
            over = hits
        else:
            over = before + hits - capacity
            counted.near_limit += capacity - max(near, before)
        counted.over_limit += over
        if code is Code.OK:
            counted.shadow_mode += over
        else:
            counted.denied += over
        return False

    def names(self, external_values: Iterable[tuple[str, int]] | None = None) -> dict[str, int]:
        """Return every counter under its envoyproxy/ratelimit name, sorted.

        May run in another thread than the counting one, if `external_values` was read in that one.
        """
        totals: defaultdict[str, int] = defaultdict(int)
        for name, count in self._names():
            totals[name] += count
        totals.update(self.external_values() if external_values is None else external_values)
        return dict(sorted(totals.items()))

    def external_values(self) -> list[tuple[str, int]]:
        """Return the values that other components keep, by name."""
        return [named for source in self._value_sources for named in source()]

    def external_series(self) -> list[tuple[Series, Value]]:
        """Return the series that other components keep."""
        return [one for source in self._series_sources for one in source()]

    def _names(self) -> Iterator[tuple[str, int]]:
        for (path, _, _), counters in list(self.limits.items()):
            prefix = f"ratelimit.service.rate_limit.{sanitised(path)}"
            for name in _LIMIT_NAMES:
                count = getattr(counters, name)
                if count or name not in _STATE_NAMES:
                    yield f"{prefix}.{name}", count
        for domain, count in list(self.domains_not_found.items()):
            yield f"ratelimit.service.rate_limit.{sanitised(domain)}.domain_not_found", count
        service = self.service
        yield "ratelimit.service.config_load_success", service.config_load_success
        yield "ratelimit.service.config_load_error", service.config_load_error
        yield "ratelimit.service.global_shadow_mode", service.global_shadow_mode
        yield "ratelimit.service.call.should_rate_limit.redis_error", service.redis_error
        yield "ratelimit.service.call.should_rate_limit.service_error", service.service_error
        yield "ratelimit.store.failures.overloaded", service.overloaded
        yield "ratelimit.store.failures.unavailable", service.unavailable
        yield "ratelimit.store.failures.deadline_exceeded", service.deadline_exceeded
        yield "ratelimit.store.failures.unknown_state", service.unknown_state
        yield "ratelimit.fallback.decisions.allow", service.store_failure_allow
        yield "ratelimit.fallback.decisions.deny", service.store_failure_deny
        yield "ratelimit.fallback.decisions.local", service.store_failure_local
        yield "ratelimit.fallback.decisions.error", service.store_failure_error
        for method, times in self.calls.items():
            yield f"ratelimit_server.{short_method(method)}.total_requests", times.count
