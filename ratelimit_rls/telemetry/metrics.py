"""Counters, under the names the reference gives them, so that existing dashboards and alerts go on working.

A counter is a plain integer on an object that the caller holds: counting costs an addition. Whatever exports them
(/stats now) reads them when asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from struct import pack, unpack

from ratelimit_rls.core.model import Charge, Code, Decision, Reading, State, Step

MOST_PATHS = 10_000
"""Distinct metric paths kept. Some come from request values (detailed_metric, value_to_metric, overrides, unknown
domains), and the reference keeps every one for ever; here the rest is counted under `_other`."""

LONGEST_PATH = 512
"""Characters of a path that is kept: a longer one has a request's value in it, and is counted under `_other` too."""

OTHER = "_other"

Gauges = Callable[[], Iterable[tuple[str, int]]]
"""Numbers that somebody else keeps, by name."""


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


_LIMIT_NAMES = tuple(field.name for field in fields(LimitCounters))
_STATE_NAMES = ("state_warning", "state_throttled")  # told of where there is something to tell: few rules have them


@dataclass(slots=True)
class ServiceCounters:
    """What happened to calls and to rules."""

    config_load_success: int = 0
    config_load_error: int = 0
    global_shadow_mode: int = 0
    redis_error: int = 0
    service_error: int = 0
    total_requests: int = 0
    # Not the reference's: two kinds of redis_error, and all of them by what was done instead.
    overloaded: int = 0
    late: int = 0
    store_failure_allow: int = 0
    store_failure_deny: int = 0
    store_failure_local: int = 0
    store_failure_error: int = 0


@lru_cache(4096)
def near_limit(capacity: int, ratio: float) -> int:
    """The count above which hits are near the limit, in single precision as the reference computes it."""
    return int(_single(_single(capacity) * _single(ratio)))


def _single(number: float) -> float:
    """The nearest 32-bit float."""
    nearest: float = unpack("f", pack("f", number))[0]
    return nearest


_IPV4 = re.compile(r"\d+\.\d+\.\d+\.\d+")


def _sanitised(path: str) -> str:
    """Without what means something to statsd: colons, bars, and the dots of addresses (reference behaviour)."""
    return _IPV4.sub(lambda found: found[0].replace(".", "_"), path.replace(":", "_").replace("|", "_"))


class Metrics:
    def __init__(self, near_limit_ratio: float = 0.8) -> None:
        self.service = ServiceCounters()
        self._near_limit_ratio = near_limit_ratio
        self._limits: dict[str, LimitCounters] = {}
        self._domains_not_found: dict[str, int] = {}
        self._gauges: list[Gauges] = []

    def watch(self, gauges: Gauges) -> None:
        """Tell of these, too, whenever the counters are asked for."""
        self._gauges.append(gauges)

    def limit(self, path: str) -> LimitCounters:
        """The counters of a limit; hold on to them, looking them up again is the expensive part."""
        counters = self._limits.get(path)
        if counters is None:
            if len(self._limits) >= MOST_PATHS or len(path) > LONGEST_PATH:
                path = OTHER
            counters = self._limits.setdefault(path, LimitCounters())
        return counters

    def domain_not_found(self, domain: str, descriptors: int) -> None:
        if domain not in self._domains_not_found and (
            len(self._domains_not_found) >= MOST_PATHS or len(domain) > LONGEST_PATH
        ):
            domain = OTHER
        self._domains_not_found[domain] = self._domains_not_found.get(domain, 0) + descriptors

    def record(self, decision: Decision, counters: tuple[LimitCounters | None, ...]) -> None:
        """Count one finished decision. `counters` has one entry per descriptor, None where no limit was met."""
        if not decision.outline.domain_known:
            self.domain_not_found(decision.outline.domain, len(decision.statuses))
        if decision.shadowed:
            self.service.global_shadow_mode += 1
        for status, counted in zip(decision.statuses, counters, strict=True):
            if counted is not None and status.step is not None and status.reading is not None:
                self._record_limit(counted, status.step, status.reading, status.code)
                if decision.remembered and status.code is Code.OVER_LIMIT:
                    counted.over_limit_with_local_cache += status.step.cost
                if status.state:  # neither None nor NORMAL
                    counted.state_warning += status.state is State.WARNING
                    counted.state_throttled += status.state is State.THROTTLED

    def _record_limit(self, counted: LimitCounters, step: Step, reading: Reading, code: Code) -> None:
        """The reference's arithmetic: of hits that cross a threshold, each is counted on its own side of it."""
        hits = step.cost
        if hits < 0:
            counted.total_negative_hits -= hits
            return
        counted.total_hits += hits
        capacity = step.limit.burst or step.limit.requests_per_unit
        near = near_limit(capacity, self._near_limit_ratio)
        if reading.allowed:
            counted.within_limit += hits
            after = capacity - reading.left
            if after > near:
                before = after - hits
                counted.near_limit += hits if before >= near else after - near
            return
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

    def names(self) -> Iterator[tuple[str, int]]:
        """Every counter with its value, under the reference's name, sorted."""
        yield from sorted(self._names())

    def _names(self) -> Iterator[tuple[str, int]]:
        for path, counters in self._limits.items():
            prefix = f"ratelimit.service.rate_limit.{_sanitised(path)}"
            for name in _LIMIT_NAMES:
                count = getattr(counters, name)
                if count or name not in _STATE_NAMES:
                    yield f"{prefix}.{name}", count
        for domain, count in self._domains_not_found.items():
            yield f"ratelimit.service.rate_limit.{_sanitised(domain)}.domain_not_found", count
        for gauges in self._gauges:
            yield from gauges()
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
        yield "ratelimit_server.ShouldRateLimit.total_requests", service.total_requests
