"""`peek` and `reset`: inspecting and deleting the counters of one or many descriptors in a real Redis."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path

import pytest
import redis

from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.settings import Settings
from ratelimit_rls.simulation.runner import make_limiter
from ratelimit_rls.store.redis.factory import new_redis_store
from tests.support.redis_servers import RedisCluster, RedisSentinels
from tests.support.servers import RedisServer

RULES = """\
domain: edge
descriptors:
  - key: client
    penalty: {within: 1h, after: 1, multipliers: [2]}
    warn_at: 0.8
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: free
    rate_limit: {unlimited: true}
"""


def spend(settings: Settings, rules: str, *requests: Request) -> None:
    """Spend hits as a server would."""

    async def ask() -> None:
        store = new_redis_store(settings)
        await store.start()
        policy = Policy(key_prefix=settings.cache_key_prefix)
        limiter = make_limiter(compile_documents({"rules.yaml": rules.encode()}).tree, store, policy)
        await limiter.check([limiter.prepare(request) for request in requests])
        await store.close()

    asyncio.run(ask())


def asking(domain: str, *entries: tuple[str, str]) -> Request:
    return Request(domain, (Descriptor(tuple(Entry(*entry) for entry in entries)),))


def offend(server: RedisServer, calls: int) -> None:
    settings = Settings(redis_url=server.address, cache_key_prefix="p:")
    spend(settings, RULES, *[asking("edge", ("client", "mallory"))] * calls)


@pytest.fixture
def arguments(any_redis: RedisServer, tmp_path: Path) -> list[str]:
    """Return the arguments that all commands here take."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    redis = ["--redis-url", f"127.0.0.1:{any_redis.port}", "--cache-key-prefix", "p:"]
    return [str(rules), *redis, "--domain", "edge", "--descriptor"]


