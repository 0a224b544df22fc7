"""What is to be recorded of calls: every refusal, some admissions, and how many of each there were, by the minute.

    decisions ─► Ledger ─► a background task (records/decisions.py) ─► the database

Noting a call costs a fraction of a microsecond and waits for nothing. All calls are counted exactly, each once, under
the rule that spoke for it: the one that refused, else the first with a limit. All that is kept is bounded, whatever
clients send, and what there was no room for is counted.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from ratelimit_rls.core.model import Code, Decision, Outline, Request, Slot, Status
from ratelimit_rls.errors import StoreError
from ratelimit_rls.telemetry.counts import (
    ALL_OTHERS,
    ALLOWED,
    ALLOWED_FREE,
    ALLOWED_HIT,
    BLOCKED,
    OTHER,
    THROTTLED,
    THROTTLED_HIT,
    UNDECIDED,
    UNTIMED,
    Counts,
    Usage,
    UsageKey,
    Word,
)
from ratelimit_rls.telemetry.histogram import bucket_of
from ratelimit_rls.telemetry.rule_names import told_as

MOST_LINES = 10_000
"""Different callers, rules and endpoints that are counted apart in one minute, unless a ledger is told otherwise. Each
is a row that is written; whoever calls most is there early in the minute, and among them."""

MINUTE_S = 60

MOST_BEHIND_S = 300
"""By how much a clock may be set back, and calls go on to be counted in the minute that it had."""

WAITING = "ratelimit.audit.waiting"
DROPPED = "ratelimit.audit.dropped_total"
LINES = "ratelimit.usage.lines"

_FIELDS = {
    "user": "user",
    "user_id": "user",
    "api_key": "api_key",
    "ip": "ip",
    "remote_address": "ip",
    "client_ip": "ip",
    "path": "endpoint",
    "endpoint": "endpoint",
    "method": "method",
}
"""Which entries of descriptors say who called and what for."""

_LONGEST = {"user": 255, "ip": 64, "endpoint": 500, "method": 16}
"""Characters, as the columns of the database have them."""

_LONGEST_DOMAIN = 255
_LONGEST_RULE = 500

_KEY_ID = re.compile(r"(?:rlk_)?([a-z2-7]{12})(?:_[A-Za-z0-9_-]{43})?")


class Caller(NamedTuple):
    """As far as descriptors tell it; what they do not is empty. Fit to be stored: no credential, nothing long."""

    domain: str
    user: str = ""
    api_key: str = ""  # its public id
    ip: str = ""
    endpoint: str = ""  # a path without its query
    method: str = ""


class Recorded(NamedTuple):
    """One decision."""

    at_s: float
    log_id: int  # with the moment, like no other's: what is written twice is stored once
    caller: Caller
    rule: str
    word: Word
    current: int | None = None  # of the limit, with this call where it was charged
    limit: int | None = None
    status: int | None = None  # that a refused client gets, where the protocol lets us choose
    retry_after_s: int | None = None
    latency_us: int | None = None
    reason: str = ""  # of a refusal that no limit decided


class Line:
    """What the calls of one planned request are recorded under."""

    __slots__ = ("_admitted", "_codes", "_generation", "_is_known", "_key", "_slot", "caller", "rule")

    def __init__(self, caller: Caller, outline: Outline) -> None:
        self.caller = caller
        self._slot = next((slot for slot in outline.slots if slot.steps), None)
        self.rule = _rule(self._slot)  # of an admission
        self._key = UsageKey(caller.domain, self.rule, caller.user, caller.endpoint)
        self._is_known = outline.domain_known  # so that it is one of few
        self._admitted = ALLOWED_FREE if self._slot is None else ALLOWED
        self._codes: dict[int, int] = {}  # where its calls are counted in, as long as that rule speaks for them
        self._generation: object = None  # this generation of counters; any other: look for the counter anew


class Ledger:
    def __init__(
        self,
        *,
        sample: float,
        most_waiting: int,
        most_lines: int = MOST_LINES,
        clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`sample` is the share of admissions that are recorded; `most_waiting` decisions wait to be written."""
        self._sample = sample
        self._most_waiting = most_waiting
        self._most_lines = most_lines
        self._clock = clock
        self._draw = draw
        self._ahead = self._gap()  # calls that pass before the next draw
        self._waiting: deque[Recorded] = deque()
        self._next_id = random.randrange(2**62)
        self.dropped = 0
        self._cells: dict[UsageKey, Counts] = {}  # of this minute
        self._past: list[Usage] = []  # of earlier ones, oldest first
        self._past_lines = 0
        self._generation = object()
        self.turns = 0  # how often the clock was set back by much
        self._minute_s = 0
        self._minute_ends_s = -math.inf
        self._seen: set[UsageKey] = set()  # in this minute, whether taken since or not

    def line(self, request: Request, outline: Outline) -> Line:
        """Made once when a request is planned, and kept with its plan. Credentials must have been resolved before."""
        found: dict[str, str] = {}
        for descriptor in request.descriptors:
            for key, value in descriptor.entries:
                field = _FIELDS.get(key)
                if field is not None and value:
                    found.setdefault(field, value)
        texts = {field: _fit(found.get(field, ""), longest) for field, longest in _LONGEST.items()}
        texts["endpoint"] = _fit(found.get("endpoint", "").partition("?")[0].partition("#")[0], _LONGEST["endpoint"])
        caller = Caller(
            domain=_fit(outline.domain or request.domain, _LONGEST_DOMAIN),
            api_key=_key_id(found.get("api_key")),
            **texts,
        )
        return Line(caller, outline)

    def note(
        self,
        lines: Sequence[Line | None],
        decisions: Sequence[Decision | StoreError],
        elapsed_s: float,
        skipped: Collection[int] = (),
    ) -> None:
        """A batch that was decided together; `skipped` has the numbers of those that were told something else."""
        now_s = self._clock()
        if not self._minute_s - MOST_BEHIND_S <= now_s < self._minute_ends_s:
            self._begin_minute(now_s)
        if skipped:
            lines = [None if number in skipped else line for number, line in enumerate(lines)]
        latency_us = int(elapsed_s * 1e6)
        bucket = bucket_of(latency_us)
        if self._ahead < len(lines):
            self._record_some(lines, decisions, now_s, latency_us)
        else:
            self._ahead -= len(lines)
        generation, passed = self._generation, Code.OK
        for line, decision in zip(lines, decisions, strict=True):
            if line is None:
                continue
            if line._generation is generation and decision.__class__ is Decision and decision.code is passed:
                codes = line._codes
                code = line._admitted + bucket
                if code in codes:
                    codes[code] += 1
                else:
                    codes[code] = 1
            else:
                self._note_one(line, decision, now_s, latency_us, bucket)

    def note_refusal(self, line: Line, reason: str, status: int) -> None:
        """Of a call that was refused before any limit was looked at: 401 and the like."""
        now_s = self._clock()
        if not self._minute_s - MOST_BEHIND_S <= now_s < self._minute_ends_s:
            self._begin_minute(now_s)
        _count(self._codes_of(line, ""), BLOCKED + UNTIMED)
        if self._has_room():
            reason = _fit(reason, _LONGEST_DOMAIN)
            self._waiting.append(
                Recorded(now_s, self._new_id(), line.caller, "", Word.BLOCKED, status=status, reason=reason)
            )

    def _note_one(
        self, line: Line, decision: Decision | StoreError, now_s: float, latency_us: int, bucket: int
    ) -> None:
        """A call that was not simply admitted, or the first of its line in a while."""
        if isinstance(decision, StoreError):
            _count(self._own_codes(line), UNDECIDED + bucket)
        elif decision.code is Code.OK:
            # Under the global shadow mode a refusal that was remembered passes.
            _count(self._own_codes(line), (ALLOWED_HIT if decision.remembered else line._admitted) + bucket)
            if decision.outline.shadow_mode:
                line._generation = None
        else:
            self._note_refused(line, decision, now_s, latency_us, bucket)

    def _note_refused(self, line: Line, decision: Decision, now_s: float, latency_us: int, bucket: int) -> None:
        refusal = decision.outline.refusal
        if refusal is not None:
            code, status = BLOCKED, decision.statuses[refusal.slot]
        else:
            code, status = THROTTLED_HIT if decision.remembered else THROTTLED, _refusing(decision)
        if status.slot is line._slot:
            rule, codes = line.rule, self._own_codes(line)
        else:
            rule = _rule(status.slot)
            codes = self._codes_of(line, rule)
        _count(codes, code + bucket)
        if self._has_room():
            self._waiting.append(_refused(now_s, self._new_id(), line.caller, rule, decision, status, latency_us))

    def _own_codes(self, line: Line) -> dict[int, int]:
        if line._generation is not self._generation:
            line._codes, line._generation = self._codes_at(line._key, line), self._generation
        return line._codes

    def _codes_of(self, line: Line, rule: str) -> dict[int, int]:
        """Where calls of this line are counted in that another rule speaks for than its own."""
        return self._codes_at(line._key._replace(rule=rule), line)

    def _codes_at(self, key: UsageKey, line: Line) -> dict[int, int]:
        counts = self._cells.get(key)
        if counts is None and key not in self._seen:
            if len(self._seen) >= self._most_lines or self.lines >= 2 * self._most_lines:
                key = self._shared_key(key, line)
                counts = self._cells.get(key)
            else:
                self._seen.add(key)
        if counts is None:
            counts = self._cells[key] = Counts()
        return counts.codes

    def _shared_key(self, key: UsageKey, line: Line) -> UsageKey:
        """Still by domain and rule, which the rules bound, unless nothing is taken from here any more."""
        if self.lines >= 3 * self._most_lines:
            return ALL_OTHERS
        return UsageKey(key.domain if line._is_known else OTHER, key.rule, OTHER, OTHER)

    def _begin_minute(self, now_s: float) -> None:
        """Hardly ever an earlier one: clocks are set back a little now and then. One that was far ahead is believed
        again as soon as it is right; what is counted in a minute for the second time is another count (`turns`)."""
        if self._cells:
            self._past.append(Usage(self._minute_s, self._cells))
            self._past_lines += len(self._cells)
            self._cells = {}
        minute_s = int(now_s // MINUTE_S) * MINUTE_S
        if minute_s < self._minute_s - MOST_BEHIND_S:
            self._minute_s = minute_s
            self.turns += 1
        self._minute_s = max(self._minute_s, minute_s)
        self._minute_ends_s = self._minute_s + MINUTE_S
        self._generation = object()
        self._seen.clear()

    def _record_some(
        self, lines: Sequence[Line | None], decisions: Sequence[Decision | StoreError], now_s: float, latency_us: int
    ) -> None:
        """Admissions drawn by lot, each as likely as any other. A refusal that is drawn is recorded as all are."""
        number = self._ahead
        while number < len(lines):
            line, decision = lines[int(number)], decisions[int(number)]
            if line is not None and isinstance(decision, Decision) and decision.code is Code.OK and self._has_room():
                self._waiting.append(_admitted(now_s, self._new_id(), line, decision, latency_us))
            number += 1 + self._gap()
        self._ahead = number - len(lines)

    def _gap(self) -> float:
        if self._sample >= 1:
            return 0
        return int(math.log(1 - self._draw()) / math.log1p(-self._sample)) if self._sample > 0 else math.inf

    def _has_room(self) -> bool:
        """The newest is what is dropped: what came before it tells how it began."""
        if len(self._waiting) < self._most_waiting:
            return True
        self.dropped += 1
        return False

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def take_decisions(self, most: int) -> list[Recorded]:
        """The oldest."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

    def put_back(self, decisions: Sequence[Recorded]) -> None:
        """Those that were taken last and could not be written."""
        self._waiting.extendleft(reversed(decisions))
        while len(self._waiting) > self._most_waiting:
            self._waiting.pop()
            self.dropped += 1

    @property
    def minute_s(self) -> int:
        """When the minute began that calls are counted under; to earlier ones nothing is added any more."""
        return self._minute_s

    @property
    def lines(self) -> int:
        """Counted apart since usage was taken."""
        return self._past_lines + len(self._cells)

    @property
    def is_minute_over(self) -> bool:
        """Or the clock was set back by much: in any case nothing more is added to what is counted now."""
        return not self._minute_s - MOST_BEHIND_S <= self._clock() < self._minute_ends_s

    def take_usage(self) -> list[Usage]:
        """What was counted since the last time, oldest first."""
        if self.is_minute_over:
            self._begin_minute(self._clock())
        taken = self._past
        if self._cells:
            taken.append(Usage(self._minute_s, self._cells))
        self._past, self._past_lines, self._cells = [], 0, {}
        self._generation = object()
        return taken

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield WAITING, len(self._waiting)
        yield DROPPED, self.dropped
        yield LINES, self.lines


def _count(codes: dict[int, int], code: int) -> None:
    codes[code] = codes.get(code, 0) + 1


def _refusing(decision: Decision) -> Status:
    """A quota alone refuses nobody while another passes: a limit that refuses is the one that did."""
    if len(decision.statuses) == 1:
        return decision.statuses[0]
    over = [status for status in decision.statuses if status.code is Code.OVER_LIMIT]
    return next((status for status in over if status.step is not None and not status.step.quota_mode), over[0])


def _rule(slot: Slot | None) -> str:
    return _fit(told_as(slot.rule), _LONGEST_RULE) if slot is not None and slot.rule is not None else ""


def _refused(
    now_s: float, log_id: int, caller: Caller, rule: str, decision: Decision, status: Status, latency_us: int
) -> Recorded:
    """`status` is what speaks for the decision."""
    refusal = decision.outline.refusal
    if refusal is not None:
        why = refusal.reason
        return Recorded(now_s, log_id, caller, rule, Word.BLOCKED, None, None, refusal.status, None, latency_us, why)
    deny = status.slot.rule.deny if status.slot.rule is not None else None
    http = 429 if deny is None else deny.status
    current, limit = _used(status)
    return Recorded(now_s, log_id, caller, rule, Word.THROTTLED, current, limit, http, status.reset_s, latency_us)


def _admitted(now_s: float, log_id: int, line: Line, decision: Decision, latency_us: int) -> Recorded:
    spoken = next((status for status in decision.statuses if status.step is not None), None)
    current, limit = _used(spoken) if spoken is not None else (None, None)
    return Recorded(now_s, log_id, line.caller, line.rule, Word.ALLOWED, current, limit, latency_us=latency_us)


def _used(status: Status) -> tuple[int | None, int | None]:
    """How much of how much; a cooldown, and a store that did not answer, say nothing of the former."""
    if status.step is None:
        return None, None
    limit = status.step.limit
    most = limit.burst or limit.requests_per_unit
    return (None if status.reading is None or status.cooldown is not None else most - status.reading.left), most


def _fit(text: str, longest: int) -> str:
    """What every database can store: PostgreSQL has no room for NUL, and UTF-8 none for half a surrogate pair."""
    text = text[:longest]
    return text if text.isprintable() else text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _key_id(text: str | None) -> str:
    """Of a key of ours alone: whatever else an entry of that name carries may be a secret."""
    found = _KEY_ID.fullmatch(text) if text else None
    return found[1] if found else ""
