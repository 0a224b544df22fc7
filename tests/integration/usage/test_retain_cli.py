"""`ratelimit-rls db retain`: its output on stdout, as text and as JSON."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.usage.tables import Month, audit_logs
from tests.integration.usage.test_retention import decision

pytestmark = pytest.mark.slow

LONG_AGO = Month(2020, 5)


@pytest.fixture
def old_url(series_url: str) -> str:
    """URL of a database with one decision of an old month, and two of the next."""

    async def fill() -> None:
        database = Database(series_url)
        moments = (LONG_AGO.begins_s, LONG_AGO.ends_s, LONG_AGO.ends_s + 5)
        async with database.begin() as connection:
            await connection.execute(audit_logs.insert(), [decision(at_s, n) for n, at_s in enumerate(moments)])
        await database.close()

    asyncio.run(fill())
    return series_url


def test_each_archive_is_printed_once(old_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["db", "retain", "--database", old_url, "--archive", str(tmp_path / "archive")]
    assert main([*command, "--dry-run"]) == ExitCode.DONE
    result = capsys.readouterr()
    assert (result.out, result.err) == (
        "audit of 2020-05: 1 row would be archived as 2020/05/audit_logs.parquet\n"
        "audit of 2020-06: 2 rows would be archived as 2020/06/audit_logs.parquet\n",
        "",
    )
    assert main(command) == ExitCode.DONE
    result = capsys.readouterr()
    assert (result.out, result.err) == (
        "audit of 2020-05: 1 row archived and dropped as 2020/05/audit_logs.parquet\n"
        "audit of 2020-06: 2 rows archived and dropped as 2020/06/audit_logs.parquet\n",
        "",
    )


def test_json_output(old_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "db",
        "retain",
        "--database",
        old_url,
        "--archive",
        str(tmp_path / "archive"),
        "--format",
        "json",
    ]
    assert main(command) == ExitCode.DONE
    assert [(one["month"], one["rows"]) for one in json.loads(capsys.readouterr().out)] == [
        ("2020-05", 1),
        ("2020-06", 2),
    ]
