"""`ratelimit-rls db retain`: what it says on stdout is all that it says, once, and can be read by a program."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.series import Month, audit_logs
from tests.integration.series.test_retention import decision

pytestmark = pytest.mark.slow

LONG_AGO = Month(2020, 5)


@pytest.fixture
def old_url(series_url: str) -> str:
    """Of a database with a decision of one old month, and two of the next."""

    async def fill() -> None:
        database = Database(series_url)
        moments = (LONG_AGO.begins_s, LONG_AGO.ends_s, LONG_AGO.ends_s + 5)
        async with database.begin() as connection:
            await connection.execute(audit_logs.insert(), [decision(at_s, n) for n, at_s in enumerate(moments)])
        await database.close()

    asyncio.run(fill())
    return series_url


def test_every_archive_is_told_once(old_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["db", "retain", "--database", old_url, "--archive", str(tmp_path / "archive")]
    assert main([*asked, "--dry-run"]) == ExitCode.DONE
    told = capsys.readouterr()
    assert (told.out, told.err) == (
        "audit of 2020-05: 1 row would be archived as 2020/05/audit_logs.parquet\n"
        "audit of 2020-06: 2 rows would be archived as 2020/06/audit_logs.parquet\n",
        "",
    )
    assert main(asked) == ExitCode.DONE
    told = capsys.readouterr()
    assert (told.out, told.err) == (
        "audit of 2020-05: 1 row archived and dropped as 2020/05/audit_logs.parquet\n"
        "audit of 2020-06: 2 rows archived and dropped as 2020/06/audit_logs.parquet\n",
        "",
    )


def test_a_program_can_read_it(old_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["db", "retain", "--database", old_url, "--archive", str(tmp_path / "archive"), "--format", "json"]
    assert main(asked) == ExitCode.DONE
    assert [(one["month"], one["rows"]) for one in json.loads(capsys.readouterr().out)] == [
        ("2020-05", 1),
        ("2020-06", 2),
    ]
