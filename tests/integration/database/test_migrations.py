"""Migrations: every revision is upgraded to the latest one with all its data."""

from __future__ import annotations

import runpy

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, func, insert, inspect, select, text

from ratelimit_rls.core.names import name_error
from ratelimit_rls.database import migrations
from ratelimit_rls.database.tables import (
    admin_audit_log,
    api_keys,
    changes,
    metadata,
    rate_limit_rules,
    tiers,
    user_quotas,
)
from ratelimit_rls.database.usage import tables
from ratelimit_rls.identity.accounts import Tier, User
from tests.integration.database.conftest import LIMITS, NOW_S, AccountDb

RULE_ID = "00000000-0000-4000-8000-000000000001"

assert tables.metadata is metadata  # type: ignore[attr-defined]  # the tables belong to the same schema


def test_migration_files_are_named_after_their_revision() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations._HERE))
    scripts = ScriptDirectory.from_config(config)
    history = [script.revision for script in scripts.walk_revisions()][::-1]
    assert tuple(history) == migrations.revisions()
    assert scripts.get_current_head() == migrations.latest_revision()


@pytest.mark.slow
async def test_migrations_create_the_declared_tables(db: AccountDb) -> None:
    async with db.database.reading() as connection:
        assert await connection.run_sync(_differences) == []
        assert await connection.run_sync(_index_differences) == set()


def _differences(connection: Connection) -> list[object]:
    """Describe the schema without the partitions, which are created and dropped by month."""
    sees_descending = connection.dialect.name == "postgresql"  # SQLite does not report the sort order of index columns

    def is_table_of_package(thing: object, name: str | None, kind: str, reflected: bool, other: object) -> bool:
        if kind == "index":
            return sees_descending
        return kind != "table" or not reflected or name in metadata.tables

    options = {"compare_type": True, "include_object": is_table_of_package}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def _index_differences(connection: Connection) -> set[str]:
    there = {index["name"] for table in metadata.tables for index in inspect(connection).get_indexes(table)}
    meant = {index.name for table in metadata.tables.values() for index in table.indexes}
    return meant - there  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("revision", migrations.revisions())
async def test_every_revision_is_upgraded_with_its_data(database_url: str, revision: str) -> None:
    db = AccountDb(database_url)
    await db.database.upgrade(revision)
    assert await db.database.revision() == revision
    # In the format of the first revision.
    dates = {"created_at": NOW_S, "updated_at": NOW_S, "version": 7}
    limits = [{"requests_per_unit": 100, "unit": "minute"}]
    async with db.database.begin() as connection:
        await connection.execute(insert(tiers).values(name="gold", description="", limits=limits, **dates))
        counted = {"total_requests_today": 1, "total_requests_month": 2, "quota_exceeded_count": 3}
        about = {"user_id": "alice", "tier": "gold", "is_blocked": False}
        await connection.execute(insert(user_quotas).values(**about, **counted, **dates))
    await db.database.upgrade()
    await db.database.upgrade()
    assert await db.database.revision() == migrations.latest_revision()
    assert await db.ask("tier", "gold") == Tier("gold", LIMITS[:1], version=7)
    assert await db.ask("user", "alice") == User("alice", "gold", version=7)
    assert (await db.ask("usage_of_users", ["alice"]))["alice"].denied == 3
    async with db.database.reading() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM alembic_version")) == 1
    await db.database.close()


_NEW_NAMES = runpy.run_path(str(migrations._HERE / "versions" / "0003_caller_names.py"))["_new_names"]

_edges = st.sampled_from(["", " ", "  ", "\t", "\xa0"])
_stored = st.builds(lambda start, text, end: start + text + end, _edges, st.text(" a%20~é", max_size=9), _edges)
_long = st.builds(lambda name, at: name[:at] + "a" * (250 - len(name)) + name[at:], _stored, st.integers(0, 9))


@settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(_stored.filter(bool) | _long, max_size=8))
@example({" " + "a" * 245 + " " * 9 + "b", " " + "a" * 245 + " " * 9 + "c"})
def test_renamed_names_stay_unique(names: set[str]) -> None:
    renamed: dict[str, str] = _NEW_NAMES(names)
    after = [renamed.get(name, name) for name in names]
    assert len(set(after)) == len(names)
    assert all(name_error(name) is None for name in after)
    assert renamed.keys() == {name for name in names if name_error(name) is not None}


@pytest.mark.slow
async def test_names_unfit_for_headers_are_replaced_without_loss(database_url: str) -> None:
    db = AccountDb(database_url)
    await db.database.upgrade("0002")
    dates = {"created_at": NOW_S, "updated_at": NOW_S, "version": 7}
    limits = [{"requests_per_unit": 100, "unit": "minute"}]
    counted = {"total_requests_today": 1, "total_requests_month": 2, "quota_exceeded_count": 3, "is_blocked": False}
    async with db.database.begin() as connection:
        for name in (" gold", "gold"):
            await connection.execute(insert(tiers).values(name=name, description=name, limits=limits, **dates))
        about = {**counted, **dates}
        rows = [
            {"user_id": "alice", "tier": "gold", "org": "acme"},
            {"user_id": " alice", "tier": " gold", "org": " acme", "custom_limits": limits},
            {"user_id": "%20alice", "tier": None, "org": None},
            {"user_id": "bob\u00a0", "tier": None, "org": ""},
            {"user_id": " " * 255, "tier": None, "org": None},
            {"user_id": " " * 254, "tier": None, "org": None},
        ]
        for row in rows:
            await connection.execute(insert(user_quotas).values(**row, **about))  # type: ignore[arg-type]
        key = {"key_id": "k" * 12, "api_key_hash": b"1", "user_id": " alice", "tier": " gold", "total_requests": 5}
        await connection.execute(insert(api_keys).values(**key, is_active=True, **dates))
        rule = {"rule_id": RULE_ID, "rule_name": "r", "priority": 1, "enabled": True, "domain": "d", "document": "x"}
        targeting = {"user_tiers": ["gold", " gold"], "endpoint_patterns": [], "http_methods": [], "ip_ranges": []}
        await connection.execute(insert(rate_limit_rules).values(**rule, **targeting, created_by="", **dates))
        sequence = await connection.scalar(select(func.max(changes.c.sequence))) or 0
    await db.database.upgrade()

    assert await db.ask("user", "alice") == User("alice", "gold", org="acme", version=7)
    renamed = User("%20alice~2", "%20gold", LIMITS[:1], org="%20acme", version=7)
    assert await db.ask("user", "%20alice~2") == renamed
    assert (await db.ask("usage_of_users", ["%20alice~2"]))["%20alice~2"].denied == 3
    assert (await db.ask("user", "%20alice")).tier == ""
    assert (await db.ask("user", "bob%C2%A0")).version == 7
    assert await db.ask("tier", "%20gold") == Tier("%20gold", LIMITS[:1], " gold", version=7)
    moved = await db.ask("key", "k" * 12)
    assert (moved.user_id, moved.tier, moved.digest) == ("%20alice~2", "%20gold", b"1")
    assert (await db.ask("rule", RULE_ID)).targeting.tiers == ("gold", "%20gold")
    async with db.database.reading() as connection:
        names = list(await connection.scalars(select(user_quotas.c.user_id)))
        assert len(names) == len(rows)
        assert all(name_error(name) is None for name in names)
        log = (await connection.execute(select(admin_audit_log.c.kind, admin_audit_log.c.before))).all()
        assert ("user", {"user_id": " alice"}) in [tuple(row) for row in log]
        assert len(log) == 6
        fed = (await connection.execute(select(changes.c.kind).where(changes.c.sequence > sequence))).all()
        assert [kind for (kind,) in fed] == ["everything"]
    await db.database.close()
