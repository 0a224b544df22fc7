"""`usage` and `db retain`: table, SVG, and messages for empty results."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from xml.etree import ElementTree

import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.usage_svg import draw
from ratelimit_rls.database.usage.queries import By, GroupedUsage, SeriesPoint

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def database(tmp_path: Path) -> str:
    """A database with calls of the last minutes."""
    from ratelimit_rls.database.database import Database
    from ratelimit_rls.database.usage.writer import UsageWriter
    from ratelimit_rls.telemetry.usage_recorder import UsageRecorder
    from tests.integration.usage.calls import call

    url = f"sqlite:///{tmp_path / 'records.db'}"

    async def fill() -> None:
        records = Database(url)
        await records.upgrade()
        recorder = UsageRecorder(sample=0, max_waiting=100, clock=lambda: time.time() - 120)
        call(recorder, "al\x1bice", passed=1, denied=3, elapsed_s=0.0005)
        call(recorder, "bob", passed=2, elapsed_s=0.02)
        await UsageWriter(records, recorder, server_id="here", region="eu").flush()
        await records.close()

    asyncio.run(fill())
    return url


@pytest.mark.slow
def test_usage_prints_and_draws_the_heaviest(run: Run, database: str, tmp_path: Path) -> None:
    ended = run("usage", "--database", database, "--picture", tmp_path / "a.svg")
    head, first, second = ended.out.splitlines()
    assert (ended.code, ended.err) == (ExitCode.DONE, "")
    assert head.split() == ["USER", "CALLS", "DENIED", "P95"]
    assert first.split() == ["al\\x1bice", "4", "3", "75.0", "%", "537", "µs"]
    assert second.split()[:5] == ["bob", "2", "0", "0.0", "%"]
    picture = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert "bob: 2 calls, 0 denied" in [text.text for text in picture.iter(f"{SVG}text")]
    (rule,) = json.loads(run("usage", "--database", database, "--by", "rule", "--since", "2d", "--format", "json").out)
    assert (rule["name"], rule["total"], rule["denied"]) == ("edge.user", 6, 3)
    assert run("usage", "--database", database, "--since", "1m").out == (
        "no calls with a user are recorded in the last 1m\n"
    )
    ended = run("db", "retain", "--database", database, "--archive", tmp_path / "archive")
    assert (ended.code, ended.out) == (ExitCode.DONE, "no whole month is past its retention\n")


@pytest.mark.slow
def test_usage_is_grouped_by_every_dimension(run: Run, database: str) -> None:
    for by in get_args(By):
        ended = run("usage", "--database", database, "--by", by)
        assert ended.code == ExitCode.DONE, by
        assert ended.out.startswith(by.upper()) or by == "endpoint"
    assert run("usage", "--database", database, "--by", "region").out.splitlines()[1].split()[:3] == ["eu", "6", "3"]
    assert run("usage", "--database", database, "--by", "endpoint").out == (
        "no calls with an endpoint are recorded in the last 24h\n"
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("usage",), "no database: set --database or RLS_DATABASE_URL"),
        (("usage", "--since", "soon"), "is not a duration"),
        (("usage", "--since", "0s"), "must be greater than 0"),
        (("usage", "--picture", "a.png"), "must end in .svg"),
        (("db", "retain", "--database", "sqlite:///x.db"), "no archive: set --archive or RLS_ARCHIVE"),
        (("db", "retain", "--archive", "there"), "no database: set --database or RLS_DATABASE_URL"),
    ],
)
def test_invalid_options_are_usage_errors(run: Run, arguments: tuple[str, ...], why: str) -> None:
    ended = run(*arguments)
    assert ended.code == ExitCode.USAGE
    assert why in ended.err


def test_svg_is_well_formed_for_any_input() -> None:
    points = [SeriesPoint(60.0 * number, number, number - 1, 1, 0) for number in (1, 2, 200)]
    heavy = GroupedUsage('<\x00&"' + "x" * 300, 10, 5, 5, 0, 0, 0, None, None, None)
    picture = ElementTree.fromstring(draw("a < b", points, "minute", [heavy]))
    assert len(list(picture.iter(f"{SVG}title"))) == 3
    ElementTree.fromstring(draw("nothing", [], "day", []))
