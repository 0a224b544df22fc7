"""The part of docs/records.md that shows the tables: a picture, what each is for, and its indexes."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import Column, Table
from sqlalchemy.dialects import postgresql

from ratelimit_rls.records import series, tables

PAGE = Path(__file__).parent.parent / "records.md"

_BEGINS = "<!-- Written by `make docs` from ratelimit_rls/records; changes belong there. -->"
_ENDS = "<!-- Written by hand again. -->"

_WHAT = {
    "tiers": "named sets of limits",
    "user_quotas": "users: tier, custom limits, override, block, how much they called",
    "api_keys": "keys, each as a keyed hash",
    "rate_limit_rules": "rules, as documents",
    "admin_tokens": "tokens of administrators, each as a keyed hash",
    "admin_audit_log": "who changed what, with before and after",
    "changes": "the feed that every process follows",
    "idempotency_keys": "answers to requests of the admin API that may come again",
    "rate_limit_audit_logs": "decisions: every refusal, some admissions. By month",
    "rate_limit_metrics": "usage by minute, hour and day. By month",
    "rate_limit_rollups_due": "hours and days that are to be summed up anew",
    "rate_limit_archives": "what was archived, where, and its digest",
}


def records_page() -> str:
    """The page as it should be: what people wrote, and between the two marks the tables as they are."""
    before, _, rest = PAGE.read_text().partition(_BEGINS)
    _, _, after = rest.partition(_ENDS)
    assert after, f"{PAGE.name} has lost the marks between which its tables are written"
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
    lines = ["| table | what it has | indexes |", "|---|---|---|"]
    for table in _tables():
        found = sorted(table.indexes, key=lambda index: str(index.name))
        indexes = ", ".join(f"`{index.name}` ({_of(index.expressions)})" for index in found)
        lines.append(f"| `{table.name}` | {_WHAT[table.name]} | {indexes} |")
    return [*lines, ""]


def _of(expressions: object) -> str:
    assert isinstance(expressions, list | tuple)
    return ", ".join(one.name if isinstance(one, Column) else str(one) for one in expressions)


def _tables() -> list[Table]:
    assert series.metadata is tables.metadata
    return list(tables.metadata.tables.values())


def _word(column: Column[object]) -> str:
    """Its type, in one word of PostgreSQL."""
    told = column.type.compile(postgresql.dialect()).lower()  # type: ignore[no-untyped-call]
    told = told.replace("timestamp with time zone", "timestamptz").replace("varchar", "text")
    return re.sub(r"\(.*\)| collate.*", "", told)


def _keys(column: Column[object]) -> str:
    keys = ["PK"] * column.primary_key + ["FK"] * bool(column.foreign_keys) + ["UK"] * bool(column.unique)
    return f" {', '.join(keys)}" if keys else ""
