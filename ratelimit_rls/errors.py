"""Every exception of the package, by whose fault it is.

    RateLimitRlsError
     ├─ SettingsError        the environment or a flag is wrong; the process does not start
     ├─ RulesError           a rules file is wrong; carries every problem of every file, sorted
     ├─ BadRequest           the caller's message is wrong; nothing was counted
     ├─ NotReady             no rules have ever been loaded
     ├─ RecordsError         the database cannot be asked, or cannot be used as it is
     │   └─ RecordsUnavailable   it is away; whatever was under way did not happen
     ├─ NotFound             an administrator speaks of something that is not there
     ├─ Conflict             what was to be changed has changed meanwhile, or is there already
     └─ StoreError           the store did not answer; whether anything was counted is unknown
         ├─ StoreTimeout
         │   └─ Late         it has not answered yet, and its caller cannot wait any longer
         ├─ StoreUnavailable
         └─ Overloaded       it was not even asked: too many calls wait for it

Raised where the fault is known, translated once at the edge: to a gRPC status in transport/grpc, to an HTTP status in
transport/http, to an exit code in cli.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


class RateLimitRlsError(Exception):
    """The root: whatever this package raises on purpose."""


class SettingsError(RateLimitRlsError):
    """A variable or flag has a value that cannot be used; the message names it and says what would be right."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing wrong (or odd) in one rules file, at a place a person can jump to."""

    file: str
    line: int  # 0: it is in no line, and `file` is all there is to say of its place
    column: int
    message: str
    severity: Literal["error", "warning"] = "error"
    code: str = ""  # the kind of warning, e.g. "unreachable"; errors have none

    def __str__(self) -> str:
        kind = f"{self.severity}[{self.code}]" if self.code else self.severity
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {kind}: {one_line(self.message)}"


def one_line(text: str) -> str:
    """What a file says may be quoted in messages, and must not reach a terminal or a log as more than text."""
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class RulesError(RateLimitRlsError):
    """A rules update was refused; `problems` has every error of every file, sorted by place."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


class BadRequest(RateLimitRlsError):
    """The request cannot be answered as it is; the message says what would be right."""


class NotReady(RateLimitRlsError):
    """No rules have been loaded since the process started."""


class RecordsError(RateLimitRlsError):
    """The database cannot be used; the message says why, and what would help."""


class RecordsUnavailable(RecordsError):
    """There is no connection, or it was lost: what was under way was rolled back, or its fate is told by asking."""


class NotFound(RateLimitRlsError):
    """There is nothing of that name."""


class Conflict(RateLimitRlsError):
    """Somebody else was first: the version is not the expected one, or the name is taken."""

    def __init__(self, message: str, *, is_stale: bool = False) -> None:
        """`is_stale`: the version differs, so that reading again and deciding anew would help."""
        super().__init__(message)
        self.is_stale = is_stale


class StoreError(RateLimitRlsError):
    """The store failed, and a caller must not assume that nothing was counted."""


class StoreTimeout(StoreError):
    """No answer within the time allowed."""


class Late(StoreTimeout):
    """No answer before the caller's deadline; to others the same store may still be in time."""


class StoreUnavailable(StoreError):
    """There is no connection, or the server refuses to serve."""


class Overloaded(StoreError):
    """As many calls wait for the store as may; this one was not sent, so nothing was counted."""
