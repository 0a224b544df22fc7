"""Generates the tables section of docs/records.md: a diagram, and the purpose and indexes of each table."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import Column, Table
from sqlalchemy.dialects import postgresql

from ratelimit_rls.database import tables
from ratelimit_rls.database.usage import tables as series

PAGE = Path(__file__).parents[2] / "docs" / "records.md"

_BEGINS = "<!-- Written by `make docs` from ratelimit_rls/database; edit them there. -->"
_ENDS = "<!-- Written by hand again. -->"

_WHAT = {
    "tiers": "named sets of limits",
    "user_quotas": "users: tier, custom limits, override, block, call counts",
    "api_keys": "API keys, as keyed hashes",
    "rate_limit_rules": "rules, as documents",
    "admin_tokens": "admin tokens, as keyed hashes",
    "admin_audit_log": "audit entries: actor, change, values before and after",
    "changes": "change feed that every process reads",
    "idempotency_keys": "stored responses of the admin API for repeated requests",
    "rate_limit_audit_logs": "decisions: denials, and a sample of admissions. Partitioned by month",
    "rate_limit_metrics": "usage by minute, hour and day. Partitioned by month",
    "rate_limit_rollups_due": "hours and days whose rollup is outdated",
    "rate_limit_archives": "archives: content, location and digest",
}


def records_page() -> str:
    """Return the page with the generated tables between its two marks."""
    before, _, rest = PAGE.read_text().partition(_BEGINS)
    _, _, after = rest.partition(_ENDS)
    assert after, f"{PAGE.name} lacks the marks around the generated tables"
    return "\n".join([f"{before}{_BEGINS}", "", *_picture(), "", *_listing(), f"{_ENDS}{after}"])


def _picture() -> list[str]:
    lines = ["```mermaid", "erDiagram"]
    for table in _tables():
        for key in sorted(table.foreign_keys, key=lambda key: str(key.parent)):
            optional = "|o" if key.parent.nullable else "||"
            lines.append(f"    {key.column.table.name} {optional}--o{{ {table.name} : {key.parent.name}")
    for table in _tables():
        lines.append(f"    {table.name} {{")
        lines += [f"        {_word(column)} {column.name}{_keys(column)}" for column in table.columns]
        lines.append("    }")
    return [*lines, "```"]


def _listing() -> list[str]:
    lines = ["| table | content | indexes |", "|---|---|---|"]
    for table in _tables():
        found = sorted(table.indexes, key=lambda index: str(index.name))
        indexes = ", ".join(f"`{index.name}` ({_of(index.expressions)})" for index in found)
        lines.append(f"| `{table.name}` | {_WHAT[table.name]} | {indexes} |")
    return [*lines, ""]


def _of(expressions: object) -> str:
    assert isinstance(expressions, list | tuple)
    return ", ".join(one.name if isinstance(one, Column) else str(one) for one in expressions)


def _tables() -> list[Table]:
    assert all(table.metadata is tables.metadata for table in vars(series).values() if isinstance(table, Table))
    return list(tables.metadata.tables.values())


def _word(column: Column[object]) -> str:
    """Return the PostgreSQL type of a column."""
    result = column.type.compile(postgresql.dialect()).lower()  # type: ignore[no-untyped-call]
    result = result.replace("timestamp with time zone", "timestamptz").replace("varchar", "text")
    return re.sub(r"\(.*\)| collate.*", "", result)


def _keys(column: Column[object]) -> str:
    keys = ["PK"] * column.primary_key + ["FK"] * bool(column.foreign_keys) + ["UK"] * bool(column.unique)
    return f" {', '.join(keys)}" if keys else ""
