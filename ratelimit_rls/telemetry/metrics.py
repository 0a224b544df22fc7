"""What happened, counted: by rule and outcome, and under the names the reference gives it.

A counter is a plain integer on an object that the caller holds: counting costs an addition. Whatever exports them
(/stats, Prometheus, statsd, OTLP) reads them when it is its turn, so that no call waits for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from struct import pack, unpack
from typing import NamedTuple

from ratelimit_rls.core.model import Charge, Code, Decision, Outline, Purpose, Reading, Slot, State, Step
from ratelimit_rls.telemetry.collected import Durations, Series, Value
from ratelimit_rls.telemetry.rule_names import told_as

MOST_PATHS = 10_000
"""Distinct metric paths kept. Some come from request values (detailed_metric, value_to_metric, overrides, unknown
domains), and the reference keeps every one for ever; here the rest is counted under `_other`."""

MOST_RULES = 10_000
"""Rules and domains told apart over the life of a process; reloads bring new ones. The rest is `_other`."""

LONGEST_PATH = 512
"""Characters of a path that is kept: a longer one has a request's value in it, and is counted under `_other` too."""

OTHER = "_other"

Gauges = Callable[[], Iterable[tuple[str, int]]]
"""Numbers that somebody else keeps, by the names of instruments.KEPT_BY_OTHERS."""

Measured = Callable[[], Iterable[tuple[Series, Value]]]
"""Series that somebody else keeps."""

OUTCOMES = ("ok", "over_limit", "shadowed")
SOURCES = ("store", "cache", "fallback")
# Where decisions are counted in LimitCounters.outcomes: at [outcome + source].
_OK, _OVER_LIMIT, _SHADOWED = range(0, len(OUTCOMES) * len(SOURCES), len(SOURCES))
_STORE, _CACHE, _FALLBACK = range(len(SOURCES))

# Looked up once: an enum's member takes its time, and these are asked for with every descriptor.
_OVER, _REPORT = Code.OVER_LIMIT, Purpose.REPORT


@dataclass(slots=True)
class LimitCounters:
    """What happened to the hits of one limit."""

    total_hits: int = 0
    over_limit: int = 0
    near_limit: int = 0
    over_limit_with_local_cache: int = 0
    within_limit: int = 0
    shadow_mode: int = 0
    total_negative_hits: int = 0
    # Calls, not hits, that were answered in one of the states of `warn_at`. Not the reference's.
    state_warning: int = 0
    state_throttled: int = 0
    # Of over_limit, what was refused and not let pass in shadow mode. Not the reference's.
    refused: int = field(default=0, compare=False)
    # Decisions, not hits: for each of OUTCOMES one count per source.
    outcomes: list[int] = field(default_factory=lambda: [0] * (len(OUTCOMES) * len(SOURCES)), compare=False)


@dataclass(slots=True)
class PassCounter:
    """Descriptors that passed without any counter."""

    count: int = 0


Counters = tuple[LimitCounters | PassCounter, ...]
"""One per descriptor of a call."""

_LIMIT_NAMES = tuple(each.name for each in fields(LimitCounters) if each.compare)
_STATE_NAMES = ("state_warning", "state_throttled")  # told of where there is something to tell: few rules have them


@dataclass(slots=True)
class ServiceCounters:
    """What happened to calls and to rules."""

    config_load_success: int = 0
    config_load_error: int = 0
    global_shadow_mode: int = 0
    redis_error: int = 0
    service_error: int = 0
    # Not the reference's: the kinds of redis_error, and all of them by what was done instead.
    overloaded: int = 0
    late: int = 0
    unavailable: int = 0
    store_failure_allow: int = 0
    store_failure_deny: int = 0
    store_failure_local: int = 0
    store_failure_error: int = 0


class CallTimes:
    """How long the calls of one gRPC method took, and how they ended."""

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
    """The count above which hits are near the limit, in single precision as the reference computes it."""
    return int(_single(_single(capacity) * _single(ratio)))


def _single(number: float) -> float:
    """The nearest 32-bit float."""
    nearest: float = unpack("f", pack("f", number))[0]
    return nearest


_IPV4 = re.compile(r"\d+\.\d+\.\d+\.\d+")


def sanitised(path: str) -> str:
    """Without what means something to statsd: colons, bars, and the dots of addresses (reference behaviour)."""
    return _IPV4.sub(lambda found: found[0].replace(".", "_"), path.replace(":", "_").replace("|", "_"))


def short_method(method: str) -> str:
    """`ShouldRateLimit` of `/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit`."""
    return method.rpartition("/")[2]


class Limit(NamedTuple):
    """What hits are counted by."""

    path: str  # in metrics, as the reference has it
    domain: str
    rule: str


