"""Names that clients choose, at a real server on a real Redis.

No name reaches the counter of another caller, and any number of names makes a bounded number of series, log lines and
rows.
"""

from __future__ import annotations

import re
import sqlite3
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection
from itertools import count

import pytest

from bench import wire
from bench.connection import Target
from bench.load import Load
from ratelimit_rls.core.model import Entry
from ratelimit_rls.core.storage_keys import encode_tag
from ratelimit_rls.protos.messages import RateLimitResponse
from ratelimit_rls.telemetry.collector import MAX_UNKNOWN_DOMAINS
from ratelimit_rls.telemetry.metrics import MAX_PATHS
from tests.hostile.envoy_calls import EnvoyCalls, series
from tests.support.admin import ServiceWithDatabase
from tests.support.servers import RedisServer

pytestmark = pytest.mark.slow

LIMIT = 1_000_000
USAGE_LINES = 50
DENIALS_PER_MINUTE = 30
LOGGED_PER_SECOND = 1
MAX_OTHER_LOG_LINES = 5
MAX_SHARED_LINES = 12
"""Maximum usage rows per minute. Calls beyond it are still counted by rule."""

FLOOD = 5000
MARK = "invented"
"""Prefix of every name of a flood."""

RULES = f"""\
domain: edge
answer: {{headers: [x-ratelimit]}}
ext_authz:
  descriptors:
    - entries: [{{key: user, header: x-user}}, {{key: path, from: path}}]
descriptors:
  - key: user
    rate_limit: &limit {{unit: year, requests_per_unit: {LIMIT}}}
    penalty: {{within: 1h, after: 5, multipliers: [2]}}
    descriptors: [{{key: path, rate_limit: *limit}}]
  - key: plan
    rate_limit: *limit
    descriptors: [{{key: user, rate_limit: *limit}}]
  - {{key: detailed, detailed_metric: true, rate_limit: *limit}}
  - {{key: valued, value_to_metric: true, rate_limit: *limit}}
  - {{key: denied, descriptors: [{{key: user, rate_limit: {{unit: year, requests_per_unit: 0}}}}]}}
"""


class Counting(ServiceWithDatabase):
    """Settings with bounds that a flood reaches quickly."""

    def __init__(self, directory: object, redis: RedisServer) -> None:
        self.database = f"{directory}/records.db"
        settings = {
            "RLS_RULES": f"{directory}/edge.yaml",
            "REDIS_URL": redis.address,
            "REDIS_SOCKET_TYPE": "tcp",
            "RLS_USAGE_LINES": USAGE_LINES,
            "RLS_AUDIT_REFUSALS_PER_MINUTE": DENIALS_PER_MINUTE,
            "RLS_AUDIT_SAMPLE": 0,
            "RLS_LOG_DENIALS": LOGGED_PER_SECOND,
            "LOG_LEVEL": "info",
        }
        super().__init__(f"sqlite:///{self.database}", settings)

    def rows(self, query: str) -> list[tuple[int, ...]]:
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as connection:
            return connection.execute(query).fetchall()

    def flood(self, messages: Sequence[bytes], *, denied: bool = False) -> None:
        """Send every message once, many at a time; each must be answered."""
        target = Target(("127.0.0.1", self.grpc_port))
        calls = list(map(wire.data, messages))
        with Load(target, calls, in_flight=64, connections=4, some_are_denied=denied) as load:
            load.run(0, at_least_calls=len(calls))
            load.drain()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[Counting]:
    """One server for all attacks. Afterwards it still answers a well-behaved caller."""
    directory = tmp_path_factory.mktemp("keys")
    (directory / "edge.yaml").write_text(RULES)
    with Counting(directory, redis) as running:
        yield running
        with EnvoyCalls(running.grpc_address) as calls:
            answer = calls.should_rate_limit("edge", [("user", "innocent")])
        assert (answer.overall_code, answer.statuses[0].limit_remaining) == (RateLimitResponse.OK, LIMIT - 1)
        assert "Traceback" not in running.log()
        assert MARK not in running.log()


