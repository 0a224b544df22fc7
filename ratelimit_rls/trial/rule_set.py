"""One of the rule sets under trial: what it would have done to the lines of traffic.

It is what the service is made of (its planner, the Lua in an embedded store, its words) on a clock that the lines
turn. What a line asks is worked out once and kept, bounded in bytes. A call that nothing stands in the way of is only
counted; of the others is put into words what to tell, which takes longer than deciding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Code, Outline
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.store.embedded import Alone, EmbeddedStore
from ratelimit_rls.trial.mapping import BadLine, Mapping, Values
from ratelimit_rls.trial.moments import VirtualClock
from ratelimit_rls.trial.tally import Tally
from ratelimit_rls.trial.traffic import MOST_BAD_TOLD, Line

MOST_KNOWN_BYTES = 64 * 2**20

# Of a request that is kept: weighed with tracemalloc on CPython 3.11.
_KNOWN_BYTES = 400
_COUNTER_BYTES = 190  # for each counter it moves
_COPIES = 3  # of its texts: in the values, in the keys of its counters, escaped


class Verdict(IntEnum):
    ADMITTED = 0
    REFUSED = 1
    UNASKED = 2  # no descriptor came of the line: Envoy would not have asked
    BAD = 3


class Verdicts(NamedTuple):
    """Of some lines: one byte each, and what is wrong with the first few that are bad, by their numbers."""

    codes: bytes
    first_bad: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What there is to tell of a rule set when all lines are through."""

    name: str
    tally: Tally
    evicted: int  # counters that were dropped for room while they still mattered: refusals may be too few


class _Asked(NamedTuple):
    outline: Outline
    alone: Alone | None  # None: nothing to ask the store


class RuleSet:
    def __init__(self, name: str, tree: Tree, mapping: Mapping, width_us: int | None = None) -> None:
        self.name = name
        self._mapping = mapping
        self._clock = VirtualClock()
        self._store = EmbeddedStore(clock=self._clock)
        self._planner = Planner(tree, Policy())
        self._tally = Tally(width_us)
        self._known: dict[Values, _Asked | None] = {}
        self._known_bytes = 0

    def decide(self, lines: Sequence[Line]) -> Verdicts:
        """Lines come in the order of their moments, each a call of its own."""
        verdicts = bytearray()
        bad: list[tuple[int, str]] = []
        known, learn, decide_one = self._known, self._learn, self._decide_one
        for at_us, number, values in lines:
            try:
                asked = known[values] if values in known else learn(values)
            except BadLine as fault:
                verdicts.append(Verdict.BAD)
                if len(bad) < MOST_BAD_TOLD:
                    bad.append((number, str(fault)))
                continue
            verdicts.append(Verdict.UNASKED if asked is None else decide_one(asked, at_us))
        self._tally.settle()
        return Verdicts(bytes(verdicts), tuple(bad))

    def finish(self) -> Outcome:
        return Outcome(self.name, self._tally, self._store.size().evicted)

    def _decide_one(self, asked: _Asked, at_us: int) -> Verdict:
        outline, alone = asked
        self._clock.turn(at_us)
        answer = self._store.decide_alone(alone) if alone is not None else None
        if answer is None:
            self._tally.add(outline, at_us, False)
            return Verdict.ADMITTED
        decision = decide(outline, answer)
        refused = decision.code is Code.OVER_LIMIT
        self._tally.add(outline, at_us, refused)
        self._tally.tell(decision, at_us)
        return Verdict.REFUSED if refused else Verdict.ADMITTED

    def _learn(self, values: Values) -> _Asked | None:
        asked, counters = None, 0
        try:
            request = self._mapping.request(values)
            if request is not None:
                plan = self._planner.plan(request)
                counters = len(plan.keys)
                asked = _Asked(plan.outline, self._store.prepare_alone(plan) if counters else None)
        except BadRequest as fault:
            raise BadLine(str(fault)) from None
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and no request can carry
            raise BadLine("a value is not Unicode text") from None
        self._known_bytes += _KNOWN_BYTES + _COUNTER_BYTES * counters + _COPIES * sum(map(len, filter(None, values)))
        if self._known_bytes > MOST_KNOWN_BYTES:
            self._known.clear()
            self._known_bytes = 0
        self._known[values] = asked
        return asked
