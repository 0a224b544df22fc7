"""Rename users, tiers and organisations whose names no HTTP header can carry unchanged.

From this revision on, such a name has no space at either end and no unprintable character. A name that breaks this rule
is replaced by one in which those characters are percent-encoded: `" alice"` becomes `%20alice`, or `%20alice~2` if that
name is taken. Limits, overrides, blocks, keys and counts stay. Each new name has an audit entry and a log line.
Recorded decisions and usage keep the old name: they are history.

The rule is spelled out, so that this file is independent of later changes to core/names.py.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
import structlog
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_MAX_NAME = 255
_ROOM_FOR_NUMBER = 8

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_MOMENT = sa.DateTime(timezone=True)

_AUDIT = sa.table(
    "admin_audit_log",
    sa.column("at", _MOMENT),
    *[sa.column(name, sa.String) for name in ("actor", "actor_token", "address", "action", "kind", "subject")],
    sa.column("before", _JSON),
    sa.column("after", _JSON),
    sa.column("request_id", sa.String),
)
_CHANGES = sa.table("changes", sa.column("at", _MOMENT), sa.column("kind", sa.String), sa.column("subject", sa.String))
_RULES = sa.table("rate_limit_rules", sa.column("rule_id", sa.String), sa.column("user_tiers", _JSON))

_log = structlog.get_logger()


def upgrade() -> None:
    connection = op.get_bind()
    tiers, users, keys = (_table(connection, name) for name in ("tiers", "user_quotas", "api_keys"))
    new_tiers = _new_names(_names(connection, tiers.c.name))
    new_users = _new_names(_names(connection, users.c.user_id))
    new_orgs = _new_names(_names(connection, users.c.org))
    for old, new in new_tiers.items():
        _move_row(connection, tiers.c.name, old, new, [users.c.tier, keys.c.tier])
        _record_change(connection, "tier", "name", old, new)
    for old, new in new_users.items():
        _move_row(connection, users.c.user_id, old, new, [keys.c.user_id])
        _record_change(connection, "user", "user_id", old, new)
    for old, new in new_orgs.items():
        _replace(connection, users.c.org, old, new)
        _record_change(connection, "org", "org", old, new)
    if new_tiers:
        _rename_in_rules(connection, new_tiers)
    if new_tiers or new_users or new_orgs:
        connection.execute(sa.insert(_CHANGES).values(at=_now(), kind="everything", subject="*"))


def _table(connection: sa.Connection, name: str) -> sa.Table:
    return sa.Table(name, sa.MetaData(), autoload_with=connection, resolve_fks=False)


def _names(connection: sa.Connection, column: sa.Column[Any]) -> set[str]:
    return {name for (name,) in connection.execute(sa.select(column).where(column.is_not(None)).distinct())}


def _new_names(names: set[str]) -> dict[str, str]:
    """Return new names by old name, for those that break the rule. New names are unique and not in use."""
    taken = set(names)
    renamed: dict[str, str] = {}
    for name in sorted(name for name in names if not _is_allowed(name)):
        wanted = _encoded(name)
        if len(wanted) > _MAX_NAME:
            wanted = wanted[: _MAX_NAME - _ROOM_FOR_NUMBER].rstrip(" ")
        new, number = wanted, 1
        while new in taken:
            number += 1
            new = f"{wanted[: _MAX_NAME - _ROOM_FOR_NUMBER]}~{number}"
        taken.add(new)
        renamed[name] = new
    return renamed


def _is_allowed(name: str) -> bool:
    """Return whether a name obeys the rule. "" does: it means that there is none."""
    return name.isprintable() and name == name.strip(" ")


def _encoded(name: str) -> str:
    inner = name.strip(" ")
    start = len(name) - len(name.lstrip(" "))
    return "".join(
        [
            char if start <= at < start + len(inner) and char.isprintable() else _percent_encoded(char)
            for at, char in enumerate(name)
        ]
    )


def _percent_encoded(char: str) -> str:
    return "".join([f"%{byte:02X}" for byte in char.encode(errors="surrogatepass")])


def _move_row(
    connection: sa.Connection, key: sa.Column[Any], old: str, new: str, referring: list[sa.Column[Any]]
) -> None:
    """Copy the row, update the rows that refer to it, and delete it, so that foreign keys stay valid throughout."""
    table = key.table
    names = [column.name for column in table.columns]
    values = [sa.literal(new) if name == key.name else table.c[name] for name in names]
    connection.execute(sa.insert(table).from_select(names, sa.select(*values).where(key == old)))
    for column in referring:
        _replace(connection, column, old, new)
    connection.execute(sa.delete(table).where(key == old))


def _replace(connection: sa.Connection, column: sa.Column[Any], old: str, new: str) -> None:
    connection.execute(sa.update(column.table).where(column == old).values({column.name: new}))


def _rename_in_rules(connection: sa.Connection, tiers: dict[str, str]) -> None:
    """Rename tiers in the targeting of stored rules. Their documents are text by administrators, and stay unchanged."""
    for rule_id, named in connection.execute(sa.select(_RULES.c.rule_id, _RULES.c.user_tiers)).all():
        renamed = [tiers.get(name, name) for name in named]
        if renamed != named:
            connection.execute(sa.update(_RULES).where(_RULES.c.rule_id == rule_id).values(user_tiers=renamed))


def _record_change(connection: sa.Connection, kind: str, field: str, old: str, new: str) -> None:
    row = {
        "at": _now(),
        "actor": "database upgrade",
        "actor_token": "",
        "address": "",
        "action": "rename",
        "kind": kind,
        "subject": new,
        "before": {field: old},
        "after": {field: new},
        "request_id": "",
    }
    connection.execute(sa.insert(_AUDIT), [row])
    _log.warning("caller_renamed", kind=kind, before=old, after=new)


def _now() -> datetime:
    return (
        datetime.now(UTC) if op.get_context().dialect.name == "postgresql" else datetime.now(UTC).replace(tzinfo=None)
    )