@pytest.fixture(scope="module")
def calls(service: Counting) -> Iterator[EnvoyCalls]:
    with EnvoyCalls(service.grpc_address) as made:
        yield made


Entries = list[tuple[str, str]]
LONG = "alice" * 140
"""Value so long that the key of its counter ends in a digest."""

VICTIMS: list[Entries] = [
    [("user", "alice")],
    [("plan", "free"), ("user", "alice")],
    [("plan", "free")],
    [("user", LONG)],
    [("user", "alice"), ("path", "/pay")],
]


def key_of(entries: Entries) -> str:
    """Return the hash tag of the key in Redis, without its braces."""
    return encode_tag("edge", [Entry(*entry) for entry in entries]).decode().strip("{}")


VALUES = {
    "a slash and an entry": "alice/plan=free",
    "the whole key": "alice}:fixed_window:31536000",
    "the key from its beginning": "rl:{edge/user=alice}:fixed_window:31536000",
    "the key of the penalty": "alice}:penalty",
    "an algorithm": "alice:gcra:60",
    "a closed brace": "alice}",
    "an open brace": "{alice",
    "both braces": "{alice}",
    "empty braces": "{}alice",
    "a NUL": "alice\0",
    "an escaped NUL": "alice%00",
    "an escaped letter": "%61lice",
    "an escaped slash": "alice%2Fplan=free",
    "an escaped percent sign": "alice%2525",
    "a percent sign": "alice%",
    "an equals sign": "alice=",
    "an equals sign before": "=alice",
    "a space behind": "alice ",
    "a space before": " alice",
    "a tab": "alice\t",
    "a line break": "alice\n",
    "a command of Redis": "alice\r\nDEL rl:{edge/user=alice}:fixed_window:31536000\r\n",
    "a pattern": "alic*",
    "every value": "*",
    "an underscore": "alice_",
    "a dot": "alice.",
    "a comma": "alice,bob",
    "a bar": "alice|bob",
    "a hole of a template": "${user}",
    "capitals": "ALICE",
    "a letter of another script": "\N{CYRILLIC SMALL LETTER A}lice",
    "an invisible character": "al\N{ZERO WIDTH JOINER}ice",
    "right to left": "\N{RIGHT-TO-LEFT OVERRIDE}ecila",
    "wide letters": "".join(chr(ord(letter) + 0xFEE0) for letter in "alice"),
    "composed": unicodedata.normalize("NFC", "alic\N{LATIN SMALL LETTER E WITH ACUTE}"),
    "decomposed": unicodedata.normalize("NFD", "alic\N{LATIN SMALL LETTER E WITH ACUTE}"),
    "a character beyond the first plane": "alice\N{GRINNING FACE}",
    "a control character": "alice\x7f",
    "nothing": "",
    "the digest of a long value": key_of([("user", LONG)]).removeprefix("edge/user="),
    "a long value with another end": LONG[:-1] + "f",
    "a long value that goes on": LONG + "/plan=free",
    "60,000 characters": "alice" * 12_000,
    "60,000 separators": "/={}%~" * 10_000,
}
ENTRIES: dict[str, Entries] = {
    "both entries in one value": [("plan", "free/user=alice")],
    "both entries in one key": [("plan=free/user", "alice")],
    "the value in the key": [("user=alice", "")],
    "the value in the key, with an end": [("user=alice}", "")],
    "an empty key": [("", "user=alice")],
    "an empty entry before": [("", ""), ("user", "alice")],
    "an empty entry behind": [("user", "alice"), ("", "")],
    "entries the other way round": [("user", "alice"), ("plan", "free")],
    "an entry twice": [("user", "alice"), ("user", "alice")],
    "a key in capitals": [("User", "alice")],
    "a key with a space": [("user ", "alice")],
    "a key with a NUL": [("user\0", "alice")],
    "joined as the reference does": [("plan_free", "user_alice")],
    "a slash in the last value": [("plan", "free"), ("user", "alice/")],
    "a brace in the first value": [("plan", "free}/user=alice"), ("user", "")],
    "a path of another user": [("user", "alice/path=/pay")],
}


