"""Sources of traffic: a log of JSON lines, a CSV file, or a profile of rates. Each is read once, line by line.

A line is a timestamp and the values of the relevant fields. Lines that cannot be read are counted, and the first few
recorded. Memory does not grow with the number of lines.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, NamedTuple

from ratelimit_rls.errors import Problem, RulesError, SettingsError
from ratelimit_rls.simulation.clock import DEFAULT_START_US, parse_timestamp, timestamp_from_number
from ratelimit_rls.simulation.field_mapping import FieldMapping, InvalidLine, Values

MAX_LINE_BYTES = 64 * 1024
"""Longer lines are bad: Envoy's own limit for headers is 60 KiB."""

MAX_REPORTED_BAD_LINES = 5

_decode = json.JSONDecoder().decode

DEFAULT_TIME_FIELDS = {"json": "start_time", "csv": "time"}


Line = tuple[int, int, Values]
"""One line: its timestamp in microseconds, its line number from 1, and its values. So lines sort by time, and at equal
times in file order. A plain tuple, since there are millions of them, which are sent between processes.
"""


@dataclass(slots=True)
class InvalidLines:
    """Lines that were skipped."""

    file: str
    strict: bool = False
    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        self.add_all(1, [(line, reason)])

    def add_all(self, count: int, first: Sequence[tuple[int, str]]) -> None:
        """Add `count` invalid lines, of which `first` are the first ones."""
        if self.strict and first:
            line, reason = first[0]
            raise RulesError([Problem(self.file, line, 1, reason)])
        self.count += count
        self.first += first[: MAX_REPORTED_BAD_LINES - len(self.first)]


class LogTraffic:
    """Lines of a file, one JSON object each, or CSV if its name ends in .csv; decompressed if it ends in .gz."""

    def __init__(
        self, path: Path, mapping: FieldMapping, *, time_field: str | None = None, strict: bool = False
    ) -> None:
        name = path.name.removesuffix(".gz")
        self._form = "csv" if name.endswith(".csv") else "json"
        self._is_zipped = path.name.endswith(".gz")
        self._path = path
        self._mapping = mapping
        self._time_field = time_field or DEFAULT_TIME_FIELDS[self._form]
        self.invalid = InvalidLines(str(path), strict)
        self._raw: IO[bytes] | None = None
        self._size_bytes = 0
        self.line_number = 0

    @property
    def part_read(self) -> float | None:
        """Fraction of the file read so far, from 0 to 1; None if unknown."""
        return self._raw.tell() / self._size_bytes if self._raw and self._size_bytes else None

    def __iter__(self) -> Iterator[Line]:
        try:
            with self._path.open("rb") as raw:
                self._raw, self._size_bytes = raw, self._path.stat().st_size
                lines = _lines(gzip.GzipFile(fileobj=raw) if self._is_zipped else raw)
                yield from self._csv(lines) if self._form == "csv" else self._json(lines)
        except (OSError, EOFError) as error:  # EOFError: truncated gzip
            raise SettingsError(f"{self._path} cannot be read: {error}") from error
        finally:
            self._raw = None

    def _json(self, lines: Iterator[bytes | None]) -> Iterator[Line]:
        for number, text in enumerate(lines, 1):
            self.line_number = number
            if text is None:
                self.invalid.add(number, f"longer than {MAX_LINE_BYTES} bytes")
                continue
            try:
                fields = _decode(text.decode())
            except (ValueError, RecursionError):
                if text.strip():
                    self.invalid.add(number, "not JSON")
                continue
            if isinstance(fields, dict):
                if line := self._line(fields):
                    yield line
            else:
                self.invalid.add(number, "not a JSON object")

    def _csv(self, lines: Iterator[bytes | None]) -> Iterator[Line]:
        rows = csv.reader(self._decoded(lines), strict=True)
        header = next(rows, [])
        missing = [name for name in (self._time_field, *self._mapping.names) if name not in header]
        if missing:
            raise SettingsError(
                f"{self._path} has no column {missing[0]!r}; it has {', '.join(header) or 'nothing'}. "
                "Say with --time, --domain and --descriptor which to use"
            )
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                self.invalid.add(self.line_number, f"not CSV: {error}")
                continue
            if len(row) == len(header):
                if line := self._line({name: value for name, value in zip(header, row, strict=True) if value}):
                    yield line
            elif row:
                self.invalid.add(self.line_number, f"{len(row)} columns instead of {len(header)}")

    def _decoded(self, lines: Iterator[bytes | None]) -> Iterator[str]:
        for number, text in enumerate(lines, 1):
            self.line_number = number
            if text is None:
                self.invalid.add(number, f"longer than {MAX_LINE_BYTES} bytes")
            else:
                yield text.decode("utf-8-sig" if number == 1 else "utf-8", "replace")

    def _line(self, fields: dict[str, Any]) -> Line | None:
        try:
            at_us = _moment(fields.get(self._time_field), self._time_field)
            return at_us, self.line_number, self._mapping.values(fields)
        except InvalidLine as error:
            self.invalid.add(self.line_number, str(error))
            return None


def _moment(value: Any, name: str) -> int:
    try:
        if isinstance(value, str):
            return parse_timestamp(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return timestamp_from_number(value)
    except ValueError as error:
        raise InvalidLine(f"{name} {str(value)[:60]!r} {error}") from None
    raise InvalidLine(f"no moment in {name!r}; --time names the field that has it")


def _lines(stream: IO[bytes] | gzip.GzipFile) -> Iterator[bytes | None]:
    """Yield the lines; None for a line that is too long."""
    while text := stream.readline(MAX_LINE_BYTES + 1):
        if len(text) <= MAX_LINE_BYTES or text.endswith(b"\n"):
            yield text
            continue
        while text and not text.endswith(b"\n"):
            text = stream.readline(MAX_LINE_BYTES)
        yield None


class TrafficPhase(NamedTuple):
    """Evenly spaced requests at a rate, for a duration."""

    rate_per_s: Fraction
    length_us: int


class ProfileTraffic:
    """Generated traffic of consecutive phases.

    Fields: `n` is the request's number, `caller` cycles from 0 to `callers` - 1.
    """

    def __init__(
        self,
        phases: Sequence[TrafficPhase],
        mapping: FieldMapping,
        *,
        callers: int = 1,
        start_us: int = DEFAULT_START_US,
    ) -> None:
        self._phases = phases
        self._mapping = mapping
        self._callers = callers
        self._start_us = start_us
        self._all = sum(phase.length_us * phase.rate_per_s / 1_000_000 for phase in phases)
        self.invalid = InvalidLines("the profile", strict=True)
        self.line_number = 0

    @property
    def part_read(self) -> float | None:
        return float(self.line_number / self._all) if self._all else None

    def __iter__(self) -> Iterator[Line]:
        begins_us = self._start_us
        for rate, length_us in self._phases:
            each_us, per = 1_000_000 * rate.denominator, rate.numerator
            for i in range(-(-length_us * per // each_us)):
                fields = {"n": str(self.line_number), "caller": str(self.line_number % self._callers)}
                self.line_number += 1
                yield begins_us + i * each_us // per, self.line_number, self._mapping.values(fields)
            begins_us += length_us


Traffic = LogTraffic | ProfileTraffic
