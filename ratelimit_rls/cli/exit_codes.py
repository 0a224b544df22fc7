"""What the process says to its caller when it ends. Scripts depend on the numbers: never change one."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    BAD = 1  # what was checked is wrong, or over limit with --fail-over-limit
    USAGE = 2
    WARNINGS = 3  # nothing but warnings, with --strict
    UNREACHABLE = 4  # something this depends on did not answer
    INTERRUPTED = 130


LEGEND = (
    "Exit codes: 0 done, 1 what was checked is bad, 2 usage, 3 only warnings (with --strict), "
    "4 a dependency could not be reached, 130 interrupted."
)
