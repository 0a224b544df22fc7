"""Test coverage of rules: which rules were matched by at least one test step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratelimit_rls.core.model import Rule
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.sources.files import RulesFiles
from ratelimit_rls.simulation.case import Suite


@dataclass(frozen=True, slots=True)
class Coverage:
    rules: int
    missed: tuple[Rule, ...]  # in position order

    @property
    def percent(self) -> float:
        """Percentage of matched rules; 100 if there are no rules."""
        return 100 * (self.rules - len(self.missed)) / self.rules if self.rules else 100.0


def measure(suites: Iterable[Suite], directories: Sequence[Path], matched: Iterable[Rule]) -> Coverage:
    """Return the coverage over all rules of the test files and all rules in `directories`.

    Rules in `directories` count even if no test names their file.
    """
    known: dict[str, Rule] = {}
    named: set[Path] = set()
    for suite in suites:
        named.update(file.resolve() for file in suite.rules_files)
        known.update((_identity(rule), rule) for rule in suite.tree.rules())
    for source in RulesFiles(directories).read() if directories else ():
        if Path(source.name).resolve() not in named:
            known.update((_identity(rule), rule) for rule in compile_documents([source]).tree.rules())
    seen = {_identity(rule) for rule in matched}
    missed = sorted((identity, rule) for identity, rule in known.items() if identity not in seen)
    return Coverage(len(known), tuple(rule for _, rule in missed))


def _identity(rule: Rule) -> str:
    """Return the identity of a rule: its position.

    One file may be compiled for several tests, and two files may contain the same path.
    """
    at = rule.position
    return f"{Path(at.file).resolve()}:{at.line:08}:{at.column:04} {rule.path}" if at else rule.path
