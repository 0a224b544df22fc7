"""Tracking of the counters that are used most and that deny most, in bounded memory, under a microsecond a batch.

    calls ─► all, or under load a random sample ─► summaries of at most 512 counters each

A sampled call counts for as many as it was chosen from, so that estimates are right on average; under low load they are
exact. Reports cover the last five to ten seconds: two generations, of which the older is dropped.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import structlog

from ratelimit_rls.core.model import Code, Decision, DescriptorPlan, Entry, Outcome, PlanTemplate
from ratelimit_rls.core.storage_key_parser import ParsedKey, parse_key
from ratelimit_rls.errors import StoreError, one_line
from ratelimit_rls.telemetry.masking import Mask

_log = structlog.get_logger()

GENERATION_S = 5.0

MAX_KEPT = 256
"""Counters that a summary keeps when it is trimmed: all that had over 1/257 of its total are among them."""

MAX_DRAWS = 5000
"""Samples per generation; after as many again, each counts for twice as many calls. One costs about a microsecond."""

MAX_DRAW_WEIGHT = 64
"""Maximum calls per sample: few enough that no counter is hot by chance, and that a sudden quiet period is covered."""

MIN_DRAWS = 10
"""Samples of the heaviest weight below which too little is known about a counter to warn of it."""

REPEAT_WARNING_S = 600.0
"""The same counter is not logged again for this long."""

MAX_WARNINGS = 3
"""Maximum hot-key warnings logged per minute."""

MAX_LOGGED_KEY_LENGTH = 120
"""Longer keys are truncated in the log."""

MAX_OWN_BYTES = 8192
"""Requests may carry data (a limit, values for metrics) that would be kept with the key; larger ones are skipped."""

MAX_RATE = "ratelimit.hot_keys.max_rate"
OVER_THRESHOLD = "ratelimit.hot_keys.over_threshold"


class _HasKeys(Protocol):
    @property
    def keys(self) -> tuple[Hashable, ...]: ...


class ObservedCall(Protocol):
    """A call with its plan template, and the keys of its counters in the order of the plan."""

    @property
    def template(self) -> PlanTemplate: ...
    @property
    def prepared(self) -> _HasKeys | None: ...


class HotKey(NamedTuple):
    """A descriptor, identified by the key of its first limit."""

    key: str
    rule: str  # its path
    leased: bool
    per_second: float
    denied_per_second: float


class HotReport(NamedTuple):
    """The hot keys of one process, or of several."""

    seconds: float  # the period it covers
    calls_per_second: float
    keys: tuple[HotKey, ...]  # unordered

    def hottest(self, limit: int) -> list[HotKey]:
        return sorted(self.keys, key=lambda row: (-row.per_second, row.key))[:limit]

    def most_denied(self, limit: int) -> list[HotKey]:
        denied = [row for row in self.keys if row.denied_per_second]
        return sorted(denied, key=lambda row: (-row.denied_per_second, row.key))[:limit]


def merge_reports(reports: Sequence[HotReport]) -> HotReport:
    """Merge the reports of several processes into that of one."""
    rows: dict[str, HotKey] = {}
    for row in (row for report in reports for row in report.keys):
        seen = rows.get(row.key)
        rows[row.key] = row if seen is None else _sum(seen, row)
    return HotReport(
        max((report.seconds for report in reports), default=0.0),
        sum(report.calls_per_second for report in reports),
        tuple(rows.values()),
    )


def _sum(one: HotKey, other: HotKey) -> HotKey:
    return one._replace(
        per_second=one.per_second + other.per_second,
        denied_per_second=one.denied_per_second + other.denied_per_second,
    )


def _as_is(key: Hashable) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


class HotKeys:
    """Samples calls and reports hot keys."""

    def __init__(
        self,
        warn_per_second: int = 0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        *,
        decode_key: Callable[[Hashable], bytes] = _as_is,
    ) -> None:
        """Warn of counters without a lease above `warn_per_second`; 0 disables it. `clock` is in seconds.

        `decode_key` returns the storage key of one of the keys of a call; it is used for reports only.
        """
        self._decode_key = decode_key
        self._warn_per_second = warn_per_second
        self._clock = clock
        self._draw = draw
        self._draw_weight = 1  # calls per sample
        self._skip = 0  # calls before the next sample
        self._previous: _Generation | None = None
        self._current = _Generation(clock())
        self._warned: dict[Hashable, float] = {}  # and when
        self._warnings: deque[float] = deque(maxlen=MAX_WARNINGS)

    def observe(self, calls: Sequence[ObservedCall], outcomes: Sequence[Outcome | StoreError]) -> None:
        """Record a batch of calls and their outcomes."""
        self._skip -= len(calls)
        if self._skip < 0:
            self._sample(calls, outcomes)

    def _sample(self, calls: Sequence[ObservedCall], outcomes: Sequence[Outcome | StoreError]) -> None:
        weight = self._draw_weight  # with which the next sample was chosen
        now_s = self._clock()
        if now_s - self._current.begun_s >= GENERATION_S:
            self._rotate(now_s)
        current, size = self._current, len(calls)
        number = self._skip + size
        while number < size:
            current.add(calls[number], outcomes[number], weight)
            if current.draws % MAX_DRAWS == 0:
                self._draw_weight = min(2 * self._draw_weight, MAX_DRAW_WEIGHT)
            weight = self._draw_weight
            # Not every 64th call: calls may arrive periodically.
            number += 1 if weight == 1 else 1 + int(self._draw() * (2 * weight - 1))
        self._skip = number - size

    def _rotate(self, now_s: float) -> None:
        ended, self._current = self._current, _Generation(now_s)
        seconds = now_s - ended.begun_s
        likely_calls = round(ended.calls * GENERATION_S / seconds)
        self._draw_weight = max(1, min(likely_calls // MAX_DRAWS, MAX_DRAW_WEIGHT))
        # If it lasted much longer, there were hardly any calls, or it would have ended sooner: it is outdated.
        self._previous = ended if seconds < 2 * GENERATION_S else None
        self._warn(_Recent(seconds, [ended]), now_s)

    def _warn(self, recent: _Recent, now_s: float) -> None:
        self._warned = {key: at_s for key, at_s in self._warned.items() if now_s - at_s < REPEAT_WARNING_S}
        for key, per_second in recent.worth_a_lease(self._warn_per_second):
            if len(self._warnings) == MAX_WARNINGS and now_s - self._warnings[0] < 60:
                return
            if key not in self._warned:
                self._warned[key] = now_s
                self._warnings.append(now_s)
                _log.warning("hot_key", **_log_fields(self._key_text(key), per_second, recent.descriptor_plan(key)))

    def report(self) -> HotReport:
        recent = self._recent()
        denied = recent.denied
        rows = []
        for key, weight in (denied | recent.used).items():
            denials = denied.get(key, 0)
            times = max(weight, denials)  # a counter used too rarely to be kept was used at least this often
            rule = recent.descriptor_plan(key).rule
            path, leased = (rule.path, rule.hot is not None) if rule else ("", False)
            rows.append(HotKey(self._key_text(key), path, leased, times / recent.seconds, denials / recent.seconds))
        return HotReport(recent.seconds, recent.calls / recent.seconds, tuple(rows))

    def _key_text(self, key: Hashable) -> str:
        return self._decode_key(key).decode(errors="replace")

    def gauges(self) -> Iterator[tuple[str, int]]:
        recent = self._recent()
        yield MAX_RATE, round(max(recent.used.values(), default=0) / recent.seconds)
        yield OVER_THRESHOLD, len(recent.worth_a_lease(self._warn_per_second))

    def _recent(self) -> _Recent:
        now_s = self._clock()
        if now_s - self._current.begun_s >= GENERATION_S:
            self._rotate(now_s)
        generations = [self._previous, self._current] if self._previous else [self._current]
        # At least a second: a shorter period would exaggerate few calls.
        return _Recent(max(1.0, now_s - generations[0].begun_s), generations)


class _Summary:
    """Space-Saving summary that trims many entries at a time, so that a new key costs little more on average.

    A new key may have been dropped before, with at most the highest dropped score, so its score begins there. Keys with
    equal scores are dropped together: their order does not matter.
    """

    __slots__ = ("_highest_dropped", "_origins", "scores")

    def __init__(self) -> None:
        self.scores: dict[Hashable, int] = {}
        self._origins: dict[Hashable, tuple[int, DescriptorPlan]] = {}
        self._highest_dropped = 0

    def add(self, key: Hashable, weight: int, descriptor_plan: DescriptorPlan) -> None:
        scores = self.scores
        if key in scores:
            scores[key] += weight
            return
        if len(scores) >= 2 * MAX_KEPT:
            self._make_room()
        self.scores[key] = self._highest_dropped + weight
        self._origins[key] = self._highest_dropped, descriptor_plan

    def _make_room(self) -> None:
        floor = self._highest_dropped = sorted(self.scores.values(), reverse=True)[MAX_KEPT]
        self.scores = {key: score for key, score in self.scores.items() if score > floor}
        self._origins = {key: self._origins[key] for key in self.scores}

    def descriptor_plan(self, key: Hashable) -> DescriptorPlan | None:
        origin = self._origins.get(key)
        return origin[1] if origin else None

    def weights(self) -> Iterator[tuple[Hashable, int]]:
        """Yield estimated calls: never more than were sampled, and less only by those before the key was last added."""
        for key, score in self.scores.items():
            yield key, score - self._origins[key][0]


class _Generation:
    __slots__ = ("begun_s", "calls", "denied", "draws", "heaviest", "remembered", "used")

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.draws = 0
        self.heaviest = 0  # weight of a sample
        self.calls = 0  # estimated, as everything below
        self.used = _Summary()
        self.denied = _Summary()
        self.remembered = _Summary()  # denials from the cache, for which the store was not asked

    def add(self, call: ObservedCall, outcome: Outcome | StoreError, weight: int) -> None:
        """Add each descriptor of the call, by the key of its first limit."""
        self.draws += 1
        self.calls += weight
        if weight > self.heaviest:
            self.heaviest = weight
        if call.prepared is None or call.template.own_bytes > MAX_OWN_BYTES:
            return
        keys, at = call.prepared.keys, 0
        decision = outcome if isinstance(outcome, Decision) else None
        for number, descriptor_plan in enumerate(call.template.descriptor_plans):
            if descriptor_plan.steps:
                key = keys[at]
                at += len(descriptor_plan.steps) + len(descriptor_plan.watchers)
                self.used.add(key, weight, descriptor_plan)
                if decision is not None and decision.statuses[number].code is Code.OVER_LIMIT:
                    self.denied.add(key, weight, descriptor_plan)
                    if decision.remembered:
                        self.remembered.add(key, weight, descriptor_plan)


class _Recent:
    """The sum of some generations."""

    def __init__(self, seconds: float, generations: Sequence[_Generation]) -> None:
        self.seconds = seconds
        self._generations = generations

    @property
    def calls(self) -> int:
        return sum(generation.calls for generation in self._generations)

    @property
    def used(self) -> Counter[Hashable]:
        return _sum_weights(generation.used for generation in self._generations)

    @property
    def denied(self) -> Counter[Hashable]:
        return _sum_weights(generation.denied for generation in self._generations)

    def descriptor_plan(self, key: Hashable) -> DescriptorPlan:
        """Return the descriptor of a key that occurs in `used` or `denied`, under the newest rules."""
        found = (
            summary.descriptor_plan(key) for one in reversed(self._generations) for summary in (one.used, one.denied)
        )
        return next(descriptor_plan for descriptor_plan in found if descriptor_plan is not None)

    def worth_a_lease(self, per_second: int) -> list[tuple[Hashable, float]]:
        """Return the counters for which the store is asked more often, with their rates, hottest first; 0: none."""
        if not per_second:
            return []
        heaviest = max(generation.heaviest for generation in self._generations)
        threshold = max(per_second * self.seconds, (MIN_DRAWS - 1) * heaviest)
        remembered = _sum_weights(generation.remembered for generation in self._generations)
        beyond_cache = {key: weight - remembered[key] for key, weight in self.used.items()}
        hot = {key: weight for key, weight in beyond_cache.items() if weight > threshold and not self._leased(key)}
        return [(key, hot[key] / self.seconds) for key in sorted(hot, key=hot.__getitem__, reverse=True)]

    def _leased(self, key: Hashable) -> bool:
        rule = self.descriptor_plan(key).rule
        return rule is not None and rule.hot is not None


def _sum_weights(summaries: Iterable[_Summary]) -> Counter[Hashable]:
    added: Counter[Hashable] = Counter()
    for summary in summaries:
        for key, weight in summary.weights():
            added[key] += weight
    return added


def _log_fields(key: str, per_second: float, descriptor_plan: DescriptorPlan) -> dict[str, Any]:
    rule = descriptor_plan.rule
    advice = "the limit comes with the requests; only a limit in the rules can have `hot: {lease: 100ms}`"
    if rule is not None and rule.position is not None:
        position = one_line(str(rule.position))
        advice = f"if the other settings at {position} permit it, add `hot: {{lease: 100ms}}` to relieve Redis"
    return {
        "key": _truncate(one_line(key)),
        "per_second": round(per_second),
        "rule": _truncate(one_line(rule.path)) if rule else "",
        "advice": advice,
    }


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_LOGGED_KEY_LENGTH else text[: MAX_LOGGED_KEY_LENGTH - 1] + "…"


def as_json(report: HotReport, limit: int, mask: Mask | None = None) -> dict[str, Any]:
    """Return the top of both lists as JSON, for users and for `top`. A mask hides the values of descriptors."""
    return {
        "seconds": round(report.seconds, 1),
        "calls_per_second": round(report.calls_per_second, 1),
        "hottest": [_row(row, report, mask) for row in report.hottest(limit)],
        "denied": [_row(row, report, mask) for row in report.most_denied(limit)],
    }


def _row(row: HotKey, report: HotReport, mask: Mask | None) -> dict[str, Any]:
    key, parsed = row.key, parse_key(row.key)
    if mask is not None:
        parsed = parsed and parsed._replace(entries=tuple(Entry(name, mask(value)) for name, value in parsed.entries))
        key = _key_text(parsed) if parsed else mask(key)
    return {
        "key": key,
        "domain": parsed.domain if parsed else "",
        "descriptor": parsed.descriptor if parsed else "",
        "rule": row.rule,
        "per_second": round(row.per_second, 1),
        "denied_per_second": round(row.denied_per_second, 1),
        "share": round(min(1.0, row.per_second / report.calls_per_second), 4) if report.calls_per_second else 0.0,
        "leased": row.leased,
    }


def _key_text(parsed: ParsedKey) -> str:
    tag = "/".join([parsed.domain, *(f"{name}={value}" for name, value in parsed.entries)])
    return f"rl:{{{tag}}}:{parsed.state}"
