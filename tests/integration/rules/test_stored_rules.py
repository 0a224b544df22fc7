"""Import and export of stored rules by the command line, on every database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Repository

pytestmark = pytest.mark.slow  # each command opens a new connection

FREE = """\
# ratelimit-rls: {"name": "Free tier", "priority": 5, "targeting": {"tiers": ["free"], "scope": "user"}}
# five is enough
domain: edge
rate_limit: {unit: minute, requests_per_unit: 5}   # a minute
"""
PLAIN = "domain: edge\r\ndescriptors:\r\n  - {key: ip, rate_limit: {unit: second, requests_per_unit: 9}}"
OFF = (
    '# ratelimit-rls: {"name": "off", "enabled": false}\ndomain: edge\nrate_limit: {unit: day, requests_per_unit: 1}\n'
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(upgraded_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("RLS_DATABASE_URL", upgraded_url)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


async def audited(url: str) -> list[str]:
    database = Database(url)
    try:
        async with Repository(database).reading() as reader:
            return [row.action for row in await reader.audit()]
    finally:
        await database.close()


def write(directory: str, **files: str) -> None:
    Path(directory).mkdir(exist_ok=True)
    for name, text in files.items():
        Path(directory, f"{name}.yaml").write_bytes(text.encode())


def exported(run: Run, directory: str) -> dict[str, bytes]:
    assert run("rules", "export", "--output", directory)[0] == ExitCode.DONE
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def test_export_and_import_are_lossless(run: Run, upgraded_url: str) -> None:
    write("in", free=FREE, plain=PLAIN, off=OFF)
    result = run("rules", "import", "--dry-run", "in")
    assert result == (
        ExitCode.DONE,
        "create Free tier\ncreate off\ncreate plain\n3 rules would be changed, 0 as in the files already\n",
        "",
    )
    assert run("rules", "export") == (ExitCode.DONE, "", "")

    run("rules", "import", "in")
    first = exported(run, "first")
    assert sorted(first.values()) == sorted(
        [FREE.encode(), OFF.encode(), b'# ratelimit-rls: {"name": "plain"}\n' + PLAIN.encode()]
    )
    assert run("rules", "diff", "in") == (ExitCode.DONE, "", "")
    assert run("rules", "import", "first")[1] == "0 rules were changed, 3 as in the files already\n"
    assert exported(run, "second") == first

    assert asyncio.run(audited(upgraded_url)) == ["create"] * 3


def test_diff_is_printed_and_imported_in_one_transaction(run: Run) -> None:
    write("in", free=FREE, plain=PLAIN)
    run("rules", "import", "in")
    write("other", free=FREE.replace("requests_per_unit: 5", "requests_per_unit: 6"), new=OFF)

    code, out, _ = run("rules", "diff", "other")
    assert code == ExitCode.BAD
    assert "--- database:Free tier\n+++ other/free.yaml\n" in out
    assert "-rate_limit: {unit: minute, requests_per_unit: 5}   # a minute\n" in out
    assert "--- /dev/null\n+++ other/new.yaml\n" in out
    assert "--- database:plain\n+++ /dev/null\n" in out
    assert "-domain: edge\\r\n" in out

    assert run("rules", "import", "--prune", "other")[1] == (
        "create off\nchange Free tier\ndelete plain\n3 rules were changed, 0 as in the files already\n"
    )
    assert run("rules", "diff", "other")[0] == ExitCode.DONE


def test_import_that_does_not_compile_changes_nothing(run: Run) -> None:
    write("in", free=FREE)
    run("rules", "import", "in")
    before = run("rules", "export")
    clash = FREE.replace("Free tier", "clash")
    write("bad", new=OFF, clash=clash)

    code, _, err = run("rules", "import", "bad")
    assert code == ExitCode.BAD
    assert err == (
        "database:Free tier:2:1: error: duplicate descriptor composite key 'edge.tier_free.user'; bad/clash.yaml:3:1 "
        "has it with the same priority; join the two, or give one of them another priority\n"
    )
    write("bad", clash=clash.replace("minute,", "minuet,").replace('"priority": 5', '"priority": 6, "enabled": false'))
    code, _, err = run("rules", "import", "bad")
    assert (code, err.partition(": error: ")[0]) == (ExitCode.BAD, "bad/clash.yaml:4:20")
    write("bad", clash=OFF)
    assert "bad/new.yaml:1:1: error: bad/clash.yaml is also named 'off'" in run("rules", "import", "bad")[2]
    assert run("rules", "export") == before


def test_stored_rules_come_before_files_in_show_and_explain(run: Run) -> None:
    write("in", free=FREE)
    run("rules", "import", "in")
    Path("f.yaml").write_text(
        "domain: edge\ndescriptors: [{key: tier, value: free, descriptors: [{key: user, "
        "rate_limit: {unit: minute, requests_per_unit: 9}}]}]"
    )
    options = ("--domain", "edge", "--descriptor", "tier=free,user=alice")
    assert "limit 5/minute" in run("explain", *options)[1]
    lines = run("explain", "f.yaml", *options)[1].splitlines()
    assert lines[4].split()[-1] == "tier:2:1"
    assert lines[5:8] == [
        "in place of f.yaml:2:54",
        "rule edge.tier_free.user",
        "limit 5/minute fixed_window, charge always",
    ]
    assert "limit 9/minute" in run("explain", "f.yaml", "--database", "", *options)[1]

    explanation = json.loads(run("explain", "f.yaml", *options, "--format", "json")[1])
    (_, attempt) = explanation["descriptors"][0]["levels"][1]["attempts"]
    assert (attempt["position"], attempt["overrode"]) == ("database:Free tier:2:1", ["f.yaml:2:54"])
    assert (
        "● 5/minute fixed_window, charge always, in place of f.yaml:2:54  database:Free tier:2:1"
        in run("show", "f.yaml")[1]
    )
