"""Which counters are asked for most, and which refuse most: bounded, and for a fraction of a microsecond a batch.

    calls ─► every one is noted, or when there are many, one in so many ─► summaries of at most 512 counters each

A call that is drawn stands for as many as are drawn from, so that estimates are right on average; a quiet service is
told of exactly. What is told is of the last five to ten seconds: two generations, of which the elder is dropped.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import structlog

from ratelimit_rls.core.key_text import parse_key
from ratelimit_rls.core.model import Code, Decision, Outline, Slot
from ratelimit_rls.errors import StoreError, one_line

log = structlog.get_logger()

GENERATION_S = 5.0

MOST_KEPT = 256
"""Counters that a summary keeps when it makes room: whichever had over 1/257 of all that it counted is among them."""

MOST_DRAWS = 5000
"""In a generation; after as many again each draw stands for twice as many calls. A draw costs about a microsecond."""

MOST_STOOD_FOR = 64
"""Calls that one draw stands for: few enough that no counter is hot by chance, or a quiet hour begun half blind."""

LEAST_DRAWS = 10
"""Of the heaviest: fewer say too little about a counter to warn of it."""

SILENT_S = 600.0
"""The same counter is not warned of again for so long."""

MOST_WARNINGS = 3
"""In a minute."""

LONGEST_LOGGED = 120
"""Characters of a key in the log."""

MOST_OWN_BYTES = 8192
"""What a request brought with it (a limit, values for metrics) would be kept with its key; long texts are not."""

HOTTEST = "ratelimit.hot_keys.hottest_per_second"
OVER_THRESHOLD = "ratelimit.hot_keys.over_threshold"

_BULK = re.compile(rb"\$\d+\r\n(.*)\r\n", re.DOTALL)


class _Keyed(Protocol):
    @property
    def keys(self) -> tuple[Hashable, ...]: ...


class Asked(Protocol):
    """What is known of a call: its outline, and the keys of its counters in the order of the plan."""

    @property
    def outline(self) -> Outline: ...
    @property
    def prepared(self) -> _Keyed | None: ...


class HotKey(NamedTuple):
    """One descriptor, by the key of its first limit."""

    key: str
    rule: str  # its path
    leased: bool
    per_second: float
    refused_per_second: float


class HotReport(NamedTuple):
    """What was seen in one process, or in several."""

    seconds: float  # of how long it tells
    calls_per_second: float
    keys: tuple[HotKey, ...]  # in no order; all that are known

    def hottest(self, limit: int) -> list[HotKey]:
        return sorted(self.keys, key=lambda row: (-row.per_second, row.key))[:limit]

    def most_refused(self, limit: int) -> list[HotKey]:
        refused = [row for row in self.keys if row.refused_per_second]
        return sorted(refused, key=lambda row: (-row.refused_per_second, row.key))[:limit]


def together(reports: Sequence[HotReport]) -> HotReport:
    """What several processes saw, as if they were one."""
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
        refused_per_second=one.refused_per_second + other.refused_per_second,
    )


class HotKeys:
    def __init__(
        self,
        warn_per_second: int = 0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Above `warn_per_second` a counter without a lease is warned of; 0: none is. `clock` is in seconds."""
        self._warn_per_second = warn_per_second
        self._clock = clock
        self._draw = draw
        self._stands_for = 1  # calls, each draw
        self._ahead = 0  # calls that pass before the next draw
        self._elder: _Generation | None = None
        self._current = _Generation(clock())
        self._warned: dict[Hashable, float] = {}  # and when
        self._warnings: deque[float] = deque(maxlen=MOST_WARNINGS)

    def observe(self, calls: Sequence[Asked], decisions: Sequence[Decision | StoreError]) -> None:
        """Take note of a batch and what was decided."""
        self._ahead -= len(calls)
        if self._ahead < 0:
            self._draw_of(calls, decisions)

    def _draw_of(self, calls: Sequence[Asked], decisions: Sequence[Decision | StoreError]) -> None:
        weight = self._stands_for  # as the draw that comes now was chosen
        now_s = self._clock()
        if now_s - self._current.begun_s >= GENERATION_S:
            self._turn(now_s)
        current, size = self._current, len(calls)
        number = self._ahead + size
        while number < size:
            current.add(calls[number], decisions[number], weight)
            if current.draws % MOST_DRAWS == 0:
                self._stands_for = min(2 * self._stands_for, MOST_STOOD_FOR)
            weight = self._stands_for
            # Not every 64th call: calls may come in a rhythm of their own.
            number += 1 if weight == 1 else 1 + int(self._draw() * (2 * weight - 1))
        self._ahead = number - size

    def _turn(self, now_s: float) -> None:
        ended, self._current = self._current, _Generation(now_s)
        seconds = now_s - ended.begun_s
        likely_calls = round(ended.calls * GENERATION_S / seconds)
        self._stands_for = max(1, min(likely_calls // MOST_DRAWS, MOST_STOOD_FOR))
        # Hardly anybody asked for a whole generation's time, or it would have ended sooner: it is of long ago.
        self._elder = ended if seconds < 2 * GENERATION_S else None
        self._warn(_Recent(seconds, [ended]), now_s)

    def _warn(self, recent: _Recent, now_s: float) -> None:
        self._warned = {key: at_s for key, at_s in self._warned.items() if now_s - at_s < SILENT_S}
        for key, per_second in recent.worth_a_lease(self._warn_per_second):
            if len(self._warnings) == MOST_WARNINGS and now_s - self._warnings[0] < 60:
                return
            if key not in self._warned:
                self._warned[key] = now_s
                self._warnings.append(now_s)
                log.warning("hot key", **_words(key, per_second, recent.slot(key)))

    def report(self) -> HotReport:
        recent = self._recent()
        refused = recent.refused
        rows = []
        for key, weight in (refused | recent.asked).items():
            refusals = refused.get(key, 0)
            times = max(weight, refusals)  # one that was asked for too seldom to be kept was so often at least
            rule = recent.slot(key).rule
            path, leased = (rule.path, rule.hot is not None) if rule else ("", False)
            rows.append(HotKey(_text(key), path, leased, times / recent.seconds, refusals / recent.seconds))
        return HotReport(recent.seconds, recent.calls / recent.seconds, tuple(rows))

    def gauges(self) -> Iterator[tuple[str, int]]:
        recent = self._recent()
        yield HOTTEST, round(max(recent.asked.values(), default=0) / recent.seconds)
        yield OVER_THRESHOLD, len(recent.worth_a_lease(self._warn_per_second))

    def _recent(self) -> _Recent:
        now_s = self._clock()
        if now_s - self._current.begun_s >= GENERATION_S:
            self._turn(now_s)
        generations = [self._elder, self._current] if self._elder else [self._current]
        # Of at least a second: less would make much of little.
        return _Recent(max(1.0, now_s - generations[0].begun_s), generations)


class _Summary:
    """Space-Saving, with room made for many newcomers at a time: on average a newcomer costs little more than another.

    Who comes in may have been dropped before, with the highest score among the dropped at most, so that is where its
    score begins. Those that are alike are dropped alike: it does not matter who came first.
    """

    __slots__ = ("_highest_dropped", "_origins", "scores")

    def __init__(self) -> None:
        self.scores: dict[Hashable, int] = {}
        self._origins: dict[Hashable, tuple[int, Slot]] = {}
        self._highest_dropped = 0

    def add(self, key: Hashable, weight: int, slot: Slot) -> None:
        scores = self.scores
        if key in scores:
            scores[key] += weight
            return
        if len(scores) >= 2 * MOST_KEPT:
            self._make_room()
        self.scores[key] = self._highest_dropped + weight
        self._origins[key] = self._highest_dropped, slot

    def _make_room(self) -> None:
        floor = self._highest_dropped = sorted(self.scores.values(), reverse=True)[MOST_KEPT]
        self.scores = {key: score for key, score in self.scores.items() if score > floor}
        self._origins = {key: self._origins[key] for key in self.scores}

    def slot(self, key: Hashable) -> Slot | None:
        origin = self._origins.get(key)
        return origin[1] if origin else None

    def weights(self) -> Iterator[tuple[Hashable, int]]:
        """Calls, by estimate: never more than were drawn, and less only by what came before a counter last came in."""
        for key, score in self.scores.items():
            yield key, score - self._origins[key][0]


class _Generation:
    __slots__ = ("asked", "begun_s", "calls", "draws", "heaviest", "refused", "remembered")

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.draws = 0
        self.heaviest = 0  # of the draws
        self.calls = 0  # by estimate, as all that follows
        self.asked = _Summary()
        self.refused = _Summary()
        self.remembered = _Summary()  # refusals that still held, so that the store was not asked

    def add(self, call: Asked, decision: Decision | StoreError, weight: int) -> None:
        """Each descriptor of the call, by the key of its first limit."""
        self.draws += 1
        self.calls += weight
        if weight > self.heaviest:
            self.heaviest = weight
        if call.prepared is None or call.outline.own_bytes > MOST_OWN_BYTES:
            return
        keys, at = call.prepared.keys, 0
        told = None if isinstance(decision, StoreError) else decision
        for number, slot in enumerate(call.outline.slots):
            if slot.steps:
                key = keys[at]
                at += len(slot.steps) + len(slot.watchers)
                self.asked.add(key, weight, slot)
                if told is not None and told.statuses[number].code is Code.OVER_LIMIT:
                    self.refused.add(key, weight, slot)
                    if told.remembered:
                        self.remembered.add(key, weight, slot)


class _Recent:
    """What some generations say together."""

    def __init__(self, seconds: float, generations: Sequence[_Generation]) -> None:
        self.seconds = seconds
        self._generations = generations

    @property
    def calls(self) -> int:
        return sum(generation.calls for generation in self._generations)

    @property
    def asked(self) -> Counter[Hashable]:
        return _added(generation.asked for generation in self._generations)

    @property
    def refused(self) -> Counter[Hashable]:
        return _added(generation.refused for generation in self._generations)

    def slot(self, key: Hashable) -> Slot:
        """Under the newest rules that are known; of a key that was asked for or refused."""
        found = (summary.slot(key) for one in reversed(self._generations) for summary in (one.asked, one.refused))
        return next(slot for slot in found if slot is not None)

    def worth_a_lease(self, per_second: int) -> list[tuple[Hashable, float]]:
        """The counters for which the store is asked more often than that, and how often, hottest first; 0: none."""
        if not per_second:
            return []
        heaviest = max(generation.heaviest for generation in self._generations)
        least = max(per_second * self.seconds, (LEAST_DRAWS - 1) * heaviest)
        remembered = _added(generation.remembered for generation in self._generations)
        asked = {key: weight - remembered[key] for key, weight in self.asked.items()}
        hot = {key: weight for key, weight in asked.items() if weight > least and not self._leased(key)}
        return [(key, hot[key] / self.seconds) for key in sorted(hot, key=hot.__getitem__, reverse=True)]

    def _leased(self, key: Hashable) -> bool:
        rule = self.slot(key).rule
        return rule is not None and rule.hot is not None


def _added(summaries: Iterable[_Summary]) -> Counter[Hashable]:
    added: Counter[Hashable] = Counter()
    for summary in summaries:
        for key, weight in summary.weights():
            added[key] += weight
    return added


def _text(key: Hashable) -> str:
    """The storage key, in whatever form the store has it."""
    if not isinstance(key, bytes):
        return str(key)
    bulk = _BULK.fullmatch(key)  # as Redis is sent it
    return (bulk[1] if bulk else key).decode(errors="replace")


def _words(key: Hashable, per_second: float, slot: Slot) -> dict[str, Any]:
    rule = slot.rule
    advice = "its limit comes with its requests: only a limit in the rules can have `hot: {lease: 100ms}`"
    if rule is not None and rule.position is not None:
        advice = f"if all else at {one_line(str(rule.position))} goes with it, `hot: {{lease: 100ms}}` relieves Redis"
    return {
        "key": _cut(one_line(_text(key))),
        "per_second": round(per_second),
        "rule": _cut(one_line(rule.path)) if rule else "",
        "advice": advice,
    }


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_LOGGED else text[: LONGEST_LOGGED - 1] + "…"


def as_json(report: HotReport, limit: int) -> dict[str, Any]:
    """For people and for `top`: the first of both kinds."""
    return {
        "seconds": round(report.seconds, 1),
        "calls_per_second": round(report.calls_per_second, 1),
        "hottest": [_row(row, report) for row in report.hottest(limit)],
        "refused": [_row(row, report) for row in report.most_refused(limit)],
    }


def _row(row: HotKey, report: HotReport) -> dict[str, Any]:
    parsed = parse_key(row.key)
    return {
        "key": row.key,
        "domain": parsed.domain if parsed else "",
        "descriptor": parsed.descriptor if parsed else "",
        "rule": row.rule,
        "per_second": round(row.per_second, 1),
        "refused_per_second": round(row.refused_per_second, 1),
        "share": round(min(1.0, row.per_second / report.calls_per_second), 4) if report.calls_per_second else 0.0,
        "leased": row.leased,
    }
