"""Test files as values: a suite has cases, a case has steps, a step has expectations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratelimit_rls.core.model import Code, Descriptor, Position, WarningState
from ratelimit_rls.core.tree import Tree

NEVER_US = -1
"""Retry-after of a call that can never be admitted, as the store returns it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected status of one descriptor; None is not compared."""

    code: Code | None = None
    remaining: int | None = None
    retry_us: int | None = None  # to the microsecond; 0: within the limit
    rule: str | None = None  # path or name of the rule; "": no rule
    state: WarningState | None = None
    violations: int | None = None


@dataclass(frozen=True, slots=True)
class CaseStep:
    """One call, or the same call several times."""

    position: Position
    at_us: int  # absolute, not since the start
    descriptors: tuple[Descriptor, ...]  # (): the request has no descriptors, and no limit applies
    times: int
    every_us: int  # interval between calls
    passes: int  # expected number of calls that pass
    statuses: tuple[Expected, ...]  # one per descriptor, of the last call; or ()
    delay_us: int | None = None  # delay of the last call; None is not compared


@dataclass(frozen=True, slots=True)
class Case:
    """One test case, which starts with empty counters."""

    position: Position
    name: str
    domain: str
    start_us: int
    steps: tuple[CaseStep, ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """One test file with its rules."""

    file: str
    rules_files: tuple[Path, ...]
    tree: Tree
    cases: tuple[Case, ...]
