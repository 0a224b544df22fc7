"""`ratelimit-rls db` on each database, and without one."""

from __future__ import annotations

import json

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.database import migrations
from tests.support.databases import PASSWORD


@pytest.mark.slow
def test_status_and_upgrade_commands(
    database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLS_DATABASE_URL", database_url)
    assert main(["db", "status"]) == ExitCode.BAD
    assert "empty; this version needs revision" in capsys.readouterr().out
    assert main(["db", "upgrade"]) == ExitCode.DONE
    assert f"from an empty database to revision {migrations.latest_revision()}" in capsys.readouterr().out
    assert main(["db", "upgrade"]) == ExitCode.DONE
    assert f": at revision {migrations.latest_revision()}" in capsys.readouterr().out
    assert main(["db", "status", "--format", "json"]) == ExitCode.DONE
    result = capsys.readouterr()
    assert json.loads(result.out)["state"] == "current"
    assert PASSWORD not in result.out + result.err


def test_commands_need_a_database_url(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLS_DATABASE_URL", raising=False)
    assert main(["db", "status"]) == ExitCode.USAGE
    assert "RLS_DATABASE_URL" in capsys.readouterr().err


def test_unavailable_or_invalid_database_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    away = f"postgresql://alice:{PASSWORD}@127.0.0.1:1/rls"
    assert main(["db", "upgrade", "--database", away]) == ExitCode.UNREACHABLE
    assert main(["db", "upgrade", "--database", f"mysql://alice:{PASSWORD}@db/rls"]) == ExitCode.BAD
    result = capsys.readouterr()
    assert result.err.splitlines()[0] == "Error: PostgreSQL at 127.0.0.1:1, rls cannot be reached: Connection refused"
    assert "RLS_DATABASE_URL must be sqlite:///file" in result.err
    assert PASSWORD not in result.err
