"""Replays traffic against one or two rule sets at once, as fast as it can be decided, on a clock of its own.

Lines are read, put in order and handed on here; each rule set decides them in a process of its own, so that neither
reading nor the other rule set takes its time. Where processes cannot be forked, all is done in this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ratelimit_rls.core.tree import Tree
from ratelimit_rls.trial.decider import Apart, Decider, Here
from ratelimit_rls.trial.mapping import Mapping
from ratelimit_rls.trial.rule_set import Outcome, RuleSet, Verdict, Verdicts
from ratelimit_rls.trial.traffic import BadLines, Line

CAN_FORK = sys.platform == "linux"
"""Elsewhere there is no fork, or the system's own libraries may not survive one."""

MOST_WAITING = 4
"""Chunks that are handed on before the first of them must be through: enough to keep every process busy."""


@dataclass(slots=True)
class Changes:
    """Calls whose verdict differs between the two rule sets."""

    refused_only_by_first: int = 0
    refused_only_by_second: int = 0


class Replay:
    def __init__(
        self,
        trees: Sequence[tuple[str, Tree]],
        mapping: Mapping,
        bad: BadLines,
        width_us: int | None = None,
        *,
        apart: bool = CAN_FORK,
    ) -> None:
        self._rule_sets = [partial(RuleSet, name, tree, mapping, width_us) for name, tree in trees]
        self._apart = apart
        self._bad = bad
        self.calls = 0
        self.unasked = 0  # lines of which no descriptor came: Envoy would not have asked
        self.changes = Changes()
        self.outcomes: list[Outcome] = []

    def run(self, chunks: Iterable[Sequence[Line]], progress: Callable[[int], None] = lambda calls: None) -> None:
        """All lines, which come in the order of their moments."""
        deciders: list[Decider] = []
        try:
            for rule_set in self._rule_sets:
                deciders.append(Apart(rule_set) if self._apart else Here(rule_set))
            waiting = 0
            for chunk in chunks:
                for decider in deciders:
                    decider.send(chunk)
                waiting += 1
                if waiting > MOST_WAITING:
                    self._take([decider.receive() for decider in deciders])
                    waiting -= 1
                    progress(self.calls)
            for _ in range(waiting):
                self._take([decider.receive() for decider in deciders])
            progress(self.calls)
            self.outcomes = [decider.finish() for decider in deciders]
        finally:
            for decider in deciders:
                decider.close()

    def _take(self, verdicts: Sequence[Verdicts]) -> None:
        first = verdicts[0]
        bad, unasked = first.codes.count(Verdict.BAD), first.codes.count(Verdict.UNASKED)
        self.calls += len(first.codes) - bad - unasked
        self.unasked += unasked
        self._bad.add_all(bad, first.first_bad)  # the others say the same: which lines make sense is no matter of rules
        if len(verdicts) == 2 and first.codes != verdicts[1].codes:
            for one, other in zip(first.codes, verdicts[1].codes, strict=True):
                self.changes.refused_only_by_first += one > other
                self.changes.refused_only_by_second += other > one
