"""Which URLs name a database, and that none of their secrets is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.records.url import parse_database_url


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sqlite:///records.db", "records.db"),
        ("sqlite:////var/lib/rls/records.db", "/var/lib/rls/records.db"),
        ("SQLite:///a%20b.db", "a b.db"),
    ],
)
def test_a_sqlite_url_names_a_file(text: str, path: str) -> None:
    url = parse_database_url(text)
    assert (url.dialect, url.path) == ("sqlite", Path(path))


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
def test_a_postgresql_url_is_shown_without_user_and_password(scheme: str) -> None:
    url = parse_database_url(f"{scheme}://alice:hunter2@db.example:5433/rls?sslmode=require&password=hunter2")
    assert url.dialect == "postgresql"
    assert url.dsn == "postgresql://alice:hunter2@db.example:5433/rls?sslmode=require&password=hunter2"
    assert url.shown == "PostgreSQL at db.example:5433, rls"
    assert "hunter2" not in repr(url)
    assert "alice" not in repr(url)


@pytest.mark.parametrize(
    "where", ["db", "db:5432", "[::1]", "[::1]:5432", "one:5432,two:5432", "%2Frun%2Fpostgresql", ""]
)
def test_hosts_may_be_written_in_every_way_libpq_knows(where: str) -> None:
    assert parse_database_url(f"postgresql://alice:hunter2@{where}/rls").dialect == "postgresql"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "records.db",
        "mysql://alice:hunter2@db/rls",
        "postgresql:alice:hunter2@db/rls",
        "hunter2",
        "sqlite://",
        "sqlite:///",
        "sqlite://hunter2@host/file",
        "sqlite:///:memory:",
        "sqlite:///file?mode=hunter2",
        # Passwords that were not escaped: their pieces look like hosts, ports, paths and options.
        "postgresql://alice:hunter2/x@db/rls",
        "postgresql://alice:12/hunter2@db/rls",
        "postgresql://alice:12?hunter2@db/rls",
        "postgresql://alice:12?a=hunter2@db/rls",
        "postgresql://alice:12#hunter2@db/rls",
        "postgresql://alice:hunter2#x@db/rls",
        "postgresql://alice:x@db:hunter2/rls",
        "postgresql://alice:x@[::1/hunter2",
        "postgresql://alice:x@db/rls?hunter2",
    ],
)
def test_what_is_refused_is_not_quoted(text: str) -> None:
    with pytest.raises(SettingsError, match="RLS_DATABASE_URL") as refused:
        parse_database_url(text)
    assert "hunter2" not in str(refused.value)
    assert "alice" not in str(refused.value)
    assert refused.value.__cause__ is None
