"""One key at full speed on four processes and one Redis, with and without leases, as counted by Redis itself."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import pytest

from bench import wire
from bench.connection import Connection, Target
from tests.support.servers import RedisServer, Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROCESSES = 4
IN_FLIGHT = 8  # at each process

LIMIT = 60_000
PER_SECOND = 1_500
LEASE_S = 0.1
RULES = f"""\
domain: load_test
charge: admitted
descriptors:
  - {{key: plain, rate_limit: {{unit: year, requests_per_unit: {LIMIT}}}}}
  - {{key: leased, rate_limit: {{unit: year, requests_per_unit: {LIMIT}}}, hot: {{lease: 100ms}}}}
  - key: plain_bucket
    rate_limit: {{unit: second, requests_per_unit: {PER_SECOND}, algorithm: token_bucket}}
  - key: leased_bucket
    rate_limit: {{unit: second, requests_per_unit: {PER_SECOND}, algorithm: token_bucket}}
    hot: {{lease: 100ms}}
  - {{key: roomy, rate_limit: {{unit: year, requests_per_unit: 4000000000}}, hot: {{lease: 100ms}}}}
"""


@dataclass(frozen=True)
class LoadResult:
    """The result of a load."""

    calls: int
    admitted: int
    seconds: float
    scripts: int  # runs of the script, by Redis's count

    @property
    def calls_per_script(self) -> float:
        return self.calls / self.scripts

    def __str__(self) -> str:
        return (
            f"{self.calls} calls in {self.seconds:.1f} s, {self.admitted} admitted, {self.scripts} Redis calls "
            f"({self.scripts / self.seconds:.0f} a second, {self.calls_per_script:.1f} calls each)"
        )


class Load:
    def __init__(self, redis: RedisServer, rules: Path) -> None:
        self.redis = redis
        self.services = [Service({"RLS_RULES": rules, "REDIS_URL": redis.address}) for _ in range(PROCESSES)]

    def load(self, key: str, seconds: float, until_denied: bool = False) -> LoadResult:
        """Send closed-loop calls to every process for this long, or until nearly all are denied."""
        message = repeat(wire.data(wire.rate_limit_request("load_test", [[(key, "x")]])))
        before, started_s = self._scripts(), time.monotonic()
        with ExitStack() as stack:
            poll = stack.enter_context(select.epoll())
            connections = {}
            for service in self.services:
                connection = Connection(Target(("127.0.0.1", service.grpc_port)))
                stack.callback(connection.close)
                connection.prime(message, IN_FLIGHT)
                poll.register(connection.socket.fileno(), select.EPOLLIN)
                connections[connection.socket.fileno()] = connection
                connection.send_calls(IN_FLIGHT, message)
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                for fd, _ in poll.poll(5):
                    connection = connections[fd]
                    connection.receive()
                    connection.send_calls(IN_FLIGHT - connection.in_flight, message)
                if until_denied and sum(one.denied for one in connections.values()) > LIMIT // 4:
                    break
            took_s = time.monotonic() - started_s
            for connection in connections.values():
                connection.socket.settimeout(5)
                while connection.in_flight:
                    connection.receive()
            calls = sum(one.answered for one in connections.values())
            denied = sum(one.denied for one in connections.values())
        return LoadResult(calls, calls - denied, took_s, self._scripts() - before)

    def _scripts(self) -> int:
        return self.redis.script_runs()

    def counted(self, key: str) -> int:
        """Return the hits of a fixed window in Redis."""
        (name,) = self.redis.cli("KEYS", f"*{key}=x*")
        return int(self.redis.cli("GET", name)) // 2**16  # lua/fixed_window.lua


@pytest.fixture(scope="module")
def load_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    rules = tmp_path_factory.mktemp("rules") / "load_test.yaml"
    rules.write_text(RULES)
    with ExitStack() as stack:
        load_test = Load(stack.enter_context(RedisServer()), rules)
        for service in load_test.services:
            stack.enter_context(service)
        yield load_test


def test_leases_use_a_fixed_window_exactly_with_a_twentieth_of_the_redis_calls(load_test: Load) -> None:
    """Run until the window is full, and for some time more."""
    plain = load_test.load("plain", seconds=15, until_denied=True)
    leased = load_test.load("leased", seconds=15, until_denied=True)
    times = leased.calls_per_script / plain.calls_per_script
    print(f"\n  without leases: {plain}\n  with leases:    {leased}\n  {times:.0f} times fewer Redis calls")
    assert plain.admitted == LIMIT
    assert 0.98 * LIMIT <= leased.admitted <= LIMIT
    assert times >= 20


def test_leases_use_a_bucket_as_it_fills_with_a_fraction_of_the_redis_calls(load_test: Load) -> None:
    seconds = 4.0
    plain = load_test.load("plain_bucket", seconds)
    leased = load_test.load("leased_bucket", seconds)
    times = leased.calls_per_script / plain.calls_per_script
    print(f"\n  without leases: {plain}\n  with leases:    {leased}\n  {times:.0f} times fewer Redis calls")
    assert leased.calls > 1.5 * leased.admitted  # demand was far above the limit
    most = PER_SECOND * (1 + leased.seconds + LEASE_S)
    assert 0.98 * PER_SECOND * (1 + seconds) <= leased.admitted <= most
    assert times >= 5


def test_leased_hits_are_refunded_soon_after_the_demand_stops(load_test: Load) -> None:
    """The worst case of leases: all hits were leased for calls that no longer come."""
    outcome = load_test.load("roomy", seconds=2.0)
    stopped_s = time.monotonic()
    unspent = max_unspent = load_test.counted("roomy") - outcome.admitted
    while unspent > 0:
        assert time.monotonic() < stopped_s + 5
        time.sleep(0.002)
        unspent = load_test.counted("roomy") - outcome.admitted
    back_s = time.monotonic() - stopped_s
    rate = outcome.calls / outcome.seconds
    print(
        f"\n  {rate:.0f} hits a second at {PROCESSES} processes; when they stopped {max_unspent} were held, "
        f"{max_unspent / rate * 1000:.0f} ms of the demand, and all were back {back_s * 1000:.0f} ms later"
    )
    assert unspent == 0
    assert max_unspent < 2 * rate * LEASE_S
