"""`top`: two tables that fit the terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click import unstyle

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.top_view import Screen, view_lines
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.telemetry.abuse import AbuseLog
from ratelimit_rls.telemetry.hot_keys import HotKey, HotReport
from ratelimit_rls.transport.http.debug import debug_app
from ratelimit_rls.transport.http.guard import Guard
from ratelimit_rls.transport.http.server import HttpServer
from ratelimit_rls.transport.http.tokens import BearerToken

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Ended, Run

    Top = Callable[..., Coroutine[None, None, Ended]]

TOKEN = "a-token-of-twenty-letters"

ALICE = HotKey("rl:{edge/user=alice}:gcra:60", "edge.user", True, 12345.6, 0.0)
MALLORY = HotKey("rl:{edge/user=%1B[2J%0Amallory}:gcra:60", "edge.user", False, 70.04, 69.0)
LONG = HotKey("rl:{edge/user=" + "愛" * 200 + "}:gcra:60", "edge.user", False, 1.0, 0.0)


async def no_stats() -> list[tuple[str, int]]:
    return []


async def no_metrics() -> list[bytes]:
    return [b"", b"up 1\n"]


@pytest.fixture
async def top(run: Run) -> AsyncIterator[Top]:
    """`top` in a thread, since it blocks, next to a server that had three callers."""

    async def report() -> HotReport:
        return HotReport(9.6, 24691.2, (LONG, MALLORY, ALICE))

    server = HttpServer(debug_app(ActiveRules(), no_stats, report, no_metrics))
    await server.start("127.0.0.1", 0)
    yield lambda *arguments: asyncio.to_thread(run, "top", "--server", f"127.0.0.1:{server.port}", *arguments)
    await server.stop()


async def test_top_prints_hottest_and_most_limited_counters(top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    ended = await top("--once")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "24,691 calls/s in the last 10 s",
        "",
        "HOTTEST                             calls/s   share    denied/s  lease",
        "edge  user=alice                     12,346    50 %         0.0  yes",
        "edge  user=\\x1b[2J\\nmallory            70.0     0 %        69.0",
        "edge  user=愛愛愛愛愛愛愛愛愛愛…        1.0     0 %         0.0",
        "",
        "MOST LIMITED                        calls/s   share    denied/s  lease",
        "edge  user=\\x1b[2J\\nmallory            70.0     0 %        69.0",
        "",
    ]
    assert {len(line) + line.count("愛") <= 70 for line in ended.out.splitlines()} == {True}


async def test_json_format_is_the_response_of_the_server(top: Top) -> None:
    ended = await top("--once", "--format", "json", "--limit", "1")
    (line,) = ended.out.splitlines()
    assert [row["key"] for row in json.loads(line)["hottest"]] == [ALICE.key]


async def test_unreachable_or_wrong_server_is_reported(run: Run, top: Top) -> None:
    away = await asyncio.to_thread(run, "top", "--server", "http://127.0.0.1:1", "--once")
    assert away.code == ExitCode.UNREACHABLE
    assert "cannot reach http://127.0.0.1:1/hot?limit=20: [Errno 111] Connection refused" in away.err
    other = await top("--once", "--server", "127.0.0.1:1/rlconfig")
    assert other.code == ExitCode.UNREACHABLE


async def test_token_file_is_sent_as_bearer_token(run: Run, tmp_path: Path) -> None:
    async def report() -> HotReport:
        return HotReport(9.6, 24691.2, (ALICE,))

    app = Guard(debug_app(ActiveRules(), no_stats, report, no_metrics), AbuseLog(), token=BearerToken(TOKEN))
    server = HttpServer(app)
    await server.start("127.0.0.1", 0)
    command = ["top", "--once", "--server", f"127.0.0.1:{server.port}"]
    without = await asyncio.to_thread(run, *command)
    assert without.code == ExitCode.UNREACHABLE
    assert "requires a token: use --token-file" in without.err
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    given = await asyncio.to_thread(run, *command, "--token-file", str(tmp_path / "token"))
    assert (given.code, given.err) == (0, "")
    assert "user=alice" in given.out
    await server.stop()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--interval", "2"], "'2' is not a duration"),
        (["--interval", "1ms"], "is not between 100ms and 1h"),
        (["--server", "file:///etc/passwd"], "must be an http or https URL"),
        (["--limit", "0"], "0 is not in the range"),
    ],
)
def test_invalid_option_is_reported(run: Run, arguments: list[str], sentence: str) -> None:
    ended = run("top", "--once", *arguments)
    assert ended.code == ExitCode.USAGE
    assert sentence in ended.err


ROW = {"key": "k", "domain": "", "descriptor": "", "per_second": 9, "denied_per_second": 9, "share": 1, "leased": True}
SEEN = {"seconds": 10, "calls_per_second": 100, "hottest": [ROW] * 50, "denied": [ROW] * 50}


def test_output_is_redrawn_in_place_on_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "20")
    screen = Screen()
    screen.show(SEEN)
    first = capsys.readouterr().out
    assert 18 <= first.count("\n") < 20  # it fits
    screen.show(SEEN)
    assert capsys.readouterr().out == f"\x1b[{first.count(chr(10))}F\x1b[J{first}"


@pytest.mark.parametrize("columns", [5, 20, 60, 200])
def test_lines_fit_the_terminal_width(columns: int) -> None:
    for line in view_lines(SEEN | {"denied": []}, columns):
        assert len(unstyle(line)) <= columns


NODE = {
    "node": "10.0.0.7:6379",
    "memory_bytes": 1_288_490_188,
    "memory_share": 0.5,
    "commands_per_second": 1234.5,
    "clients": 1,
    "cpu_cores": 0.314,
    "evicted_per_second": 0.0,
    "p95_ms": 1.25,
}


def test_each_node_of_redis_has_a_line() -> None:
    first_sample = dict.fromkeys(NODE) | {"node": "10.0.0.8:6379", "memory_bytes": 2048, "clients": 2}
    lines = [*view_lines(SEEN | {"store": [NODE, first_sample]}, 200)]
    assert lines[1:4] == [
        "redis 10.0.0.7:6379  1.2 GiB (50 % of maxmemory), 1,234 commands/s, 1 client, CPU 31 %, 0.0 evicted/s, "
        "p95 1.2 ms",
        "redis 10.0.0.8:6379  2.0 KiB, 2 clients",
        "",
    ]


def test_busiest_nodes_of_a_large_cluster_have_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [NODE | {"node": f"10.0.0.{n}:6379", "cpu_cores": n / 100} for n in range(20)]
    lines = [*view_lines(SEEN | {"store": nodes}, 60, max_lines=30)]
    assert [line.split()[1].split(":")[0] for line in lines[1:9]] == sorted(f"10.0.0.{n}" for n in range(12, 20))
    assert lines[9] == "… and 12 more nodes that use less CPU"
    assert len(lines) <= 30
    assert {len(unstyle(line)) <= 60 for line in lines} == {True}


@pytest.mark.parametrize("option", [["--rules", "."], ["--redis-url", "localhost:6379"], ["--redis-tls"]])
def test_options_of_memory_need_it(run: Run, option: list[str]) -> None:
    ended = run("top", *option)
    assert ended.code == ExitCode.USAGE
    assert "need --memory" in ended.err


def test_memory_of_the_embedded_store_is_in_its_process(run: Run) -> None:
    ended = run("top", "--memory")
    assert ended.code == ExitCode.USAGE
    assert "the store is embedded" in ended.err
