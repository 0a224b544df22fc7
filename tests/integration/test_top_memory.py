"""`top --memory`: what fills a real Redis, by domain and rule."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.settings import Settings
from ratelimit_rls.simulation.runner import make_limiter
from ratelimit_rls.store.redis.factory import new_redis_store
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer

RULES = """\
domain: edge
descriptors:
  - key: plan
    value: free
    descriptors:
      - {key: user, rate_limit: {unit: year, requests_per_unit: 2}}
  - key: plan
    value: pro
    descriptors:
      - {key: user, rate_limit: {unit: year, requests_per_unit: 2, algorithm: gcra}}
"""
FREE, PRO = 40, 8


def fill(url: str, prefix: str = "p:") -> None:
    """Spend hits as a server would, and add a record of a request id and a key of another application."""
    settings = Settings(redis_url=url, cache_key_prefix=prefix)
    plans = [("free", n) for n in range(FREE)] + [("pro", n) for n in range(PRO)]
    requests = [Request("edge", (Descriptor((Entry("plan", plan), Entry("user", f"u{n}"))),)) for plan, n in plans]
    requests.append(Request("edge", (Descriptor((Entry("plan", "free"), Entry("user", "x" * 600))),)))

    async def spend() -> None:
        store = new_redis_store(settings)
        await store.start()
        policy = Policy(key_prefix=prefix)
        limiter = make_limiter(compile_documents({"rules.yaml": RULES.encode()}).tree, store, policy)
        await limiter.check([limiter.prepare(request) for request in requests])
        await store.close()

    asyncio.run(spend())


class Memory:
    """Runs `top --memory` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], rules: Path) -> None:
        self._capsys = capsys
        self.rules = rules

    def __call__(self, url: str, *flags: str | Path) -> tuple[int, str, str]:
        where = ["--redis-url", url, "--cache-key-prefix", "p:"]
        self._capsys.readouterr()  # the log of `fill`
        code = main(["top", "--memory", *where, "--rate", "1000000", *map(str, flags)])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def groups(self, url: str, *flags: str | Path) -> dict[tuple[str, ...], dict[str, Any]]:
        code, out, err = self(url, "--format", "json", *flags)
        assert (code, err) == (0, "")
        fields = ("domain", "rule", "descriptor", "state")
        return {tuple(row[field] for field in fields): row for row in json.loads(out)["groups"]}


