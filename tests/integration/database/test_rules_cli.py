"""`ratelimit-rls rules` on each database: several rules in one file, as `export` writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Repository
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting
from tests.integration.database.conftest import ME

pytestmark = pytest.mark.slow  # each command opens a connection

LIMITED = "rate_limit: {unit: minute, requests_per_unit: 5}"
STORED = [
    StoredRule("", "comments", f"# why\ndomain: a\n{LIMITED}   # so many\n"),
    StoredRule("", "CRLF", f"domain: b\r\n{LIMITED}\r\n", 5, False, Targeting(("free",), scope=CounterScope.USER)),
    StoredRule("", "unended", f"domain: c\n{LIMITED}"),
    StoredRule("", "ended", f"domain: d\n{LIMITED}\n\n\n"),
    StoredRule("", "ünïcode ✓", f"domain: é\n{LIMITED} # ✓\n"),
    StoredRule("", "marked", f"# first\n---\ndomain: f\n{LIMITED}\n...\n"),
    StoredRule("", "marked at its end", f"domain: g\n{LIMITED}\n---\n"),
    StoredRule("", "quoting", f"domain: h\ndeny:\n  body: |\n    ---\n    # ratelimit-rls: {{}}\n{LIMITED}\n"),
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(upgraded_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: object) -> Run:
    monkeypatch.setenv("RLS_DATABASE_URL", upgraded_url)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        result = capfdbinary.readouterr()  # type: ignore[attr-defined]
        return code, result.out.decode(), result.err.decode()

    return run


def change(url: str, *methods: tuple[str, StoredRule]) -> None:
    async def work() -> None:
        database = Database(url)
        async with Repository(database).change(ME) as change:
            for method, rule in methods:
                await getattr(change, method)(rule)
        await database.close()

    asyncio.run(work())


def stored(url: str) -> dict[str, tuple[str, int, bool, Targeting]]:
    async def work() -> dict[str, tuple[str, int, bool, Targeting]]:
        database = Database(url)
        async with Repository(database).reading() as reader:
            found = await reader.rules(limit=100)
        await database.close()
        return {rule.name: (rule.document, rule.priority, rule.enabled, rule.targeting) for rule in found}

    return asyncio.run(work())


def test_export_to_stdout_round_trip(run: Run, upgraded_url: str) -> None:
    change(upgraded_url, *(("add_rule", rule) for rule in STORED))
    before = stored(upgraded_url)
    code, out, err = run("rules", "export")
    assert (code, err) == (ExitCode.DONE, "")
    Path("all.yaml").write_bytes(out.encode())
    Path("none.yaml").write_text("domain: z\ndescriptors: []\n")

    assert run("rules", "diff", "all.yaml") == (ExitCode.DONE, "", "")
    assert run("rules", "import", "--prune", "all.yaml")[1] == "0 rules were changed, 8 as in the files already\n"
    assert run("rules", "import", "--prune", "none.yaml")[1].splitlines()[-1].startswith("9 rules were changed")
    assert list(stored(upgraded_url)) == ["none"]
    assert run("rules", "import", "--prune", "all.yaml")[1].splitlines()[-1].startswith("9 rules were changed")
    assert stored(upgraded_url) == before
    assert run("rules", "export")[1] == out


def test_each_yaml_document_is_a_separate_rule(run: Run, upgraded_url: str) -> None:
    head = '# ratelimit-rls: {"name": "b"}'
    Path("all.yaml").write_text(f"domain: a\n{LIMITED}\n---\n{head}\ndomain: b\n{LIMITED}\n")
    assert run("rules", "import", "all.yaml")[1] == (
        "create all\ncreate b\n2 rules were changed, 0 as in the files already\n"
    )
    Path("all.yaml").write_text(f"domain: a\n{LIMITED}\n---\n{head}\ndomain: b\n{LIMITED} # c\n")
    assert run("rules", "import", "--dry-run", "all.yaml")[1] == (
        "change b\n1 rule would be changed, 1 as in the files already\n"
    )
    assert run("rules", "import", "all.yaml")[1] == "change b\n1 rule was changed, 1 as in the files already\n"
    assert stored(upgraded_url)["b"][0] == f"domain: b\n{LIMITED} # c\n"


def test_errors_have_the_position_in_the_whole_file(run: Run, upgraded_url: str) -> None:
    head = '# ratelimit-rls: {"name": "b"}'
    for text, result in (
        (
            f"domain: a\n---\ndomain: b\n{LIMITED}\n",
            "all.yaml:2:1: error: another rule begins here",
        ),
        (f"domain: a\n---\n{head}\ndomain: [\n", "all.yaml:5:1: error: error loading config file: yaml: "),
        (f"domain: a\n---\n{head}\ndomain: b\nrate_limit: 5\n", "all.yaml:5:13: error: "),
        (f"domain: a\n---\n{head}\n# nothing\n", "all.yaml:3:1: error: config file cannot have empty domain"),
        (f"{head}\ndomain: a\n---\n{head}\ndomain: b\n", "all.yaml:4:1: error: all.yaml is also named 'b'"),
        (f"domain: a\n---\n{head}\ndomain: b\n...\nc: 1\n", "all.yaml:5:1: error: a stored rule is one YAML document"),
    ):
        Path("all.yaml").write_text(text)
        for verb in (("import",), ("import", "--prune")):
            code, out, err = run("rules", *verb, "all.yaml")
            assert (code, out, err[: len(result)]) == (ExitCode.BAD, "", result)
    Path("one.yaml").write_text(f"{head}\ndomain: one\n")
    Path("all.yaml").write_text(f"domain: a\n---\n{head}\ndomain: b\n")
    assert run("rules", "diff", "all.yaml", "one.yaml")[2].startswith(
        "one.yaml:1:1: error: all.yaml:3 is also named 'b'; rename one of them"
    )
    assert stored(upgraded_url) == {}
