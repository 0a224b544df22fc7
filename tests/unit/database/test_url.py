"""Parsing of database URLs, without ever showing their secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.database.database_url import parse_database_url
from ratelimit_rls.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sqlite:///records.db", "records.db"),
        ("sqlite:////var/lib/rls/records.db", "/var/lib/rls/records.db"),
        ("SQLite:///a%20b.db", "a b.db"),
    ],
)
def test_sqlite_url_names_a_file(text: str, path: str) -> None:
    url = parse_database_url(text)
    assert (url.dialect, url.path) == ("sqlite", Path(path))


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
def test_postgresql_display_name_has_no_user_or_password(scheme: str) -> None:
    url = parse_database_url(f"{scheme}://alice:hunter2@db.example:5433/rls?sslmode=require&password=hunter2")
    assert url.dialect == "postgresql"
    assert url.dsn == "postgresql://alice:hunter2@db.example:5433/rls?sslmode=require&password=hunter2"
    assert url.display_name == "PostgreSQL at db.example:5433, rls"
    assert "hunter2" not in repr(url)
    assert "alice" not in repr(url)


@pytest.mark.parametrize(
    "where", ["db", "db:5432", "[::1]", "[::1]:5432", "one:5432,two:5432", "%2Frun%2Fpostgresql", ""]
)
def test_all_host_formats_of_libpq_are_accepted(where: str) -> None:
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
        # Unescaped passwords: parts of them look like hosts, ports, paths and options.
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
def test_rejected_url_is_not_quoted(text: str) -> None:
    with pytest.raises(SettingsError, match="RLS_DATABASE_URL") as raised:
        parse_database_url(text)
    assert "hunter2" not in str(raised.value)
    assert "alice" not in str(raised.value)
    assert raised.value.__cause__ is None