@pytest.fixture
def memory(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    for name in ("REDIS_URL", "CACHE_KEY_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    return Memory(capsys, rules)


def test_keys_and_bytes_by_rule(memory: Memory, redis_server: RedisServer) -> None:
    fill(redis_server.address)
    redis_server.cli("SET", "p:rl:{edge/plan=free/user=u1}:once:" + "ab" * 16, "record")
    redis_server.cli("SET", "session:7", "x" * 10_000)
    redis_server.cli("SET", "other:rl:{edge/plan=free/user=u1}:fixed_window:31536000", "another prefix")

    groups = memory.groups(redis_server.address, "--rules", memory.rules)

    free = ("edge", "edge.plan_free.user", "plan, user", "fixed_window:31536000")
    pro = ("edge", "edge.plan_pro.user", "plan, user", "gcra:31536000")
    cut = ("edge", "", "plan, user, …", "fixed_window:31536000")
    ids, others = ("", "", "request ids", ""), ("", "", "keys that are not ours", "")
    assert {group: row["keys"] for group, row in groups.items()} == {free: FREE, pro: PRO, cut: 1, ids: 1, others: 2}
    assert next(iter(groups)) == others  # the largest first
    whole = {key: redis_server.cli("MEMORY", "USAGE", key) for key in redis_server.cli("KEYS", "p:rl:{edge/plan=pro*")}
    assert groups[pro]["bytes"] == sum(whole.values())
    assert groups[others]["bytes"] > 10_000


def test_without_rules_descriptors_are_listed_by_their_keys(memory: Memory, redis_server: RedisServer) -> None:
    fill(redis_server.address)
    used = int(redis_server.cli("INFO", "memory")["used_memory"])
    redis_server.cli("CONFIG", "SET", "maxmemory", used * 4)
    try:
        code, out, err = memory(redis_server.address, "--limit", "2")
    finally:
        redis_server.cli("CONFIG", "SET", "maxmemory", 0)
    assert (code, err) == (0, "")
    first, node, empty, head, *rows, rest = out.splitlines()
    assert first.startswith(f"{FREE + PRO + 1} of {FREE + PRO + 1} keys on 1 node scanned in ")
    assert "extrapolated" not in first
    assert node.startswith(f"127.0.0.1:{redis_server.port}: {FREE + PRO + 1} keys, ")
    assert node.endswith(" %)")
    assert empty == ""
    assert head.split() == ["DOMAIN", "RULE", "STATE", "KEYS", "BYTES", "EACH", "SHARE"]
    assert [row.split()[:5] for row in rows] == [
        ["edge", "(plan,", "user)", "fixed_window:31536000", str(FREE)],
        ["edge", "(plan,", "user)", "gcra:31536000", str(PRO)],
    ]
    assert rest.startswith("… and 1 more row: 1 key, ")


def test_memory_is_unknown_without_the_permission(memory: Memory, any_redis: RedisServer) -> None:
    fill(any_redis.address)
    any_redis.cli("ACL", "SETUSER", "looker", "reset", "on", ">pw", "~*", "&*", "+@all", "-memory", "-info")
    try:
        code, out, err = memory(f"redis://looker:pw@{any_redis.address}")
    finally:
        any_redis.cli("ACL", "DELUSER", "looker")
    assert code == ExitCode.DONE
    assert f"127.0.0.1:{any_redis.port}: {FREE + PRO + 1} keys\n" in out
    assert [line.split()[4:] for line in out.splitlines() if "gcra" in line] == [[str(PRO), "–", "–", "–"]]
    assert err.startswith("memory is unknown: MEMORY USAGE failed: NOPERM")


def test_an_empty_or_unreachable_server(memory: Memory, any_redis: RedisServer) -> None:
    code, out, err = memory(any_redis.address)
    assert (code, err, len(out.splitlines())) == (0, "", 2)
    assert out.startswith("0 of 0 keys on 1 node")
    code, out, err = memory("127.0.0.1:1")
    assert (code, out) == (ExitCode.UNREACHABLE, "")
    assert "127.0.0.1:1" in err


@pytest.mark.slow
def test_ctrl_c_shows_what_was_seen_extrapolated_to_all_keys(memory: Memory, any_redis: RedisServer) -> None:
    any_redis.cli("EVAL", "for i = 1, 3000 do redis.call('SET', 'rl:{edge/user=' .. i .. '}:gcra:60', 1) end", 0)
    command = [sys.executable, "-m", "ratelimit_rls", "top", "--memory", "--redis-url", any_redis.address]
    environment = {name: value for name, value in os.environ.items() if name != "CACHE_KEY_PREFIX"}
    with subprocess.Popen(
        [*command, "--rate", "200"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as scanning:
        assert scanning.stderr is not None
        progress = scanning.stderr.readline()
        scanning.send_signal(signal.SIGINT)
        out, _ = scanning.communicate(timeout=30)
    assert scanning.returncode == ExitCode.DONE
    assert progress.endswith(" %; Ctrl-C shows these\n")
    first, *_, row = out.splitlines()
    assert first.endswith("; the rest is extrapolated")
    seen = int(first.split(" ")[0].replace(",", ""))
    assert 200 <= seen < 3000  # at a bounded rate
    assert row.split()[:4] == ["edge", "(user)", "gcra:60", "3,000"]


@pytest.mark.slow
def test_every_master_of_a_cluster_and_one_that_is_away(memory: Memory) -> None:
    with RedisCluster() as cluster:
        fill(cluster.url)
        groups = memory.groups(cluster.url, "--rules", memory.rules)
        assert [row["keys"] for row in groups.values()] == [FREE, PRO, 1]
        code, out, _ = memory(cluster.url)
        assert f"{FREE + PRO + 1} of {FREE + PRO + 1} keys on 3 nodes" in out
        assert [line.split(": ")[0] for line in out.splitlines()[1:4]] == [node.address for node in cluster.nodes]

        away = cluster.nodes[2]
        away.stop()
        code, out, err = memory(cluster.url)
        assert code == ExitCode.UNREACHABLE
        left = sum(node.cli("DBSIZE") for node in cluster.nodes[:2])
        assert f"{left} of {left} keys on 3 nodes" in out
        assert f"Error: the keys of {away.address} are missing: " in err
