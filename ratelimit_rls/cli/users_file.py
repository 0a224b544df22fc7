"""Reader and writer of users files: JSON Lines or CSV. Every line is validated; an invalid line does not stop reading.

A line is one complete user, as in `PUT /users/{id}` of the admin API. Besides the users themselves, memory does not
grow with the number of lines: only the first errors are kept, and their total number.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

import click

from ratelimit_rls.core.model import Limit
from ratelimit_rls.database.queries import quote_name
from ratelimit_rls.database.validation import check_caller_name
from ratelimit_rls.errors import BadRequest, RulesError, one_line
from ratelimit_rls.identity.accounts import User, limit_fields
from ratelimit_rls.rules.limits_json import read_limits

Form = Literal["jsonl", "csv"]

MAX_REPORTED_ERRORS = 20
"""Maximum number of errors that are kept; the rest are only counted."""

MAX_LINE_BYTES = 64 * 1024
"""Maximum length of a line. Names have at most 255 characters and users at most 16 limits: less than a tenth of it."""

_FIELDS = ("user_id", "tier", "org", "limits")
_COLUMNS = _FIELDS[:3]
_EXAMPLE = '{"user_id": "alice", "tier": "gold"}'
_MAX_CACHED_LIMITS = 10_000


class LineErrors:
    def __init__(self) -> None:
        self.first: list[str] = []
        self.count = 0

    def add(self, file: str, line: int, reason: str) -> None:
        self.count += 1
        if len(self.first) < MAX_REPORTED_ERRORS:
            self.first.append(one_line(f"{file}:{line}: {reason}"))

    def lines(self) -> Iterator[str]:
        yield from self.first
        if self.count > len(self.first):
            yield f"and {self.count - len(self.first)} more"


class UsersFiles:
    """The users of all files together; each user may be on one line of one file only."""

    def __init__(self, tiers: Collection[str]) -> None:
        """`tiers` are the existing tiers; any other is an error."""
        self.users: dict[str, User] = {}
        self.mistakes = LineErrors()
        self._tiers = tiers
        self._places: dict[str, tuple[str, int]] = {}
        self._file = ""
        self._line = 0

    def read(self, file: str, stream: IO[bytes], form: Form) -> None:
        """Read one file; `file` is its name in error messages. Raises OSError if it cannot be read to its end."""
        self._file = file
        for fields in self._csv(stream) if form == "csv" else self._json(stream):
            user = self._user(fields)
            if user is None:
                continue
            if first := self._places.get(user.user_id):
                self._reject(f"user {quote_name(user.user_id)} is already defined in {first[0]}:{first[1]}")
                continue
            self._places[user.user_id] = file, self._line
            self.users[user.user_id] = user

    def _reject(self, reason: str) -> None:
        self.mistakes.add(self._file, self._line, reason)

    def _lines(self, stream: IO[bytes]) -> Iterator[str]:
        """Yield non-empty lines that are UTF-8. Only a line feed ends a line."""
        self._line = 0
        while read := stream.readline(MAX_LINE_BYTES + 1):
            self._line += 1
            if len(read) > MAX_LINE_BYTES:
                while read and not read.endswith(b"\n"):
                    read = stream.readline(MAX_LINE_BYTES)
                self._reject(f"longer than {MAX_LINE_BYTES:,} bytes; each line must be one user")
                continue
            try:
                text = read.decode("utf-8-sig" if self._line == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                self._reject("not UTF-8; save the file as UTF-8")
                continue
            if text.strip():
                yield text

    def _json(self, stream: IO[bytes]) -> Iterator[Mapping[str, Any]]:
        for text in self._lines(stream):
            try:
                fields = _DECODER.decode(text)
            except json.JSONDecodeError as error:
                self._reject(
                    f"not JSON: {error.msg}, at column {error.colno}; each line must be one user, e.g. {_EXAMPLE}"
                )
            except RecursionError:
                self._reject(f"not a user: nested too deeply; must be e.g. {_EXAMPLE}")
            except ValueError as error:  # from _object, or a number with thousands of digits
                self._reject(f"not a user: {error}")
            else:
                if isinstance(fields, dict):
                    yield fields
                else:
                    self._reject(f"not a JSON object; each line must be one user, e.g. {_EXAMPLE}")

    def _csv(self, stream: IO[bytes]) -> Iterator[Mapping[str, Any]]:
        # Line by line, since no name spans two lines: an unclosed quote is an error of its own line.
        header: list[str] = []
        for text in self._lines(stream):
            try:
                (cells,) = csv.reader([text], strict=True)
            except csv.Error as error:
                self._reject(f"not CSV: {error}")
                if header:
                    continue
                return
            if header:
                if len(cells) == len(header):
                    yield dict(zip(header, cells, strict=True))
                else:
                    self._reject(f"{len(cells)} columns, expected {len(header)}")
            elif "user_id" not in cells or len(set(cells)) < len(cells) or not set(cells) <= set(_COLUMNS):
                self._reject(f"the first line must name the columns: {','.join(_COLUMNS)}; limits need JSON")
                return
            else:
                header = cells
        if not header:
            self._line = max(self._line, 1)
            self._reject(f"the file is empty; the first line must be {','.join(_COLUMNS)}")

    def _user(self, fields: Mapping[str, Any]) -> User | None:
        """Return the user, or None if a field is invalid; every error has been added."""
        before = self.mistakes.count
        for name in [name for name in fields if name not in _FIELDS]:
            self._reject(f"unknown field {quote_name(name)}; fields are {', '.join(_FIELDS)}")
        user_id, tier, org = (self._name(fields, name) for name in _COLUMNS)
        if tier and tier not in self._tiers:
            self._reject(f"there is no tier {quote_name(tier)}: create it first")
        limits = self._limits_of(fields["limits"]) if "limits" in fields else ()
        return User(user_id, tier, limits, org=org) if self.mistakes.count == before else None

    def _name(self, fields: Mapping[str, Any], name: str) -> str:
        value = fields.get(name, "")
        if not isinstance(value, str):
            self._reject(f'{name} must be a string, e.g. "alice"')
            return ""
        try:
            check_caller_name(value, name, may_be_empty=name != "user_id")
        except BadRequest as error:
            self._reject(str(error))
            return ""
        return value

    def _limits_of(self, written: object) -> tuple[Limit, ...]:
        """Compile limits with the rules compiler. It is slow, so equal texts share one result."""
        try:
            return _read_limits(json.dumps(written))
        except RulesError as error:
            for problem in error.problems:
                self._reject(f"{problem.file}: {problem.message}")
            return ()


@lru_cache(_MAX_CACHED_LIMITS)
def _read_limits(text: str) -> tuple[Limit, ...]:
    return read_limits(json.loads(text))


def read_users(paths: Sequence[Path], form: Form | None, tiers: Collection[str]) -> UsersFiles:
    """Read the users of all files; `-` is stdin. Without `form`, names that end in .csv are CSV, all others JSON."""
    users_files = UsersFiles(tiers)
    for path in paths:
        try:
            if str(path) == "-":
                users_files.read("<stdin>", sys.stdin.buffer, form or "jsonl")
                continue
            with path.open("rb") as stream:
                users_files.read(str(path), stream, form or ("csv" if path.suffix.lower() == ".csv" else "jsonl"))
        except OSError as error:
            raise click.FileError(str(path), error.strerror) from None
    return users_files


def format_user(user: User) -> str:
    """Return the line of a user. UsersFiles reads it back without loss of any field that an import replaces."""
    fields = {
        "user_id": user.user_id,
        "tier": user.tier,
        "org": user.org,
        "limits": [limit_fields(limit) for limit in user.limits],
    }
    return json.dumps({name: value for name, value in fields.items() if value}) + "\n"


@contextlib.contextmanager
def atomic_output(output: Path | None) -> Iterator[IO[str]]:
    """Open the output. A file is replaced only when it is complete; on failure the previous one stays."""
    if output is None:
        yield sys.stdout
        return
    target = output.resolve()
    if target.exists() and not target.is_file():  # a pipe, a terminal
        with target.open("w") as stream:
            yield stream
        return
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(handle, "w") as stream:
                yield stream
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise click.FileError(str(output), error.strerror) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("duplicate field")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
