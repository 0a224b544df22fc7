"""Which rules were met by at least one step of a test, and which by none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratelimit_rls.core.model import Rule
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.sources.files import RulesFiles
from ratelimit_rls.trial.case import Suite


@dataclass(frozen=True, slots=True)
class Coverage:
    rules: int
    missed: tuple[Rule, ...]  # in the order of their places

    @property
    def percent(self) -> float:
        """Of no rules, all are met."""
        return 100 * (self.rules - len(self.missed)) / self.rules if self.rules else 100.0


def measure(suites: Iterable[Suite], directories: Sequence[Path], met: Iterable[Rule]) -> Coverage:
    """Over every rule the test files are about, and every rule in `directories`, also where no test names its file."""
    known: dict[str, Rule] = {}
    named: set[Path] = set()
    for suite in suites:
        named.update(file.resolve() for file in suite.rules_files)
        known.update((_identity(rule), rule) for rule in suite.tree.rules())
    for source in RulesFiles(directories).read() if directories else ():
        if Path(source.name).resolve() not in named:
            known.update((_identity(rule), rule) for rule in compile_documents([source]).tree.rules())
    seen = {_identity(rule) for rule in met}
    missed = sorted((identity, rule) for identity, rule in known.items() if identity not in seen)
    return Coverage(len(known), tuple(rule for _, rule in missed))


def _identity(rule: Rule) -> str:
    """Where it is written: one file may be compiled for several tests, and one path stand in two files."""
    at = rule.position
    return f"{Path(at.file).resolve()}:{at.line:08}:{at.column:04} {rule.path}" if at else rule.path
