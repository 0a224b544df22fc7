"""Restoring the database as described in docs/records.md, while a service keeps serving."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.admin import ServiceWithDatabase, upgrade_schema
from tests.support.databases import PostgresServer

pytestmark = pytest.mark.slow


def users(service: ServiceWithDatabase) -> list[str]:
    return [user["user_id"] for user in service.admin.do("GET", "/users")["items"]]


def limit_of(service: ServiceWithDatabase, user: str) -> int:
    """Return the limit that the service applies, from memory."""
    (limit,) = service.admin.do("GET", f"/users/{user}/limits")["limits"]
    return int(limit["requests_per_unit"])


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text("domain: d\ndescriptors: [{key: user, limits_of: user}]\n")
    return path


@pytest.fixture
def archiving_postgres(tmp_path: Path) -> Iterator[PostgresServer]:
    server = PostgresServer()
    segments = server.directory / "wal"
    server.run("mkdir", segments)
    whole = f"test ! -f {segments}/%f && cp %p {segments}/.%f && mv {segments}/.%f {segments}/%f"
    settings = {"archive_mode": "on", "archive_command": whole}
    for name, value in settings.items():
        server.run("sed", "-i", f"$ a {name} = '{value}'", server.directory / "data" / "postgresql.conf")
    with server:
        yield server


def test_postgresql_point_in_time_recovery_is_followed(archiving_postgres: PostgresServer, rules: Path) -> None:
    server = archiving_postgres
    data, base = server.directory / "data", server.directory / "base"
    with ServiceWithDatabase(upgrade_schema(server.url()), {"RLS_RULES": rules}) as service:
        service.admin.put_user("alice", limits=[{"unit": "day", "requests_per_unit": 7}])
        server.run(
            "pg_basebackup",
            *("--dbname", server.url(), "--pgdata", base, "--format=plain", "--wal-method=stream", "--checkpoint=fast"),
        )
        service.admin.put_user("bob")
        moment = server.sql("SELECT now()").strip()
        for user in ("alice", "bob"):
            service.admin.do("DELETE", f"/users/{user}")
        service.admin.put_user("mallory")
        assert users(service) == ["mallory"]
        segment = server.sql("SELECT pg_walfile_name(pg_switch_wal())").strip()
        server.wait_until((server.directory / "wal" / segment).exists, "archives its log")

        server.kill()
        service.wait_for_source(lambda state: not state["connected"], "misses the database")
        shutil.rmtree(data)
        server.run("cp", "-a", base, data)
        for line in (
            f"restore_command = 'cp {server.directory}/wal/%f %p'",
            f"recovery_target_time = '{moment}'",
            "recovery_target_action = 'promote'",
        ):
            server.run("sed", "-i", f"$ a {line}", data / "postgresql.conf")
        server.run("touch", data / "recovery.signal")
        server.start()

        service.wait_for_source(lambda state: state["connected"], "follows the database again")
        assert users(service) == ["alice", "bob"]
        assert limit_of(service, "alice") == 7
        server.wait_until(lambda: server.sql("SELECT pg_is_in_recovery()").strip() == "f", "is promoted")
        service.admin.put_user("carol")
        assert users(service) == ["alice", "bob", "carol"]


def test_postgresql_is_restored_from_a_dump(archiving_postgres: PostgresServer, rules: Path) -> None:
    server = archiving_postgres
    dump = server.directory / "rls.dump"
    server.sql("CREATE DATABASE rls")
    with ServiceWithDatabase(upgrade_schema(server.url("rls")), {"RLS_RULES": rules}) as service:
        service.admin.put_user("alice", limits=[{"unit": "day", "requests_per_unit": 7}])
        server.run("pg_dump", "--format=custom", f"--file={dump}", server.url("rls"))
        service.admin.do("DELETE", "/users/alice")
        service.admin.put_user("mallory")
        sequence = service.admin.source()["sequence"]
        server.sql("CREATE DATABASE rls_restored")
        server.run("pg_restore", "--exit-on-error", f"--dbname={server.url('rls_restored')}", dump)
        for statement in SWAP:
            server.sql(statement)
        service.wait_for_source(lambda state: state["sequence"] < sequence, "notices an older database")
        assert users(service) == ["alice"]
        assert limit_of(service, "alice") == 7


SWAP = (
    "ALTER DATABASE rls ALLOW_CONNECTIONS false",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'rls'",
    "ALTER DATABASE rls RENAME TO rls_lost",
    "ALTER DATABASE rls_restored RENAME TO rls",
)


def test_sqlite_backup_is_consistent_during_writes(tmp_path: Path, rules: Path) -> None:
    """Uses the same API as the command `.backup`."""
    path, copy = tmp_path / "records.db", tmp_path / "copy.db"
    with ServiceWithDatabase(f"sqlite:///{path}", {"RLS_RULES": rules}) as service:
        service.admin.put_user("alice")
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    with closing(sqlite3.connect(copy)) as found:
        assert found.execute("SELECT user_id FROM user_quotas").fetchall() == [("alice",)]