@pytest.fixture(scope="module")
def victims_left(calls: EnvoyCalls) -> Callable[[], list[int]]:
    """Return the remaining limits of the victims, without the call that asks for them."""
    numbers = count()

    def ask() -> list[int]:
        number = next(numbers)
        answers = (calls.should_rate_limit("edge", victim) for victim in VICTIMS)
        return [answer.statuses[0].limit_remaining + number for answer in answers]

    return ask


def has_a_counter_of_its_own(calls: EnvoyCalls, entries: Entries, *, brings_limit: bool = False) -> None:
    limit = LIMIT if brings_limit else 0
    left = [calls.should_rate_limit("edge", entries, requests_per_year=limit).statuses[0] for _ in range(2)]
    assert [status.limit_remaining for status in left] == [LIMIT - 1, LIMIT - 2], "another one has counted there"


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("key", ["user", "plan"])
def test_value_reaches_no_other_counter(
    calls: EnvoyCalls, victims_left: Callable[[], list[int]], key: str, value: str
) -> None:
    before = victims_left()
    has_a_counter_of_its_own(calls, [(key, value)])
    assert victims_left() == before


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES.keys())
def test_entries_reach_no_other_counter(
    calls: EnvoyCalls, victims_left: Callable[[], list[int]], entries: Entries
) -> None:
    """Sends a limit override with each call, so that any key is counted."""
    before = victims_left()
    has_a_counter_of_its_own(calls, entries, brings_limit=True)
    assert victims_left() == before


REQUESTS = {
    "the path in the header": ("alice/path=/pay", "/"),
    "the separator in the header": ("alice/path=", "/pay"),
    "an escaped separator in the header": ("alice%2Fpath=", "/pay"),
    "a slash behind": ("alice", "/pay/"),
    "two slashes": ("alice", "//pay"),
    "an escaped slash": ("alice", "%2Fpay"),
    "an escaped letter": ("alice", "/%70ay"),
    "a brace": ("alice}", "/pay"),
    "two headers joined": ("alice,alice", "/pay"),
    "capitals": ("alice", "/PAY"),
    "an entry in the path": ("alice", "/pay/user=bob"),
}


@pytest.mark.parametrize(("user", "path"), REQUESTS.values(), ids=REQUESTS.keys())
def test_request_reaches_no_other_counter(
    calls: EnvoyCalls, victims_left: Callable[[], list[int]], user: str, path: str
) -> None:
    before = victims_left()
    left = [calls.check({"x-user": user}, path=path).remaining for _ in range(2)]
    assert left == [LIMIT - 1, LIMIT - 2]
    assert victims_left() == before


def test_caller_has_one_counter_however_it_asks(calls: EnvoyCalls) -> None:
    """Checks the tests above: equal names do share a counter."""
    entries = [("user", "carol"), ("path", "/pay")]
    first = calls.should_rate_limit("edge", entries).statuses[0].limit_remaining
    second = calls.check({"x-user": "carol"}, path="/pay").remaining
    third = calls.should_rate_limit("edge", entries, requests_per_year=LIMIT).statuses[0].limit_remaining
    assert (second, third) == (first - 1, first - 2)


def test_keys_in_redis_cannot_be_misread(calls: EnvoyCalls, redis: RedisServer) -> None:
    for value in VALUES.values():
        calls.should_rate_limit("edge", [("user", value)])
    keys = redis.cli("KEYS", "*")
    assert len(keys) >= len(VALUES)
    odd = [key for key in keys if not re.fullmatch(rb"rl:\{edge/[^{}\x00-\x20\x7f]*\}:[a-z_]+(:[0-9]+)?", key)]
    assert [key for key in odd if not key.startswith(b"admin:")] == []
    assert max(map(len, keys)) < 1024


