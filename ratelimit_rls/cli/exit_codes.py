"""Exit codes of the commands. Scripts depend on the numbers: never change one."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    BAD = 1  # the checked input is invalid, or over limit with --fail-over-limit
    USAGE = 2
    WARNINGS = 3  # warnings but no errors, with --strict
    UNREACHABLE = 4  # the server, Redis or the database did not respond
    INTERRUPTED = 130


LEGEND = (
    "Exit codes: 0 success, 1 check failed, over limit (with --fail-over-limit) or invalid input, 2 usage error, "
    "3 warnings only (with --strict), 4 a dependency could not be reached, 130 interrupted."
)
