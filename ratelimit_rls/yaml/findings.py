"""Errors and warnings of one YAML file, with their positions."""

from __future__ import annotations

from dataclasses import dataclass, field

from ratelimit_rls.core.model import Position
from ratelimit_rls.errors import Problem
from ratelimit_rls.yaml.nodes import YamlNode


@dataclass(slots=True)
class Findings:
    """Collects the errors and warnings of one file, so that all are reported at once."""

    file: str
    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    first_line: int = 1  # of the text that is checked

    def error(self, at: YamlNode | Position, message: str) -> None:
        self.errors.append(Problem(self.file, at.line, at.column, message))

    def warn(self, at: YamlNode | Position, code: str, message: str) -> None:
        self.warnings.append(Problem(self.file, at.line, at.column, message, "warning", code))

    @property
    def problem_count(self) -> int:
        """Number of problems so far. Compare two values to see whether a step reported any."""
        return len(self.errors) + len(self.warnings)

    def position(self, node: YamlNode) -> Position:
        return Position(self.file, node.line, node.column)