def requests(names: Iterator[str], number: int, *entries: tuple[str, str], domain: str = "edge") -> list[bytes]:
    """Return calls with new names, which replace {} in the entries and in the domain."""
    made = []
    for _ in range(number):
        name = next(names)
        filled = [(key.format(name), value.format(name)) for key, value in entries]
        made.append(wire.rate_limit_request(domain.format(name), [filled]))
    return made


@pytest.fixture(scope="module")
def names() -> Iterator[str]:
    return (f"{MARK}-{number}" for number in count())


def test_new_users_and_paths_make_no_series(service: Counting, names: Iterator[str]) -> None:
    def flood(number: int) -> set[str]:
        service.flood(requests(names, number, ("user", "{}")))
        service.flood(requests(names, number, ("user", "{}"), ("path", "/{}")))
        service.flood(requests(names, number, ("plan", "{}"), ("user", "{}")))
        service.flood(requests(names, number, ("unknown-{}", "{}")))
        return series(service)

    assert flood(20) == flood(1000)


def test_new_domains_make_few_series(service: Counting, names: Iterator[str]) -> None:
    before = series(service)
    service.flood(requests(names, 1000, ("user", "alice"), domain="{}"))
    made = series(service) - before
    assert 0 < len({one for one in made if MARK in one}) <= MAX_UNKNOWN_DOMAINS
    service.flood(requests(names, 1000, ("user", "alice"), domain="{}"))
    assert series(service) - before == made


@pytest.mark.timeout(120)
def test_names_in_metrics_are_bounded(service: Counting, names: Iterator[str]) -> None:
    """Rules with `detailed_metric` have a bounded number of names; all others are counted under one."""
    service.flood(requests(names, MAX_PATHS // 2, ("detailed", "{}")))
    service.flood(requests(names, MAX_PATHS // 2 + 1000, ("valued", "{}")))
    before, lines = series(service), service.debug("/stats").body.count("\n")
    service.flood(requests(names, 1000, ("detailed", "{}")) + requests(names, 1000, ("valued", "{}")))
    assert series(service) - before <= {one for one in series(service) if "_other" in one}
    assert service.debug("/stats").body.count("\n") <= lines + 20
    paths = {line.rpartition(".")[0] for line in service.debug("/stats").body.splitlines() if MARK in line}
    assert (
        len({path for path in paths if f"edge.detailed_{MARK}" in path or f"edge.valued_{MARK}" in path}) <= MAX_PATHS
    )


def test_new_urls_make_no_series_and_no_log_lines(service: Counting, names: Iterator[str]) -> None:
    before, lines = series(service), service.log().count("\n")
    for port in (service.http_port, service.debug_port, service.admin_port):
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        for _ in range(200):
            connection.request("GET", f"/{next(names)}?{next(names)}", headers={"User-Agent": next(names)})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 404
        connection.close()
    assert series(service) == before
    assert service.log().count("\n") <= lines + 5


def test_denials_of_new_names_make_few_log_lines_and_rows(service: Counting, names: Iterator[str]) -> None:
    """All calls are counted, in at most MAX_ROWS rows a minute."""
    begun_s, lines = time.monotonic(), service.log().count("\n")
    service.flood(requests(names, FLOOD, ("denied", "yes"), ("user", "{}")), denied=True)
    service.flood(requests(names, FLOOD, ("user", "{}"), ("path", "/{}")))
    took_s = time.monotonic() - begun_s
    assert service.log().count("\n") - lines <= LOGGED_PER_SECOND * (took_s + 2) + MAX_OTHER_LOG_LINES

    service.stop()  # which writes what is not written yet
    service.start()

    usage = "SELECT COUNT(*) FROM rate_limit_metrics GROUP BY granularity, timestamp, server_id"
    assert max(service.rows(usage)) <= (USAGE_LINES + MAX_SHARED_LINES,)
    ((counted,),) = service.rows("SELECT SUM(throttled_requests) FROM rate_limit_metrics WHERE granularity = 'minute'")
    assert counted >= FLOOD
    ((recorded,),) = service.rows("SELECT COUNT(*) FROM rate_limit_audit_logs")
    assert 0 < recorded <= DENIALS_PER_MINUTE * (1 + took_s / 60)
