"""Bulk inserts and updates of one table, a few rows per statement, with SQL that is compiled once.

SQLAlchemy would process every value of every row by name, which costs twice as much as all the rest, in a process that
also serves rate limit requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Dialect, Table, Update
from sqlalchemy.dialects import postgresql, sqlite

from ratelimit_rls.database.column_types import Timestamp

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection
    from sqlalchemy.types import TypeEngine

ROWS_PER_STATEMENT = 50
"""Rows in one statement. Encoding them blocks the event loop for one or two milliseconds."""

T = TypeVar("T")
Row = Mapping[str, Any]


def slices(items: Sequence[T], each: int = ROWS_PER_STATEMENT) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), each):
        yield items[at : at + each]


def insert(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT of the dialect. PostgreSQL and SQLite share its ON CONFLICT clauses."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


class BulkInsert:
    """Inserts rows. A row with the same key is kept, or replaced if `replaces`."""

    def __init__(self, table: Table, *, replaces: bool) -> None:
        self._table = table
        self._replaces = replaces
        self._compiled: tuple[str, str, Callable[[Row], tuple[Any, ...]]] | None = None  # dialect, SQL, encoder

    async def write(self, connection: AsyncConnection, rows: Sequence[T], to_row: Callable[[T], Row]) -> None:
        """Write rows. `to_row` returns a value for every column."""
        dialect = connection.dialect
        if self._compiled is None or self._compiled[0] != dialect.name:
            self._compiled = dialect.name, self._sql(dialect), _row_encoder(self._table, dialect)
        _, sql, values = self._compiled
        for some in slices(rows):
            await connection.exec_driver_sql(sql, [values(to_row(one)) for one in some])

    def _sql(self, dialect: Dialect) -> str:
        table = self._table
        keys = [column.name for column in table.primary_key]
        statement = insert(dialect.name, table)
        if self._replaces:
            others = {column.name: statement.excluded[column.name] for column in table.c if column.name not in keys}
            statement = statement.on_conflict_do_update(index_elements=keys, set_=others)
        else:
            statement = statement.on_conflict_do_nothing(index_elements=keys)
        return str(statement.compile(dialect=dialect))


class BulkUpdate:
    """Executes an UPDATE of one row for many rows."""

    def __init__(self, statement: Update) -> None:
        """`statement` has only named parameters as values."""
        self._statement = statement
        self._compiled: tuple[str, str, Callable[[Row], tuple[Any, ...]]] | None = None  # dialect, SQL, encoder

    async def write(self, connection: AsyncConnection, rows: Sequence[Row]) -> None:
        dialect = connection.dialect
        if self._compiled is None or self._compiled[0] != dialect.name:
            self._compiled = dialect.name, *_compile_update(self._statement, dialect)
        _, sql, values = self._compiled
        for some in slices(rows):
            await connection.exec_driver_sql(sql, [values(row) for row in some])


def _compile_update(statement: Update, dialect: Dialect) -> tuple[str, Callable[[Row], tuple[Any, ...]]]:
    compiled = statement.compile(dialect=dialect)
    names = compiled.positiontup
    assert names is not None, "both drivers take parameters by position"
    parameters = []
    for name in names:
        parameters.append((name, _adapter(compiled.binds[name].type, dialect)))

    def values(row: Row) -> tuple[Any, ...]:
        return tuple([row[name] if adapt is None else adapt(row[name]) for name, adapt in parameters])

    return str(compiled), values


def _adapter(of_type: TypeEngine[Any], dialect: Dialect) -> Callable[[Any], Any] | None:
    """Return the function that encodes a value of the type for the driver; None: no encoding is needed."""
    adapt = of_type.dialect_impl(dialect).bind_processor(dialect)
    # Cached: encoding a timestamp takes longer than the rest of a row, and many rows have the same ones.
    return lru_cache(16)(adapt) if adapt is not None and isinstance(of_type, Timestamp) else adapt


def _row_encoder(table: Table, dialect: Dialect) -> Callable[[Row], tuple[Any, ...]]:
    """Return the function that encodes a row for the driver, in the order of the columns."""
    columns = [(column.name, _adapter(column.type, dialect)) for column in table.c]

    def values(row: Row) -> tuple[Any, ...]:
        return tuple([row[name] if adapt is None else adapt(row[name]) for name, adapt in columns])

    return values
