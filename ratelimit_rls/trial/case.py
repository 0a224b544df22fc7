"""What a test file says, as values: files hold cases, cases hold steps, steps hold what is expected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratelimit_rls.core.model import Code, Descriptor, Position, State
from ratelimit_rls.core.tree import Tree

NEVER_US = -1
"""The retry-after of what can never be admitted, as the store tells it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What should be told of one descriptor; None is not looked at."""

    code: Code | None = None
    remaining: int | None = None
    retry_us: int | None = None  # to the microsecond; 0: it is within its limit
    rule: str | None = None  # its path or its name; "": no rule is met
    state: State | None = None
    violations: int | None = None


@dataclass(frozen=True, slots=True)
class CaseStep:
    """One call, or the same call several times."""

    position: Position
    at_us: int  # the moment itself, not since the start
    descriptors: tuple[Descriptor, ...]  # none: nothing comes of the request, and no limit applies
    times: int
    every_us: int  # between two of these times
    passes: int  # how many of them are expected to pass
    statuses: tuple[Expected, ...]  # one per descriptor, of the last call; or none at all
    delay_us: int | None = None  # how long the last call is held; None is not looked at


@dataclass(frozen=True, slots=True)
class Case:
    """One test: it starts with nothing counted."""

    position: Position
    name: str
    domain: str
    start_us: int
    steps: tuple[CaseStep, ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """One test file with the rules it is about."""

    file: str
    rules_files: tuple[Path, ...]
    tree: Tree
    cases: tuple[Case, ...]
