"""`peek` and `reset`: the counters of one descriptor in a real Redis, looked at and forgotten."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.settings.redis_address import RedisAddress
from ratelimit_rls.store.redis.store import RedisStore
from ratelimit_rls.trial.play import limiter_on
from tests.servers import RedisServer

RULES = """\
domain: edge
descriptors:
  - key: client
    penalty: {within: 1h, after: 1, multipliers: [2]}
    warn_at: 0.8
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: free
    rate_limit: {unlimited: true}
"""


def offend(server: RedisServer, calls: int) -> None:
    """As a server would, for client=mallory."""

    async def ask() -> None:
        store = RedisStore(RedisAddress("127.0.0.1", server.port))
        await store.start()
        limiter = limiter_on(compile_documents({"rules.yaml": RULES.encode()}).tree, store, Policy(key_prefix="p:"))
        call = limiter.prepare(Request("edge", (Descriptor((Entry("client", "mallory"),)),)))
        await limiter.check([call] * calls)
        await store.close()

    asyncio.run(ask())


@pytest.fixture
def told(any_redis: RedisServer, tmp_path: Path) -> list[str]:
    """The arguments every verb here takes."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    redis = ["--redis-url", f"127.0.0.1:{any_redis.port}", "--cache-key-prefix", "p:"]
    return [str(rules), *redis, "--domain", "edge", "--descriptor"]


def test_peek_tells_limits_penalties_and_states_and_spends_nothing(
    any_redis: RedisServer, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peek", *told, "client=mallory", "--descriptor", "free=yes"]) == 0
    out = capsys.readouterr().out
    assert "2/hour fixed_window: 2 left" in out
    assert "state: normal" in out
    assert "unlimited" in out

    offend(any_redis, 4)
    for _ in range(2):
        assert main(["peek", *told, "client=mallory", "--format", "json"]) == 0
        (client,) = json.loads(capsys.readouterr().out)
        assert client["limits"][0]["left"] == 0
        assert (client["violations"], client["state"]) == (1, "throttled")
        assert client["cooldown_us"] > client["limits"][0]["retry_us"]
    assert main(["peek", *told, "client=mallory"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"0 left, the next one passes in \d+m?[smh], unused again in \d+m?[smh]$", out, re.MULTILINE)
    assert re.search(r"penalty: 1 violation of late, in a cooldown for \d+m?[smh]$", out, re.MULTILINE)


def test_reset_forgets_what_a_dry_run_names_and_nothing_else(
    any_redis: RedisServer, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    offend(any_redis, 4)
    states = [
        "p:rl:{edge/client=mallory}:fixed_window:3600",
        "p:rl:{edge/client=mallory}:penalty",
        "p:rl:{edge/client=mallory}:warning",
    ]
    assert main(["reset", *told, "client=mallory", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == states
    assert main(["reset", *told, "client=mallory", "--penalty-only"]) == 0
    assert capsys.readouterr().out.splitlines() == states[1:2]
    assert main(["reset", *told, "client=mallory"]) == 0
    assert capsys.readouterr().out.splitlines() == [states[0], states[2]]
    assert main(["peek", *told, "client=mallory", "--format", "json"]) == 0
    (client,) = json.loads(capsys.readouterr().out)
    assert (client["limits"][0]["left"], client["violations"], client["state"]) == (2, 0, "normal")


def test_without_redis_or_a_counter_there_is_nothing_to_reset(
    told: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["reset", *told, "free=yes"]) == 1
    assert "no counter belongs to that descriptor" in capsys.readouterr().err
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert main(["peek", told[0], "--domain", "edge", "--descriptor", "client=a"]) == 2
    assert "--redis-url" in capsys.readouterr().err


def test_a_redis_that_is_away_is_named(told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    away = [*told, "client=a", "--redis-url", "127.0.0.1:1"]
    assert main(["reset", *away]) == ExitCode.UNREACHABLE
    assert "127.0.0.1:1" in capsys.readouterr().err
