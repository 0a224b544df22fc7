"""Every kind of Redis failure, one after the other and under load: each call gets the fallback decision of its rules.

Deadlines are measured by the callers. On a busy machine calls look late, so the time that caller and service waited for
a core is subtracted; if some were late nevertheless, or too many had no core to be measured by, the test is repeated.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from ratelimit_rls.core.model import Code
from tests.support.cpu_starvation import CpuStarvation
from tests.support.grpc_client import rate_limit_request
from tests.support.open_loop_clients import CallRecord, OpenLoopClients
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess
from tests.support.tcp_proxy import SlowProxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

POLICIES = ("error", "allow", "deny", "local")
LIMIT, REPLICAS = 1_000_000_000, 10_000
SHARE = LIMIT // REPLICAS
"""The remaining value of a local decision is at most this, and that of the store is never as low."""

RULES = "domain: chaos\ndescriptors:\n" + "".join(
    f"""\
  - key: {policy}
    on_store_failure: {policy}
    rate_limit: {{unit: year, requests_per_unit: {LIMIT}}}
"""
    for policy in POLICIES
)
MESSAGES = [bytes(rate_limit_request("chaos", {policy: "client"})) for policy in POLICIES]

CALLS_PER_S = 300
DEADLINE_S = 0.05
MARGIN_S = 0.01  # more than in production, where the service has a core of its own
PASSWORD = "right"
SETTLE_S = 0.3  # until the failure is detected, some calls are decided by the store and others not
FAULT_S = 1.2
BACK_WITHIN_S = 1.0
LATE_S = 0.005
MAX_GROWTH_MIB = 8
TRIES = 4

STORE, POLICY, UNDECIDED = "store", "policy", "nobody"


class Setup(NamedTuple):
    redis: RedisServer
    relay: SlowProxy
    password_file: Path
    service: ServiceProcess
    behind_relay: ServiceProcess  # the same, but connected to Redis through the relay


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("chaos")
    (directory / "rules.yaml").write_text(RULES)
    password_file = directory / "password"
    password_file.write_text(PASSWORD)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(password=PASSWORD))
        relay = stack.enter_context(SlowProxy(redis))
        variables = {
            "RLS_RULES": directory / "rules.yaml",
            "REDIS_AUTH_FILE": password_file,
            "RLS_REPLICAS": REPLICAS,
            "RLS_DEADLINE_MARGIN": f"{MARGIN_S * 1000:.0f}ms",
        }
        services = [
            stack.enter_context(ServiceProcess({**variables, "REDIS_URL": address}))
            for address in (redis.address, relay.address)
        ]
        for service in services:
            with OpenLoopClients(service.grpc_address, MESSAGES, per_second=CALLS_PER_S, timeout_s=5) as load:
                wait_for(lambda: len(load.calls) > CALLS_PER_S)  # one-time initialisation is done
        yield Setup(redis, relay, password_file, *services)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


def by_whom(call: CallRecord) -> str:
    """Return whether the store or the fallback decided a call, or neither."""
    (left,) = call.left or (0,)
    match POLICIES[call.message], call.outcome:
        case _, Code.OK if left > SHARE:
            return STORE
        case ("error", grpc.StatusCode.UNAVAILABLE) | ("deny", Code.OVER_LIMIT):
            return POLICY
        case "allow", Code.OK if left == 0:
            return POLICY
        case "local", Code.OK if left < SHARE:
            return POLICY
        case _, grpc.StatusCode.DEADLINE_EXCEEDED:
            return UNDECIDED
    raise AssertionError(f"{POLICIES[call.message]} was told {call}")


def is_served(calls: list[CallRecord]) -> bool:
    """Return whether the store decides, for calls of every policy."""
    by = Counter(map(by_whom, calls[-40:]))
    return by[STORE] > 30 and not by[POLICY]


class Fault(NamedTuple):
    begin: Callable[[Setup], None]
    end: Callable[[Setup], None]
    is_total: bool = True  # the store answers no call in time
    is_of_relay: bool = False


def restart(setup: Setup) -> None:
    setup.redis.kill()
    setup.redis.start()


def rotate(setup: Setup, password: str) -> None:
    setup.password_file.write_text(password)


def rotate_in_a_wrong_one(setup: Setup) -> None:
    rotate(setup, "wrong")
    setup.redis.cli("CLIENT", "KILL", "TYPE", "normal")


def nothing(setup: Setup) -> None: ...


FAULTS = {
    "killed": Fault(lambda setup: setup.redis.kill(), lambda setup: setup.redis.start() and None),  # type: ignore[arg-type]
    "paused": Fault(lambda setup: setup.redis.pause(), lambda setup: setup.redis.resume()),
    "restarted empty": Fault(restart, nothing, is_total=False),
    "slow by 50 ms": Fault(
        lambda setup: setattr(setup.relay, "delay_ms", 50.0),
        lambda setup: setattr(setup.relay, "delay_ms", 0.0),
        is_of_relay=True,
    ),
    "scripts flushed": Fault(lambda setup: setup.redis.cli("SCRIPT", "FLUSH"), nothing, is_total=False),
    "out of memory": Fault(
        lambda setup: setup.redis.cli("CONFIG", "SET", "maxmemory", "1"),
        lambda setup: setup.redis.cli("CONFIG", "SET", "maxmemory", "0"),
    ),
    "a read-only replica": Fault(
        lambda setup: setup.redis.cli("REPLICAOF", "127.0.0.1", "1"),
        lambda setup: setup.redis.cli("REPLICAOF", "NO", "ONE"),
    ),
    "a wrong password": Fault(rotate_in_a_wrong_one, lambda setup: rotate(setup, PASSWORD)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_call_gets_its_fallback_in_time_and_service_recovers(setup: Setup, name: str) -> None:
    in_time = [suffer(setup, name, FAULTS[name])]
    while not in_time[-1] and len(in_time) < TRIES:
        in_time.append(suffer(setup, name, FAULTS[name]))
    assert in_time[-1]


def suffer(setup: Setup, name: str, fault: Fault) -> bool:
    """Return whether all calls were answered in time; everything else is asserted here."""
    service = setup.behind_relay if fault.is_of_relay else setup.service
    before_mib = memory_mib(service)
    with (
        OpenLoopClients(service.grpc_address, MESSAGES, per_second=CALLS_PER_S, timeout_s=DEADLINE_S) as load,
        CpuStarvation(os.getpid(), service.pid) as starved,
    ):
        wait_for(lambda: is_served(load.calls))
        started_s = time.monotonic()
        fault.begin(setup)
        if fault.is_total:
            time.sleep(FAULT_S)
        ending_s = time.monotonic()
        fault.end(setup)
        back_s = time.monotonic()
        wait_for(lambda: is_served([call for call in load.calls if call.begun_s > back_s]))
    calls = [call for call in load.calls if call.ended_s > started_s]
    by = Counter(map(by_whom, calls))
    starved_s = {call: starved.between_s(call.begun_s, call.ended_s) for call in calls}
    seen_s = p999([call.ended_s - call.begun_s - DEADLINE_S for call in calls])
    over_s = p999([call.ended_s - call.begun_s - DEADLINE_S - starved_s[call] for call in calls])
    given_up = sum(by_whom(call) == UNDECIDED and starved_s[call] < MARGIN_S / 2 for call in calls)
    again_s = max((call.begun_s for call in calls if by_whom(call) == POLICY), default=back_s)
    growth_mib = memory_mib(service) - before_mib
    print(
        f"\n{name}: {len(calls)} calls, {by[STORE]} decided by Redis, {by[POLICY]} as rules say, {given_up} given up "
        f"({by[UNDECIDED] - given_up} more for want of a core); p99.9 ended {seen_s * 1000:+.1f} ms from its deadline "
        f"({over_s * 1000:+.1f} ms with a core at hand); "
        f"served again {again_s - back_s:+.2f} s after Redis was back; memory {growth_mib:+.1f} MiB"
    )
    if fault.is_total:
        during = [call for call in calls if started_s + SETTLE_S < call.begun_s < ending_s - DEADLINE_S]
        decided = {(POLICIES[call.message], by_whom(call)) for call in during if by_whom(call) != UNDECIDED}
        assert decided == {(policy, POLICY) for policy in POLICIES}
    assert again_s - back_s < BACK_WITHIN_S
    assert growth_mib < MAX_GROWTH_MIB
    return over_s < LATE_S and given_up <= 0.001 * len(calls) and by[UNDECIDED] <= 0.2 * len(calls)


def p999(times_s: list[float]) -> float:
    return sorted(times_s)[int(len(times_s) * 0.999)]


def memory_mib(service: ServiceProcess) -> float:
    return int(Path(f"/proc/{service.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