def test_peek_shows_limits_penalties_and_warnings_and_spends_nothing(
    any_redis: RedisServer, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peek", *arguments, "client=mallory", "--descriptor", "free=yes"]) == 0
    out = capsys.readouterr().out
    assert "2/year fixed_window: 2 left" in out
    assert "state: normal" in out
    assert "unlimited" in out

    offend(any_redis, 4)
    for _ in range(2):
        assert main(["peek", *arguments, "client=mallory", "--format", "json"]) == 0
        (client,) = json.loads(capsys.readouterr().out)
        assert client["limits"][0]["left"] == 0
        assert (client["violations"], client["state"]) == (1, "throttled")
        assert client["cooldown_us"] > client["limits"][0]["retry_us"]
    assert main(["peek", *arguments, "client=mallory"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"0 left, the next one passes in \d+m?[smh], unused again in \d+m?[smh]$", out, re.MULTILINE)
    assert re.search(r"penalty: 1 recent violation, in a cooldown for \d+m?[smh]$", out, re.MULTILINE)


def test_reset_deletes_exactly_what_a_dry_run_lists(
    any_redis: RedisServer, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    offend(any_redis, 4)
    states = [
        "p:rl:{edge/client=mallory}:fixed_window:31536000",
        "p:rl:{edge/client=mallory}:penalty",
        "p:rl:{edge/client=mallory}:warning",
    ]
    assert main(["reset", *arguments, "client=mallory", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == states
    assert main(["reset", *arguments, "client=mallory", "--penalty-only"]) == 0
    assert capsys.readouterr().out.splitlines() == states[1:2]
    assert main(["reset", *arguments, "client=mallory"]) == 0
    assert capsys.readouterr().out.splitlines() == [states[0], states[2]]
    assert main(["peek", *arguments, "client=mallory", "--format", "json"]) == 0
    (client,) = json.loads(capsys.readouterr().out)
    assert (client["limits"][0]["left"], client["violations"], client["state"]) == (2, 0, "normal")


def test_reset_fails_without_redis_or_a_counter(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["reset", *arguments, "free=yes"]) == 1
    assert "the rules have no counter for this descriptor" in capsys.readouterr().err
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert main(["peek", arguments[0], "--domain", "edge", "--descriptor", "client=a"]) == 2
    assert "--redis-url" in capsys.readouterr().err


def test_an_unreachable_redis_is_named_in_the_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    away = [*arguments, "client=a", "--redis-url", "127.0.0.1:1"]
    assert main(["reset", *away]) == ExitCode.UNREACHABLE
    assert "127.0.0.1:1" in capsys.readouterr().err


PREFIX = "p*[x]?:"

HOSTILE = """\
domain: {domain}
shard_by: {shard_by}
descriptors:
  - key: user
    penalty: {{within: 1h, after: 1, multipliers: [2]}}
    rate_limit: {{unit: year, requests_per_unit: 1}}
    descriptors:
      - key: path
        rate_limit: {{unit: year, requests_per_unit: 1}}
"""

USERS = ["a*b", "a%2Ab", "aXb", "a?b", "a[b]", "a/b=c", "a\\*b", "愛", "a\x1b[2Jb", "a}:penalty", "b", "x" * 600]


class Reset:
    """Runs `reset --match` on one Redis, with given content."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys

    def fill(self, domain: str, shard_by: str = "descriptor") -> None:
        settings = Settings(redis_url=self.url, cache_key_prefix=PREFIX)
        requests = [asking(domain, ("user", user)) for user in USERS]
        requests += [asking(domain, ("user", user), ("path", "/")) for user in ("b", "c")]
        rules = HOSTILE.format(domain=json.dumps(domain), shard_by=shard_by)
        spend(settings, rules, *requests, asking(domain, ("user", "b")))

    def __call__(self, domain: str, pattern: str, *flags: str) -> tuple[int, list[str], str]:
        where = ["--redis-url", self.url, "--cache-key-prefix", PREFIX]
        code = main(["reset", *where, "--domain", domain, "--match", pattern, *flags])
        printed = self._capsys.readouterr()
        return code, [line.split("  ")[0] for line in printed.out.splitlines()], printed.err


@pytest.fixture
def reset(redis_server: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Reset:
    for name in ("REDIS_URL", "CACHE_KEY_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return Reset(redis_server.address, capsys)


PATTERNS = {
    "user=a[*]b": ["user=a*b"],
    "user=a%2Ab": ["user=a%2Ab"],
    "user=a[?]b": ["user=a?b"],
    "user=a[[]b]": ["user=a[b]"],
    "user=a/b=c": ["user=a/b=c"],
    "user=?": ["user=b", "user=愛"],
    "user=*2Jb": ["user=a\\x1b[2Jb"],
    "user=a}:*": ["user=a}:penalty"],
    "user=x*": [],
    "user=x*,**": ["user=" + "x" * 100],
    "path=*": [],
}


@pytest.mark.parametrize("shard_by", ["descriptor", "domain", "{key: user}", "{key: path}"])
@pytest.mark.parametrize("domain", ["edge", "e*d[g]?e/", "a:b%7D"])
def test_reset_deletes_exactly_the_matching_counters(
    reset: Reset, redis_server: RedisServer, domain: str, shard_by: str
) -> None:
    reset.fill(domain, shard_by)
    reset.fill("e*d[g]?e", "descriptor")  # other counters with similar names
    reset.fill("edge2", "domain")
    redis_server.cli("SET", "session:7", "not ours")
    before = set(redis_server.cli("KEYS", "*"))

    for pattern, descriptors in PATTERNS.items():
        code, previewed, _ = reset(domain, pattern, "--dry-run")
        assert (code, [line[:105] for line in previewed]) == (0, descriptors), pattern
    assert set(redis_server.cli("KEYS", "*")) == before

    code, previewed, err = reset(domain, "user=*,path=*", "--yes")
    assert (code, previewed) == (0, ["user=b,path=/", "user=c,path=/"])
    assert "2 states of 2 descriptors" in err
    assert "2 states reset" in err
    code, previewed, err = reset(domain, "user=b", "--penalty-only", "--yes")
    assert (code, previewed) == (0, ["user=b"])
    assert "1 state reset" in err
    assert len(before) - len(redis_server.cli("KEYS", "*")) == 3

    code, previewed, err = reset(domain, "**", "--yes")
    assert len(previewed) == 11
    assert previewed[-1] == "… and 2 more descriptors"
    assert "12 states reset" in err
    assert reset(domain, "**", "--yes")[::2] == (1, "nothing in Redis matches\n")
    assert sum(PREFIX.encode() in key for key in redis_server.cli("KEYS", "*")) == 2 * 15
    assert redis_server.cli("EXISTS", "session:7")


def test_reset_asks_for_confirmation(
    any_redis: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reset = Reset(any_redis.address, capsys)
    reset.fill("edge")
    before = any_redis.cli("DBSIZE")
    for answer, code in (("n\n", ExitCode.INTERRUPTED), ("", ExitCode.INTERRUPTED), ("y\n", ExitCode.DONE)):
        assert any_redis.cli("DBSIZE") == before
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert reset("edge", "user=a*b")[0] == code
    assert any_redis.cli("DBSIZE") == before - 6


def test_reset_publishes_the_deleted_keys(any_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    reset = Reset(any_redis.address, capsys)
    reset.fill("edge")
    with redis.Redis(port=any_redis.port) as client, client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.psubscribe("*")
        assert listener.get_message(timeout=5) is None  # the confirmation of the subscription
        assert reset("edge", "user=b", "--yes")[0] == 0
        arguments = listener.get_message(timeout=5)
    assert arguments is not None
    tag = f"{PREFIX}rl:{{edge/user=b}}"
    assert set(arguments["data"].decode().splitlines()) == {f"{tag}:fixed_window:31536000", f"{tag}:penalty"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--match", "user"], "--match 'user' contains 'user'; must be key=value"),
        (["--match", "user=*", "--descriptor", "user=a"], "--match cannot be combined with PATHS"),
        (["--descriptor", "user=a"], "PATHS is required"),
    ],
)
def test_invalid_reset_arguments_are_reported(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reset", "--redis-url", "127.0.0.1:1", "--domain", "edge", *arguments]) == ExitCode.USAGE
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_many_counters_are_deleted_in_batches(any_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    any_redis.cli(
        "EVAL", "for i = 1, 20000 do redis.call('SET', 'p*[x]?:rl:{edge/user=' .. i .. '}:gcra:60', 1) end", 0
    )
    code, previewed, err = Reset(any_redis.address, capsys)("edge", "user=*", "--yes")
    assert (code, previewed[-1]) == (0, "… and 19990 more descriptors")
    assert "20000 states reset" in err
    assert any_redis.cli("DBSIZE") == 0


@pytest.mark.slow
def test_peek_and_reset_on_a_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RedisCluster() as cluster:
        _all_of_it(cluster.url, capsys, tmp_path)
        assert sum(node.cli("DBSIZE") for node in cluster.nodes) == 0


@pytest.mark.slow
def test_peek_and_reset_behind_sentinels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RedisSentinels() as sentinels:
        _all_of_it(sentinels.url, capsys, tmp_path)
        assert sentinels.master.cli("DBSIZE") == 0


@pytest.mark.slow
def test_peek_and_reset_with_a_second_redis_for_seconds(
    any_redis: RedisServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer() as per_second:
        monkeypatch.setenv("REDIS_PERSECOND", "true")
        monkeypatch.setenv("REDIS_PERSECOND_URL", per_second.address)
        _all_of_it(any_redis.address, capsys, tmp_path)
        assert any_redis.cli("DBSIZE") == per_second.cli("DBSIZE") == 0


def _all_of_it(url: str, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    """Spend, peek, reset one counter, reset all."""
    rules = directory / "rules.yaml"
    limits = "[{unit: second, requests_per_unit: 100000}, {unit: year, requests_per_unit: 9}]"
    rules.write_text(f"domain: edge\ndescriptors:\n  - {{key: user, limits: {limits}}}\n")
    users = [f"u{number}" for number in range(30)]
    spend(Settings(redis_url=url), rules.read_text(), *(asking("edge", ("user", user)) for user in users))

    capsys.readouterr()
    one = ["--redis-url", url, "--domain", "edge", "--descriptor", "user=u0"]
    assert main(["peek", str(rules), *one, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["limits"][1]["left"] == 8
    assert main(["reset", str(rules), *one]) == 0
    assert "2 states of 2 reset" in capsys.readouterr().err
    assert main(["reset", "--redis-url", url, "--domain", "edge", "--match", "user=*", "--yes"]) == 0
    err = capsys.readouterr().err
    assert re.search(r"\d\d states of 29 descriptors", err)
    assert "reset" in err
