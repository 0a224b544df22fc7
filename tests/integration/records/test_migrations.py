"""The schema's history: every version of it can be brought to today's, with all that is in it."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, inspect, text

from ratelimit_rls.core.accounts import Tier, User
from ratelimit_rls.records import migrations, series
from ratelimit_rls.records.tables import metadata, tiers, user_quotas
from tests.integration.records.conftest import LIMITS, NOW_S, Office

assert series.metadata is metadata  # its tables are of the same schema


def test_files_are_called_like_their_revisions() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations._HERE))
    scripts = ScriptDirectory.from_config(config)
    history = [script.revision for script in scripts.walk_revisions()][::-1]
    assert tuple(history) == migrations.known()
    assert scripts.get_current_head() == migrations.newest()


@pytest.mark.slow
async def test_the_migrations_make_the_tables_there_are(office: Office) -> None:
    async with office.database.reading() as connection:
        assert await connection.run_sync(_differences) == []
        assert await connection.run_sync(_index_differences) == set()


def _differences(connection: Connection) -> list[object]:
    """Without the partitions, which nobody declares: they come and go by the month."""
    sees_descending = connection.dialect.name == "postgresql"  # SQLite's are not told with the order of their columns

    def is_ours(thing: object, name: str | None, kind: str, reflected: bool, other: object) -> bool:
        if kind == "index":
            return sees_descending
        return kind != "table" or not reflected or name in metadata.tables

    options = {"compare_type": True, "include_object": is_ours}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def _index_differences(connection: Connection) -> set[str]:
    there = {index["name"] for table in metadata.tables for index in inspect(connection).get_indexes(table)}
    meant = {index.name for table in metadata.tables.values() for index in table.indexes}
    return meant - there


@pytest.mark.slow
@pytest.mark.parametrize("revision", migrations.known())
async def test_every_version_is_upgraded_with_its_data(database_url: str, revision: str) -> None:
    office = Office(database_url)
    await office.database.upgrade(revision)
    assert await office.database.revision() == revision
    # In the words of the first version, whatever came after it.
    dates = {"created_at": NOW_S, "updated_at": NOW_S, "version": 7}
    limits = [{"requests_per_unit": 100, "unit": "minute"}]
    async with office.database.begin() as connection:
        await connection.execute(insert(tiers).values(name="gold", description="", limits=limits, **dates))
        counted = {"total_requests_today": 1, "total_requests_month": 2, "quota_exceeded_count": 3}
        about = {"user_id": "alice", "tier": "gold", "is_blocked": False}
        await connection.execute(insert(user_quotas).values(**about, **counted, **dates))
    await office.database.upgrade()
    await office.database.upgrade()
    assert await office.database.revision() == migrations.newest()
    assert await office.ask("tier", "gold") == Tier("gold", LIMITS[:1], version=7)
    assert await office.ask("user", "alice") == User("alice", "gold", version=7)
    assert (await office.ask("use_of_users", ["alice"]))["alice"].refused == 3
    async with office.database.reading() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM alembic_version")) == 1
    await office.database.close()
