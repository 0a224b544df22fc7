"""Decisions of one rule set on lines of traffic.

It uses the service's own planner and its Lua script in an embedded store, on a clock that the lines advance. The plan
of a line is computed once and cached, bounded in bytes. A call that no limit affects is only counted; the full
decision, which takes longer than the script, is derived for the others only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Code, PlanTemplate
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.simulation.clock import VirtualClock
from ratelimit_rls.simulation.field_mapping import FieldMapping, InvalidLine, Values
from ratelimit_rls.simulation.tally import Tally
from ratelimit_rls.simulation.traffic import MAX_REPORTED_BAD_LINES, Line
from ratelimit_rls.store.embedded import EmbeddedStore, SinglePlan

MAX_CACHE_BYTES = 64 * 2**20

# Sizes of a cached request, measured with tracemalloc on CPython 3.11.
_ENTRY_BYTES = 400
_COUNTER_BYTES = 190  # per counter of the request
_COPIES = 3  # of its texts: in the values, in the counter keys, escaped


class Verdict(IntEnum):
    ADMITTED = 0
    DENIED = 1
    NO_REQUEST = 2  # the line has no descriptor: Envoy would not have called the service
    INVALID = 3


class Verdicts(NamedTuple):
    """Verdicts for some lines, one byte each, and the errors of the first invalid lines by line number."""

    codes: bytes
    first_invalid: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RuleSetResult:
    """Result of a rule set after all lines."""

    name: str
    tally: Tally
    evicted: int  # counters evicted while still relevant: denials may be too few


class _PreparedCall(NamedTuple):
    template: PlanTemplate
    single: SinglePlan | None  # None: no counters


class RuleSet:
    def __init__(self, name: str, tree: Tree, mapping: FieldMapping, width_us: int | None = None) -> None:
        self.name = name
        self._mapping = mapping
        self._clock = VirtualClock()
        self._store = EmbeddedStore(clock=self._clock)
        self._planner = Planner(tree, Policy())
        self._tally = Tally(width_us)
        self._cache: dict[Values, _PreparedCall | None] = {}
        self._cache_bytes = 0

    def replay(self, lines: Sequence[Line]) -> Verdicts:
        """Return the verdict on each line, a call of its own. Lines are in time order."""
        verdicts = bytearray()
        invalid: list[tuple[int, str]] = []
        cache, prepare, replay_line = self._cache, self._prepare, self._replay_line
        for at_us, number, values in lines:
            try:
                call = cache[values] if values in cache else prepare(values)
            except InvalidLine as error:
                verdicts.append(Verdict.INVALID)
                if len(invalid) < MAX_REPORTED_BAD_LINES:
                    invalid.append((number, str(error)))
                continue
            verdicts.append(Verdict.NO_REQUEST if call is None else replay_line(call, at_us))
        self._tally.flush()
        return Verdicts(bytes(verdicts), tuple(invalid))

    def finish(self) -> RuleSetResult:
        return RuleSetResult(self.name, self._tally, self._store.size().evicted)

    def _replay_line(self, call: _PreparedCall, at_us: int) -> Verdict:
        template, single = call
        self._clock.advance_to(at_us)
        result = self._store.spend_single(single) if single is not None else None
        if result is None:
            self._tally.add(template, at_us, False)
            return Verdict.ADMITTED
        decision = decision_of(template, result)
        denied = decision.code is Code.OVER_LIMIT
        self._tally.add(template, at_us, denied)
        self._tally.record_decision(decision, at_us)
        return Verdict.DENIED if denied else Verdict.ADMITTED

    def _prepare(self, values: Values) -> _PreparedCall | None:
        call, counters = None, 0
        try:
            request = self._mapping.request(values)
            if request is not None:
                plan = self._planner.plan(request)
                counters = len(plan.keys)
                call = _PreparedCall(plan.template, self._store.prepare_single(plan) if counters else None)
        except BadRequest as error:
            raise InvalidLine(str(error)) from None
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can represent but a request cannot
            raise InvalidLine("a value is not Unicode text") from None
        self._cache_bytes += _ENTRY_BYTES + _COUNTER_BYTES * counters + _COPIES * sum(map(len, filter(None, values)))
        if self._cache_bytes > MAX_CACHE_BYTES:
            self._cache.clear()
            self._cache_bytes = 0
        self._cache[values] = call
        return call
