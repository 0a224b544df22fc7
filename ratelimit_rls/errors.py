"""Exceptions of the package.

    RateLimitRlsError
     ├─ SettingsError        the environment or a flag is invalid; the process does not start
     ├─ RulesError           a rules file is invalid; has all problems of all files, sorted
     ├─ BadRequest           the client's message is invalid; nothing was counted
     │   └─ TooComplex       it exceeds a bound on the content of one message
     ├─ NotReady             no rules have been loaded yet
     ├─ Unauthenticated      an administrator sent no token, or an invalid one
     ├─ PermissionDenied     the role of an administrator's token does not suffice
     ├─ TooManyRequests      an administrator has to wait before the next request
     ├─ DatabaseError        the database cannot be used
     │   └─ DatabaseUnavailable      it is not connected; a transaction may have been rolled back
     ├─ NotFound             the object named in an admin request does not exist
     ├─ Conflict             the object was changed meanwhile, or already exists
     └─ StoreError           the store did not reply; it is unknown whether anything was counted
         ├─ StoreTimeout
         │   └─ CallerDeadlineExceeded   the caller's deadline comes first
         ├─ StoreUnavailable
         │   └─ StoreUnusable   Redis answers, but does not do what the service needs
         ├─ UnknownState        a state has a form that this release does not know; nothing was counted
         └─ Overloaded       not sent: too many calls wait for the store

They are raised where the cause is known and translated once at the edge: to a gRPC status in transport/grpc, to an HTTP
status in transport/http and admin, to an exit code in cli.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


class RateLimitRlsError(Exception):
    """Base class of all exceptions that this package raises on purpose."""


class SettingsError(RateLimitRlsError):
    """A variable or flag has an invalid value. The message names it and says what would be valid."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One error or warning in a rules file, with its position."""

    file: str
    line: int  # 0: the problem has no line, only a file
    column: int
    message: str
    severity: Literal["error", "warning"] = "error"
    code: str = ""  # kind of warning, e.g. "unreachable"; errors have none

    def __str__(self) -> str:
        kind = f"{self.severity}[{self.code}]" if self.code else self.severity
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {kind}: {one_line(self.message)}"


def one_line(text: str) -> str:
    """Escape non-printable characters: messages quote files, which must not send control characters to a terminal."""
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class RulesError(RateLimitRlsError):
    """A rules update was rejected. `problems` has all errors of all files, sorted by position."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


class BadRequest(RateLimitRlsError):
    """The request is invalid. The message says what would be valid."""

    def __init__(self, message: str, *, field: str = "") -> None:
        """Create the error. `field` is the field of the request that the message is about; "": no single one."""
        super().__init__(message)
        self.field = field


class TooComplex(BadRequest):
    """The request exceeds a bound. The error message names the bound and its setting."""


class NotReady(RateLimitRlsError):
    """No rules have been loaded since the process started."""


class Unauthenticated(RateLimitRlsError):
    """An administrator's token is missing or invalid. The message never repeats it."""

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


class PermissionDenied(RateLimitRlsError):
    """The role of an administrator's token does not suffice. The message names both roles."""


class TooManyRequests(RateLimitRlsError):
    """An administrator, or the address of failed logins, has reached a rate limit."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DatabaseError(RateLimitRlsError):
    """The database cannot be used. The message gives the reason and the remedy."""


class DatabaseUnavailable(DatabaseError):
    """The database is not connected. A transaction in progress was rolled back, or its outcome must be queried."""


class NotFound(RateLimitRlsError):
    """No object of that name exists."""


class Conflict(RateLimitRlsError):
    """A concurrent change won: the version is not the expected one, or the name is already taken."""

    def __init__(self, message: str, *, is_stale: bool = False) -> None:
        """Create the error. `is_stale`: the version differs, so reading again and retrying may succeed."""
        super().__init__(message)
        self.is_stale = is_stale


class StoreError(RateLimitRlsError):
    """The store failed. It is unknown whether anything was counted."""


class StoreTimeout(StoreError):
    """The store did not reply within the timeout."""


class CallerDeadlineExceeded(StoreTimeout):
    """The store did not reply before the caller's deadline. Callers with later deadlines may still get a reply."""


class StoreUnavailable(StoreError):
    """The store is not connected, or the server rejects commands."""


class StoreUnusable(StoreUnavailable):
    """A server of the store answers, but does not do what the service needs.

    Often its operator has to change something. `reason` says what is wrong and, if known, what would be
    right. It names neither the server nor the user, since health shows it to everyone.
    """

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(f"Redis at {server} is not usable: {reason}")
        self.reason = reason


class UnknownState(StoreError):
    """A state of the call was not written by this release or an earlier one. Nothing was counted, nor overwritten."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the state {key} has an unknown form; a later release may have written it")
        self.key = key


class Overloaded(StoreError):
    """Too many calls are waiting for the store. This one was not sent, so nothing was counted."""
