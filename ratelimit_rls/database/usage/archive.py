"""Parquet archives of old decisions and usage, in any location that fsspec supports, and their verification.

The checksum of a file is a digest of the contents of its columns, computed from the rows to be written and again from
the file read back. A file gets its final name when it is complete, so no file with such a name is partial.

Nothing here uses the database. All functions block: call them in a thread.
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

from ratelimit_rls.database.column_types import Timestamp
from ratelimit_rls.errors import DatabaseError

ROWS_PER_GROUP = 20_000
"""Rows held in memory at a time, by the writer and by readers."""


class Checksum(NamedTuple):
    """Row count and content digest of a file."""

    row_count: int
    digest: str


class ArchiveStore:
    """A directory, or a URL of fsspec, that contains archives."""

    def __init__(self, url: str) -> None:
        with _translate_errors(""):
            self._files, self._root = fsspec.core.url_to_fs(url)

    def path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    @contextlib.contextmanager
    def writing(self, names: Iterator[str], table: Table) -> Iterator[ArchiveWriter]:
        """Write a file. It gets the first free name when complete (`writer.name`); an exception removes it.

        It never replaces another file: that may be of another database, or of this one before it was restored, and be
        the only copy of its rows. A file with exactly the same rows is left over from an interrupted run, and is kept.
        """
        name = next(names)
        partial = f"{self.path(name)}.{secrets.token_hex(4)}.partial"
        with _translate_errors(name):
            self._files.makedirs(posixpath.dirname(partial), exist_ok=True)
            handle = self._files.open(partial, "wb")
        try:
            with handle, _translate_errors(name):
                writer = ArchiveWriter(pq.ParquetWriter(handle, arrow_schema(table), compression="snappy"), table)
                yield writer
                writer.close()
            while not self._claim_name(partial, name) and not self._has_checksum(name, table, writer.checksum):
                name = next(names)
            writer.name = name
            self._make_durable(self.path(name))
        finally:
            with contextlib.suppress(Exception):
                self._files.rm(partial)

    def _claim_name(self, partial: str, name: str) -> bool:
        """Give the file its name; return False if it is taken. Atomic on local disks; elsewhere it checks
        beforehand."""
        path = self.path(name)
        with _translate_errors(name):
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

    def _has_checksum(self, name: str, table: Table, checksum: Checksum) -> bool:
        try:
            return self.read_back(name, table) == checksum
        except DatabaseError:  # some other file: leave it alone
            return False

    def _make_durable(self, path: str) -> None:
        """Sync a local file to disk before its rows are dropped from the database. Elsewhere, closing it did that."""
        if isinstance(self._files, LocalFileSystem):
            for one in (path, os.path.dirname(path)):
                descriptor = os.open(one, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def read_back(self, name: str, table: Table) -> Checksum:
        """Compute the checksum of a file. Raises DatabaseError if it is missing or has another format."""
        digest, row_count = hashlib.blake2b(digest_size=32), 0
        with _translate_errors(name), self._files.open(self.path(name), "rb") as handle:
            file = pq.ParquetFile(handle)
            if not file.schema_arrow.equals(arrow_schema(table)):
                raise DatabaseError(f"the columns of the archive {name} differ from those that were written")
            for number in range(file.num_row_groups):
                group = file.read_row_group(number)
                row_count += group.num_rows
                digest.update(_digest(group))
        return Checksum(row_count, digest.hexdigest())


class ArchiveWriter:
    """Writes rows to a Parquet file in groups, and computes their checksum."""

    def __init__(self, writer: pq.ParquetWriter, table: Table) -> None:
        self._writer = writer
        self._table = table
        self.name = ""  # "" until it is complete
        self._rows: list[Sequence[Any]] = []
        self._row_count = 0
        self._digest = hashlib.blake2b(digest_size=32)

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Add rows, with values in the order of the table's columns."""
        self._rows += rows
        if len(self._rows) >= ROWS_PER_GROUP:
            self._write_group()

    def close(self) -> None:
        if self._rows:
            self._write_group()
        self._writer.close()

    @property
    def checksum(self) -> Checksum:
        """The checksum that the file must have when read back."""
        return Checksum(self._row_count, self._digest.hexdigest())

    def _write_group(self) -> None:
        rows, self._rows = self._rows, []
        columns = [
            _array(column, values) for column, values in zip(self._table.c, zip(*rows, strict=True), strict=True)
        ]
        group = pa.Table.from_arrays(columns, schema=arrow_schema(self._table))
        self._digest.update(_digest(group))
        self._row_count += len(rows)
        self._writer.write_table(group, row_group_size=len(rows))


def arrow_schema(table: Table) -> pa.Schema:
    return pa.schema([pa.field(column.name, _type(column), nullable=bool(column.nullable)) for column in table.c])


def _type(column: Column[Any]) -> pa.DataType:
    if isinstance(column.type, Timestamp):
        return pa.timestamp("us", tz="UTC")
    if isinstance(column.type, BigInteger):
        return pa.int64()
    return pa.int32() if isinstance(column.type, Integer) else pa.string()


def _array(column: Column[Any], values: Sequence[Any]) -> pa.Array:
    if isinstance(column.type, Timestamp):
        values = [None if value is None else round(value * 1_000_000) for value in values]
    elif isinstance(column.type, Uuid):
        values = [str(value) for value in values]
    return pa.array(values, _type(column))


def _digest(group: pa.Table) -> bytes:
    """Digest the values only: their layout in Arrow's memory differs between created and read tables."""
    whole = hashlib.blake2b(digest_size=32)
    for column in group.columns:
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # too large for one array
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
def _translate_errors(name: str) -> Iterator[None]:
    """Turn errors of the file system into DatabaseError, without their message: it may contain the URL and its
    password."""
    try:
        yield
    except DatabaseError:
        raise
    except Exception as error:
        what = f"the archive {name}" if name else "RLS_ARCHIVE"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise DatabaseError(f"{what} cannot be used: {reason}") from error
