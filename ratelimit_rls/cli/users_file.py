"""Users as files have them: a JSON object on each line, or CSV. Every line is checked, and no mistake ends the reading.

A line is one user and the whole of it, as `PUT /users/{id}` of the admin API takes it. Beside the users themselves
nothing that is kept grows with the number of lines: of mistakes the first few are, and how many there were.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import click

from ratelimit_rls.core.accounts import User, limit_fields
from ratelimit_rls.core.model import Limit
from ratelimit_rls.errors import BadRequest, RulesError, one_line
from ratelimit_rls.records.checks import check_name
from ratelimit_rls.records.reader import shown
from ratelimit_rls.rules.limits_text import read_limits

Form = Literal["jsonl", "csv"]

MOST_TOLD = 20
"""Mistakes that are kept; the rest is counted."""

LONGEST_LINE_BYTES = 64 * 1024
"""Names have at most 255 characters, and limits are at most 16: no user needs a tenth of it."""

_FIELDS = ("user_id", "tier", "org", "limits")
_COLUMNS = _FIELDS[:3]
_EXAMPLE = '{"user_id": "alice", "tier": "gold"}'
_MOST_REMEMBERED = 10_000


class Mistakes:
    def __init__(self) -> None:
        self.first: list[str] = []
        self.count = 0

    def add(self, file: str, line: int, why: str) -> None:
        self.count += 1
        if len(self.first) < MOST_TOLD:
            self.first.append(one_line(f"{file}:{line}: {why}"))

    def told(self) -> Iterator[str]:
        yield from self.first
        if self.count > len(self.first):
            yield f"and {self.count - len(self.first)} more"


class UsersFiles:
    """What all files say together: a user is in one line of one of them."""

    def __init__(self, tiers: Collection[str]) -> None:
        """`tiers`: those there are; any other is a mistake."""
        self.users: dict[str, User] = {}
        self.mistakes = Mistakes()
        self._tiers = tiers
        self._places: dict[str, tuple[str, int]] = {}
        self._limits: dict[str, tuple[Limit, ...]] = {}
        self._file = ""
        self._line = 0

    def read(self, file: str, stream: IO[bytes], form: Form) -> None:
        """`file` is what mistakes call it. OSError if it cannot be read to its end."""
        self._file = file
        for fields in self._csv(stream) if form == "csv" else self._json(stream):
            user = self._user(fields)
            if user is None:
                continue
            if first := self._places.get(user.user_id):
                self._refuse(f"user {shown(user.user_id)} is in {first[0]}:{first[1]} already")
                continue
            self._places[user.user_id] = file, self._line
            self.users[user.user_id] = user

    def _refuse(self, why: str) -> None:
        self.mistakes.add(self._file, self._line, why)

    def _lines(self, stream: IO[bytes]) -> Iterator[str]:
        """Those that have something in them and are text. A line ends at a line feed and nowhere else."""
        self._line = 0
        while read := stream.readline(LONGEST_LINE_BYTES + 1):
            self._line += 1
            if len(read) > LONGEST_LINE_BYTES:
                while read and not read.endswith(b"\n"):
                    read = stream.readline(LONGEST_LINE_BYTES)
                self._refuse(f"longer than {LONGEST_LINE_BYTES:,} bytes; a line is one user")
                continue
            try:
                text = read.decode("utf-8-sig" if self._line == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                self._refuse("not UTF-8; save the file as such")
                continue
            if text.strip():
                yield text

    def _json(self, stream: IO[bytes]) -> Iterator[Mapping[str, Any]]:
        for text in self._lines(stream):
            try:
                fields = _DECODER.decode(text)
            except json.JSONDecodeError as fault:
                self._refuse(f"not JSON: {fault.msg}, at column {fault.colno}; a line is one user, e.g. {_EXAMPLE}")
            except RecursionError:
                self._refuse(f"not a user: nested too deeply; right is e.g. {_EXAMPLE}")
            except ValueError as fault:  # of _object, or a number of thousands of digits
                self._refuse(f"not a user: {fault}")
            else:
                if isinstance(fields, dict):
                    yield fields
                else:
                    self._refuse(f"not a JSON object; a line is one user, e.g. {_EXAMPLE}")

    def _csv(self, stream: IO[bytes]) -> Iterator[Mapping[str, Any]]:
        # Line by line, since no name goes over two: a quote that is never closed is a mistake of its own line.
        header: list[str] = []
        for text in self._lines(stream):
            try:
                (cells,) = csv.reader([text], strict=True)
            except csv.Error as fault:
                self._refuse(f"not CSV: {fault}")
                if header:
                    continue
                return
            if header:
                if len(cells) == len(header):
                    yield dict(zip(header, cells, strict=True))
                else:
                    self._refuse(f"{len(cells)} columns in place of {len(header)}")
            elif "user_id" not in cells or len(set(cells)) < len(cells) or not set(cells) <= set(_COLUMNS):
                self._refuse(f"the first line names the columns, and they are {','.join(_COLUMNS)}; limits need JSON")
                return
            else:
                header = cells
        if not header:
            self._line = max(self._line, 1)
            self._refuse(f"nothing is in it; the first line is {','.join(_COLUMNS)}")

    def _user(self, fields: Mapping[str, Any]) -> User | None:
        """None: something is wrong with it, all of which has been noted."""
        before = self.mistakes.count
        for name in [name for name in fields if name not in _FIELDS]:
            self._refuse(f"there is no field {shown(name)}; there are {', '.join(_FIELDS)}")
        user_id, tier, org = (self._name(fields, name) for name in _COLUMNS)
        if tier and tier not in self._tiers:
            self._refuse(f"there is no tier {shown(tier)}: create it first")
        limits = self._limits_of(fields["limits"]) if "limits" in fields else ()
        return User(user_id, tier, limits, org=org) if self.mistakes.count == before else None

    def _name(self, fields: Mapping[str, Any], name: str) -> str:
        value = fields.get(name, "")
        if not isinstance(value, str):
            self._refuse(f'{name} is a text in quotes, e.g. "alice"')
            return ""
        try:
            check_name(value, name, may_be_empty=name != "user_id")
        except BadRequest as fault:
            self._refuse(str(fault))
            return ""
        return value

    def _limits_of(self, written: object) -> tuple[Limit, ...]:
        """By the compiler of rules, which takes its time: the same text is the same limits, made once and shared."""
        text = json.dumps(written)
        limits = self._limits.get(text)
        if limits is None:
            try:
                limits = read_limits(written)
            except RulesError as error:
                for problem in error.problems:
                    self._refuse(f"{problem.file}: {problem.message}")
                return ()
            if len(self._limits) >= _MOST_REMEMBERED:
                self._limits.clear()
            self._limits[text] = limits
        return limits


def read_users(paths: Sequence[Path], form: Form | None, tiers: Collection[str]) -> UsersFiles:
    """All that the files say; `-` is stdin. Without a form, a name that ends in .csv is CSV, and any other JSON."""
    given = UsersFiles(tiers)
    for path in paths:
        try:
            if str(path) == "-":
                given.read("<stdin>", sys.stdin.buffer, form or "jsonl")
                continue
            with path.open("rb") as stream:
                given.read(str(path), stream, form or ("csv" if path.suffix.lower() == ".csv" else "jsonl"))
        except OSError as error:
            raise click.FileError(str(path), error.strerror) from None
    return given


def line_of(user: User) -> str:
    """As UsersFiles takes it back, without loss of anything that an import replaces."""
    fields = {
        "user_id": user.user_id,
        "tier": user.tier,
        "org": user.org,
        "limits": [limit_fields(limit) for limit in user.limits],
    }
    return json.dumps({name: value for name, value in fields.items() if value}) + "\n"


@contextlib.contextmanager
def written_whole(output: Path | None) -> Iterator[IO[str]]:
    """Where lines go. A file is there when all of it is: what was there before is better than half of what comes."""
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
        raise ValueError("a field is given twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
