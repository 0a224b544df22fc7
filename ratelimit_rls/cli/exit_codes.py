"""Exit codes of the commands. Scripts depend on the numbers: never change one."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    BAD = 1  # what was checked failed (also with --fail-…), or differs; or the input is invalid
    USAGE = 2
    WARNINGS = 3  # warnings but no errors, with --strict
    UNREACHABLE = 4  # the server, Redis or the database did not respond
    INTERRUPTED = 130


LEGEND = (
    "Exit codes: 0 success, 1 check failed, difference found or invalid input, 2 usage error, "
    "3 warnings only (with --strict), 4 a dependency could not be reached, 130 interrupted."
)
