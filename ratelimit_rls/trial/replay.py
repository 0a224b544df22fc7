"""Replays traffic against one or two rule sets at once, as fast as it can be decided, on a clock of its own.

Each rule set is the service itself on an embedded store. Lines of one moment go together as one batch, as they do when
they arrive in one turn of the loop; what a request means is worked out once and kept, bounded in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ratelimit_rls.core.model import Code
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest, StoreError
from ratelimit_rls.service import Call
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.trial.mapping import BadLine, Mapping, Values
from ratelimit_rls.trial.moments import VirtualClock
from ratelimit_rls.trial.play import limiter_on
from ratelimit_rls.trial.tally import Tally
from ratelimit_rls.trial.traffic import BadLines, Line

LARGEST_BATCH = 128
PROGRESS_EVERY = 5_000  # calls
MOST_KNOWN_BYTES = 64 * 2**20

_KNOWN_BYTES = 600  # what is kept of a request beside its texts, per rule set
_COPIES = 3  # of its texts: in the values, in the keys of its counters, escaped


@dataclass(slots=True)
class Changes:
    """Calls whose verdict differs between the two rule sets."""

    refused_only_by_first: int = 0
    refused_only_by_second: int = 0


class RuleSet:
    """One of the rule sets under trial."""

    def __init__(self, name: str, tree: Tree, clock: VirtualClock, width_us: int | None = None) -> None:
        self.name = name
        self.tally = Tally(width_us)
        self._store = EmbeddedStore(clock=clock)
        self._limiter = limiter_on(tree, self._store)
        self.prepare = self._limiter.prepare

    async def decide(self, calls: Sequence[Call], at_us: int) -> list[bool]:
        """Whether each call is refused."""
        verdicts = []
        for decision in await self._limiter.check(calls):
            if isinstance(decision, StoreError):
                raise decision
            self.tally.record(decision, at_us)
            verdicts.append(decision.code is Code.OVER_LIMIT)
        return verdicts

    @property
    def evicted(self) -> int:
        """Counters that were dropped for room while they still mattered: the true number of refusals may be higher."""
        return self._store.size().evicted


class Replay:
    def __init__(
        self, trees: Sequence[tuple[str, Tree]], mapping: Mapping, bad: BadLines, width_us: int | None = None
    ) -> None:
        self._clock = VirtualClock()
        self.rule_sets = [RuleSet(name, tree, self._clock, width_us) for name, tree in trees]
        self.changes = Changes()
        self.calls = 0
        self.unasked = 0  # lines of which no descriptor came: Envoy would not have asked
        self.first_us: int | None = None
        self.last_us: int | None = None
        self._mapping = mapping
        self._bad = bad
        self._known: dict[Values, tuple[Call, ...] | None] = {}
        self._known_bytes = 0

    async def run(self, lines: Iterable[Line], progress: Callable[[int], None] = lambda calls: None) -> None:
        """All lines, which come in the order of their moments."""
        batch: list[tuple[Call, ...]] = []
        now_us = -1
        for at_us, number, values in lines:
            asked = self._known[values] if values in self._known else self._learn(values, number)
            if asked is None:
                continue
            if batch and (at_us != now_us or len(batch) == LARGEST_BATCH):
                await self._decide(batch, now_us)
                batch = []
            now_us = at_us
            batch.append(asked)
            self.calls += 1
            if self.calls % PROGRESS_EVERY == 0:
                progress(self.calls)
        if batch:
            await self._decide(batch, now_us)

    async def _decide(self, batch: list[tuple[Call, ...]], at_us: int) -> None:
        self._clock.turn(at_us)
        if self.first_us is None:
            self.first_us = at_us
        self.last_us = at_us
        verdicts = [
            await rule_set.decide([asked[index] for asked in batch], at_us)
            for index, rule_set in enumerate(self.rule_sets)
        ]
        if len(verdicts) == 2 and verdicts[0] != verdicts[1]:
            for first, second in zip(*verdicts, strict=True):
                self.changes.refused_only_by_first += first and not second
                self.changes.refused_only_by_second += second and not first

    def _learn(self, values: Values, line: int) -> tuple[Call, ...] | None:
        try:
            request = self._mapping.request(values)
            if request is None:
                self.unasked += 1
                return None
            asked = tuple(rule_set.prepare(request) for rule_set in self.rule_sets)
        except (BadLine, BadRequest) as fault:
            self._bad.add(line, str(fault))
            return None
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and no request can carry
            self._bad.add(line, "a value is not Unicode text")
            return None
        self._known_bytes += _KNOWN_BYTES * len(asked) + _COPIES * sum(len(value) for value in values if value)
        if self._known_bytes > MOST_KNOWN_BYTES:
            self._known.clear()
            self._known_bytes = 0
        self._known[values] = asked
        return asked
