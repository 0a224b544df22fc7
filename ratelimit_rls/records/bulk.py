"""Many rows of one table, inserted or updated a few at a time, by SQL that is made once.

SQLAlchemy would look at every value of every row by name, which costs twice as much as all the rest, in a process that
has calls to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Dialect, Table, Update
from sqlalchemy.dialects import postgresql, sqlite

from ratelimit_rls.records.types import Moment

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection
    from sqlalchemy.types import TypeEngine

ROWS_AT_ONCE = 50
"""In one statement. Making them ready takes one or two milliseconds, during which no call is decided."""

T = TypeVar("T")
Row = Mapping[str, Any]


def slices(items: Sequence[T], each: int = ROWS_AT_ONCE) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), each):
        yield items[at : at + each]


def insert(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """With the part of ON CONFLICT that PostgreSQL and SQLite share."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


class Bulk:
    """INSERTs by which a row of the same key is left as it is, or written over."""

    def __init__(self, table: Table, *, replaces: bool) -> None:
        self._table = table
        self._replaces = replaces
        self._made: tuple[str, str, Callable[[Row], tuple[Any, ...]]] | None = None  # with the dialect it is for

    async def write(self, connection: AsyncConnection, rows: Sequence[T], row_of: Callable[[T], Row]) -> None:
        """`row_of` has a value for every column."""
        dialect = connection.dialect
        if self._made is None or self._made[0] != dialect.name:
            self._made = dialect.name, self._sql(dialect), _values(self._table, dialect)
        _, sql, values = self._made
        for some in slices(rows):
            await connection.exec_driver_sql(sql, [values(row_of(one)) for one in some])

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


class Each:
    """An UPDATE of one row, done for many."""

    def __init__(self, statement: Update) -> None:
        """Every value of it is a parameter by name."""
        self._statement = statement
        self._made: tuple[str, str, Callable[[Row], tuple[Any, ...]]] | None = None  # with the dialect it is for

    async def write(self, connection: AsyncConnection, rows: Sequence[Row]) -> None:
        dialect = connection.dialect
        if self._made is None or self._made[0] != dialect.name:
            self._made = dialect.name, *_parametrised(self._statement, dialect)
        _, sql, values = self._made
        for some in slices(rows):
            await connection.exec_driver_sql(sql, [values(row) for row in some])


def _parametrised(statement: Update, dialect: Dialect) -> tuple[str, Callable[[Row], tuple[Any, ...]]]:
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
    """How the driver takes a value of that type; None: as it is."""
    adapt = of_type.dialect_impl(dialect).bind_processor(dialect)
    # Writing a moment out takes longer than all the rest of a row, and most are the same in many rows.
    return lru_cache(16)(adapt) if adapt is not None and isinstance(of_type, Moment) else adapt


def _values(table: Table, dialect: Dialect) -> Callable[[Row], tuple[Any, ...]]:
    """A row as the driver takes it, in the order of the columns."""
    columns = [(column.name, _adapter(column.type, dialect)) for column in table.c]

    def values(row: Row) -> tuple[Any, ...]:
        return tuple([row[name] if adapt is None else adapt(row[name]) for name, adapt in columns])

    return values
