"""Old records as Parquet, at any place that fsspec knows; and the proof that what was written can be read.

A file is known by a digest of its columns' contents, taken of what was to be written and again of what is read back. It
gets its name when it is whole: whatever lies under that name is no half of anything.

Nothing here waits for a database: all of it is to be called in a thread of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import BigInteger, Column, Integer, Table, Uuid

from ratelimit_rls.errors import RecordsError
from ratelimit_rls.records.types import Moment

ROWS_IN_A_GROUP = 20_000
"""Held in memory at a time, here and by whoever reads it."""


class Sealed(NamedTuple):
    """What is known of a file that is there."""

    row_count: int
    digest: str


class Place:
    """A directory, or a URL of fsspec, where archives are."""

    def __init__(self, url: str) -> None:
        with _telling(""):
            self._files, self._root = fsspec.core.url_to_fs(url)

    def path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    @contextlib.contextmanager
    def writing(self, names: Iterator[str], table: Table) -> Iterator[Writer]:
        """Given the first of the names that is free once it is whole (`writer.name`); with an exception, it is removed.

        Never in place of another file: that may be of another database, or of this one before it was brought back, and
        nothing else may have its rows any more. One with the very same rows is of somebody who was interrupted.
        """
        name = next(names)
        partial = f"{self.path(name)}.{secrets.token_hex(4)}.partial"
        with _telling(name):
            self._files.makedirs(posixpath.dirname(partial), exist_ok=True)
            handle = self._files.open(partial, "wb")
        try:
            with handle, _telling(name):
                writer = Writer(pq.ParquetWriter(handle, schema_of(table), compression="snappy"), table)
                yield writer
                writer.close()
            while not self._give_name(partial, name) and not self._is(name, table, writer.sealed):
                name = next(names)
            writer.name = name
            self._make_durable(self.path(name))
        finally:
            with contextlib.suppress(Exception):
                self._files.rm(partial)

    def _give_name(self, partial: str, name: str) -> bool:
        """Whether it was free: on this machine for certain, elsewhere as far as a look beforehand can tell."""
        path = self.path(name)
        with _telling(name):
            if isinstance(self._files, LocalFileSystem):
                try:
                    os.link(partial, path)
                except FileExistsError:
                    return False
                return True
            if self._files.exists(path):
                return False
            self._files.mv(partial, path)
            return True

    def _is(self, name: str, table: Table, sealed: Sealed) -> bool:
        try:
            return self.read_back(name, table) == sealed
        except RecordsError:  # whatever it is, it is not ours to touch
            return False

    def _make_durable(self, path: str) -> None:
        """On this machine's disk, before the same is dropped from the database. Elsewhere, closing it did that."""
        if isinstance(self._files, LocalFileSystem):
            for one in (path, os.path.dirname(path)):
                descriptor = os.open(one, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def read_back(self, name: str, table: Table) -> Sealed:
        """RecordsError if it is not there, or is no such file."""
        digest, row_count = hashlib.blake2b(digest_size=32), 0
        with _telling(name), self._files.open(self.path(name), "rb") as handle:
            file = pq.ParquetFile(handle)
            if not file.schema_arrow.equals(schema_of(table)):
                raise RecordsError(f"the archive {name} has other columns than were written")
            for number in range(file.num_row_groups):
                group = file.read_row_group(number)
                row_count += group.num_rows
                digest.update(_digest(group))
        return Sealed(row_count, digest.hexdigest())


class Writer:
    def __init__(self, writer: pq.ParquetWriter, table: Table) -> None:
        self._writer = writer
        self._table = table
        self.name = ""  # until it is whole
        self._rows: list[Sequence[Any]] = []
        self._row_count = 0
        self._digest = hashlib.blake2b(digest_size=32)

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """In the order of the table's columns."""
        self._rows += rows
        if len(self._rows) >= ROWS_IN_A_GROUP:
            self._write_group()

    def close(self) -> None:
        if self._rows:
            self._write_group()
        self._writer.close()

    @property
    def sealed(self) -> Sealed:
        """What must be read back."""
        return Sealed(self._row_count, self._digest.hexdigest())

    def _write_group(self) -> None:
        rows, self._rows = self._rows, []
        columns = [
            _array(column, values) for column, values in zip(self._table.c, zip(*rows, strict=True), strict=True)
        ]
        group = pa.Table.from_arrays(columns, schema=schema_of(self._table))
        self._digest.update(_digest(group))
        self._row_count += len(rows)
        self._writer.write_table(group, row_group_size=len(rows))


def schema_of(table: Table) -> pa.Schema:
    return pa.schema([pa.field(column.name, _type(column), nullable=bool(column.nullable)) for column in table.c])


def _type(column: Column[Any]) -> pa.DataType:
    if isinstance(column.type, Moment):
        return pa.timestamp("us", tz="UTC")
    if isinstance(column.type, BigInteger):
        return pa.int64()
    return pa.int32() if isinstance(column.type, Integer) else pa.string()


def _array(column: Column[Any], values: Sequence[Any]) -> pa.Array:
    if isinstance(column.type, Moment):
        values = [None if value is None else round(value * 1_000_000) for value in values]
    elif isinstance(column.type, Uuid):
        values = [str(value) for value in values]
    return pa.array(values, _type(column))


def _digest(group: pa.Table) -> bytes:
    """Of the values alone: how Arrow lays them out in memory differs between what is made and what is read."""
    whole = hashlib.blake2b(digest_size=32)
    for column in group.columns:
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # of more than fits one
            array = pa.concat_arrays(array.chunks)
        whole.update(hashlib.blake2b(b"".join(_contents(array)), digest_size=32).digest())
    return whole.digest()


def _contents(array: pa.Array) -> Iterator[memoryview | bytes]:
    yield _numbers(pc.cast(array.is_valid(), pa.uint8()))
    if pa.types.is_string(array.type):
        texts = array.fill_null("")
        yield _numbers(pc.binary_length(texts))
        offsets, data = texts.buffers()[1:]
        ends = memoryview(offsets).cast("i")
        yield memoryview(data or b"")[ends[texts.offset] : ends[texts.offset + len(texts)]]
    else:
        width = array.type.bit_width
        yield _numbers(array.view(pa.int64() if width == 64 else pa.int32()).fill_null(0))


def _numbers(array: pa.Array) -> memoryview:
    width = array.type.bit_width // 8
    values = array.buffers()[1]
    return memoryview(values)[array.offset * width : (array.offset + len(array)) * width]


@contextlib.contextmanager
def _telling(name: str) -> Iterator[None]:
    """Whatever a file system raises. Its words are not repeated: they may have the URL, with its password, in them."""
    try:
        yield
    except RecordsError:
        raise
    except Exception as error:
        what = f"the archive {name}" if name else "RLS_ARCHIVE"
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise RecordsError(f"{what} cannot be used: {why}") from error