class Metrics:
    def __init__(self, near_limit_ratio: float = 0.8) -> None:
        self.service = ServiceCounters()
        self.limits: dict[Limit, LimitCounters] = {}
        self.passes: dict[tuple[str, str, str], PassCounter] = {}  # by domain, rule and outcome
        self.domains_not_found: dict[str, int] = {}
        self.calls: dict[str, CallTimes] = {}  # by the full name of a method
        self.store_times: dict[tuple[str, str], Durations] = {}  # by store and type of error, "" where there is none
        self.gauges: list[Gauges] = []
        self.measured: list[Measured] = []
        self._near_limit_ratio = near_limit_ratio
        self._paths: set[str] = set()
        self._of_rules: set[str] = set()

    def watch(self, gauges: Gauges) -> None:
        """Tell of these, too, whenever the counters are asked for."""
        self.gauges.append(gauges)

    def measure(self, measured: Measured) -> None:
        """Tell of these, too, except in /stats and statsd, which have names alone."""
        self.measured.append(measured)

    def counters(self, outline: Outline) -> Counters:
        """What a call of this kind is counted by; hold on to them, looking them up again is the expensive part."""
        return tuple(self._slot_counters(outline, slot) for slot in outline.slots)

    def _slot_counters(self, outline: Outline, slot: Slot) -> LimitCounters | PassCounter:
        domain = self._told_apart(outline.domain) if outline.domain_known else OTHER
        rule = slot.rule
        if outline.refusal is not None:
            name = self._told_apart(rule.path) if rule else ""
            return self.passes.setdefault((domain, name, outline.refusal.reason), PassCounter())
        if not slot.steps:
            outcome = "no_rule" if rule is None else "unlimited" if slot.unlimited else "replaced"
            return self.passes.setdefault((domain, self._told_apart(rule.path) if rule else "", outcome), PassCounter())
        return self.limit(slot.metric_path, domain, told_as(rule))

    def limit(self, path: str, domain: str = "", rule: str = "") -> LimitCounters:
        """The counters of a limit, by its path in metrics and by the rule that it is of."""
        if path not in self._paths:
            if len(self._paths) >= MOST_PATHS or len(path) > LONGEST_PATH:
                path = OTHER
            else:
                self._paths.add(path)
        return self.limits.setdefault(Limit(path, domain, self._told_apart(rule)), LimitCounters())

    def _told_apart(self, name: str) -> str:
        """Of a rule or a domain, as long as there are not too many."""
        if name not in self._of_rules:
            if len(self._of_rules) >= MOST_RULES:
                return OTHER
            self._of_rules.add(name)
        return name

    def domain_not_found(self, domain: str, descriptors: int) -> None:
        if domain not in self.domains_not_found and (
            len(self.domains_not_found) >= MOST_PATHS or len(domain) > LONGEST_PATH
        ):
            domain = OTHER
        self.domains_not_found[domain] = self.domains_not_found.get(domain, 0) + descriptors

    def record(self, decision: Decision, counters: Counters, *, without_store: bool = False) -> None:
        """Count one finished decision; `counters` are those of its outline."""
        if not decision.outline.domain_known:
            self.domain_not_found(decision.outline.domain, len(decision.statuses))
        if decision.shadowed:
            self.service.global_shadow_mode += 1
        remembered = decision.remembered
        source = _FALLBACK if without_store else _CACHE if remembered else _STORE
        refused = _SHADOWED if decision.shadowed else _OVER_LIMIT
        is_decided = decision.outline.purpose is not _REPORT  # which tells what has happened, and decides nothing
        for number, (code, step, _, _, _, reading, _, state, _, _) in enumerate(decision.statuses):
            counted = counters[number]
            if isinstance(counted, PassCounter):
                counted.count += 1
            elif step is not None and reading is not None:
                is_allowed = self._record_limit(counted, step, reading, code)
                if is_decided:
                    outcome = refused if code is _OVER else _OK if is_allowed else _SHADOWED
                    counted.outcomes[outcome + source] += 1
                if remembered and code is _OVER:
                    counted.over_limit_with_local_cache += step.cost
                if state:  # neither None nor NORMAL
                    counted.state_warning += state is State.WARNING
                    counted.state_throttled += state is State.THROTTLED

    def record_policy(self, decision: Decision, counters: Counters) -> None:
        """Count a decision that no counter was moved for, since the store did not answer."""
        for status, counted in zip(decision.statuses, counters, strict=True):
            if isinstance(counted, PassCounter):
                counted.count += 1
            else:
                counted.outcomes[(_OVER_LIMIT if status.code is Code.OVER_LIMIT else _OK) + _FALLBACK] += 1

    def _record_limit(self, counted: LimitCounters, step: Step, reading: Reading, code: Code) -> bool:
        """The reference's arithmetic: of hits that cross a threshold, each is counted on its own side of it.

        Says whether the limit allows the call.
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
        # A refusal under `admitted` spends nothing, so `left` says what there was before it; under `always`, after.
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
            counted.refused += over
        return False

    def names(self, kept: Iterable[tuple[str, int]] | None = None) -> dict[str, int]:
        """Every counter with its value, under the reference's name, sorted.

        May be asked in another thread than the one that counts, if `kept`, what others keep, was asked for in that one.
        """
        totals: defaultdict[str, int] = defaultdict(int)
        for name, count in self._names():
            totals[name] += count
        totals.update(self.kept() if kept is None else kept)
        return dict(sorted(totals.items()))

    def kept(self) -> list[tuple[str, int]]:
        """What others keep, by name."""
        return [named for gauges in self.gauges for named in gauges()]

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
        yield "ratelimit.service.call.should_rate_limit.overloaded", service.overloaded
        yield "ratelimit.service.call.should_rate_limit.late", service.late
        yield "ratelimit.store_failure.allow", service.store_failure_allow
        yield "ratelimit.store_failure.deny", service.store_failure_deny
        yield "ratelimit.store_failure.local", service.store_failure_local
        yield "ratelimit.store_failure.error", service.store_failure_error
        for method, times in self.calls.items():
            yield f"ratelimit_server.{short_method(method)}.total_requests", times.count
