"""`ratelimit-rls db`: on every database, and what it says when there is none."""

from __future__ import annotations

import json

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.records import migrations
from tests.databases import PASSWORD


@pytest.mark.slow
def test_a_schema_is_looked_at_upgraded_and_is_then_current(
    database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLS_DATABASE_URL", database_url)
    assert main(["db", "status"]) == ExitCode.BAD
    assert "empty; this version needs revision" in capsys.readouterr().out
    assert main(["db", "upgrade"]) == ExitCode.DONE
    assert f"from nothing to revision {migrations.newest()}" in capsys.readouterr().out
    assert main(["db", "upgrade"]) == ExitCode.DONE
    assert f": at revision {migrations.newest()}" in capsys.readouterr().out
    assert main(["db", "status", "--format", "json"]) == ExitCode.DONE
    told = capsys.readouterr()
    assert json.loads(told.out)["standing"] == "current"
    assert PASSWORD not in told.out + told.err


def test_without_a_database_there_is_nothing_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLS_DATABASE_URL", raising=False)
    assert main(["db", "status"]) == ExitCode.USAGE
    assert "RLS_DATABASE_URL" in capsys.readouterr().err


def test_a_database_that_is_away_or_wrong_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    away = f"postgresql://alice:{PASSWORD}@127.0.0.1:1/rls"
    assert main(["db", "upgrade", "--database", away]) == ExitCode.UNREACHABLE
    assert main(["db", "upgrade", "--database", f"mysql://alice:{PASSWORD}@db/rls"]) == ExitCode.BAD
    told = capsys.readouterr()
    assert told.err.splitlines()[0] == "Error: PostgreSQL at 127.0.0.1:1, rls cannot be reached: Connection refused"
    assert "RLS_DATABASE_URL names no database" in told.err
    assert PASSWORD not in told.err
