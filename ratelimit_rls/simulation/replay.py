"""Replay of traffic against one or two rule sets at once, as fast as possible on a virtual clock.

This process reads and sorts the lines; each rule set decides in a process of its own, so that neither reading nor the
other rule set slows it down. Where processes cannot be forked, everything runs in this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ratelimit_rls.core.tree import Tree
from ratelimit_rls.simulation.executor import Executor, InProcessExecutor, SubprocessExecutor
from ratelimit_rls.simulation.field_mapping import FieldMapping
from ratelimit_rls.simulation.rule_set import RuleSet, RuleSetResult, Verdict, Verdicts
from ratelimit_rls.simulation.traffic import InvalidLines, Line

CAN_FORK = sys.platform == "linux"
"""Other systems have no fork, or system libraries that may not survive one."""

MAX_PENDING_CHUNKS = 4
"""Chunks sent before the first result must be received: enough to keep every process busy."""


@dataclass(slots=True)
class VerdictChanges:
    """Numbers of calls whose verdict differs between the two rule sets."""

    denied_only_by_first: int = 0
    denied_only_by_second: int = 0


class Replay:
    def __init__(
        self,
        trees: Sequence[tuple[str, Tree]],
        mapping: FieldMapping,
        invalid: InvalidLines,
        width_us: int | None = None,
        *,
        in_subprocess: bool = CAN_FORK,
    ) -> None:
        self._rule_sets = [partial(RuleSet, name, tree, mapping, width_us) for name, tree in trees]
        self._in_subprocess = in_subprocess
        self._invalid = invalid
        self.calls = 0
        self.without_descriptor = 0  # lines without a descriptor: Envoy would not have called the service
        self.changes = VerdictChanges()
        self.outcomes: list[RuleSetResult] = []

    def run(self, chunks: Iterable[Sequence[Line]], progress: Callable[[int], None] = lambda calls: None) -> None:
        """Replay all lines, which are in time order."""
        executors: list[Executor] = []
        try:
            for rule_set in self._rule_sets:
                executors.append(SubprocessExecutor(rule_set) if self._in_subprocess else InProcessExecutor(rule_set))
            waiting = 0
            for chunk in chunks:
                for executor in executors:
                    executor.send(chunk)
                waiting += 1
                if waiting > MAX_PENDING_CHUNKS:
                    self._take([executor.receive() for executor in executors])
                    waiting -= 1
                    progress(self.calls)
            for _ in range(waiting):
                self._take([executor.receive() for executor in executors])
            progress(self.calls)
            self.outcomes = [executor.finish() for executor in executors]
        finally:
            for executor in executors:
                executor.close()

    def _take(self, verdicts: Sequence[Verdicts]) -> None:
        first = verdicts[0]
        invalid, without_request = first.codes.count(Verdict.INVALID), first.codes.count(Verdict.NO_REQUEST)
        self.calls += len(first.codes) - invalid - without_request
        self.without_descriptor += without_request
        self._invalid.add_all(
            invalid, first.first_invalid
        )  # equal for all rule sets: invalid lines do not depend on rules
        if len(verdicts) == 2 and first.codes != verdicts[1].codes:
            for one, other in zip(first.codes, verdicts[1].codes, strict=True):
                self.changes.denied_only_by_first += one > other
                self.changes.denied_only_by_second += other > one
