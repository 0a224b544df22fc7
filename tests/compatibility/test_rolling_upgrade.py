"""Processes of the previous release and of this one on the same Redis count into the same states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.model import Algorithm, Code, Plan, StoreResult, Unit
from tests.compatibility.previous_release import PreviousService, PreviousStore, unpack
from tests.property import test_algorithms, test_watchers
from tests.support.grpc_client import RateLimitResponse, ask, rate_limit_request
from tests.support.load import run_load
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer, redis_binaries
from tests.support.service_process import ServiceProcess
from tests.support.stores import START_US, StoreUnderTest, call, redis_store, step
from tests.support.traces import Moment, replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ALGORITHMS = pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("previous"))


class Both:
    """A store whose calls are decided by either release, as `turns` says: one bit for each call, 1 is this release."""

    def __init__(self, previous: PreviousStore, current: StoreUnderTest) -> None:
        self.previous, self.current = previous, current
        self.turns = 0

    @property
    def now_us(self) -> int:
        return self.current.now_us

    @now_us.setter
    def now_us(self, us: int) -> None:
        self.current.now_us = self.previous.now_us = us

    def spend(self, plan: Plan, *, max_wait_us: int | None = None) -> list[StoreResult]:
        is_current, self.turns = self.turns & 1, self.turns >> 1
        return (self.current if is_current else self.previous).spend(plan, max_wait_us=max_wait_us)


@pytest.fixture(scope="module", params=["redis-6.2", "redis-on-path", "valkey-9"])
def both(request: pytest.FixtureRequest, package: Path) -> Iterator[Both]:
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    with RedisServer(binary) as server, redis_store(server) as store, PreviousStore(package, server.port) as previous:
        yield Both(previous, store)


def check(traces: st.SearchStrategy[list[Moment]], both: Both, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(traces, st.integers(0, 2**30 - 1))
    def matches_the_oracle(trace: list[Moment], turns: int) -> None:
        both.turns = turns
        replay(trace, {"both releases": both})

    matches_the_oracle()


@ALGORITHMS
def test_each_release_continues_the_states_of_the_other(algorithm: Algorithm, both: Both) -> None:
    check(test_algorithms.traces(algorithm), both, 25)


def test_penalties_warnings_and_slots_of_throttled_calls_are_continued(both: Both) -> None:
    check(test_watchers.traces(), both, 100)


def spend_here(
    store: StoreUnderTest, plan: Plan, *, request_id: str = "", take: int = 0, refund: tuple[int, int] | None = None
) -> list[StoreResult]:
    """Spend a plan in this release, with the parameters of `PreviousStore.spend`."""
    prepared = store.store.prepare(plan)
    if request_id:
        prepared = prepared.idempotent(request_id.encode())
    if take:
        prepared = prepared.take_up_to(take)
    if refund:
        prepared = prepared.refund(*refund)
    return store.answered(prepared)


@ALGORITHMS
@pytest.mark.parametrize("begins_here", [False, True], ids=["upgrade", "downgrade"])
def test_retried_calls_and_leased_hits_of_the_other_release_are_known(
    algorithm: Algorithm, begins_here: bool, both: Both
) -> None:
    both.now_us = START_US
    plan = call(step(f"{algorithm.value}{begins_here}", 10, unit=Unit.YEAR, algorithm=algorithm))
    here, there = partial(spend_here, both.current, plan), partial(both.previous.spend, plan)
    first, second = (here, there) if begins_here else (there, here)

    (charged,) = first(request_id="id")
    assert (charged.denied, charged.replayed, charged.readings[0].left) == (False, False, 9)
    (retried,) = second(request_id="id")
    assert (retried.replayed, retried.readings) == (True, charged.readings)
    (leased,) = second(take=5)
    assert (leased.granted, leased.readings[0].left) == (5, 4)
    assert first(take=100)[0].granted == 4
    assert first(refund=(3, leased.now_us))[0].readings[0].left == 3
    assert second(take=100)[0].granted == 3


LIMIT = 60
LEASED = 600
RULES = "domain: edge\ncharge: admitted\ndescriptors:\n" + "".join(
    f"  - {{key: {algorithm.value}, rate_limit: "
    f"{{unit: year, requests_per_unit: {LIMIT}, algorithm: {algorithm.value}}}}}\n"
    for algorithm in Algorithm
)
RULES += f"""\
  - {{key: wide, rate_limit: {{unit: year, requests_per_unit: 1000}}}}
  - {{key: leased, hot: {{lease: 100ms}}, rate_limit: {{unit: year, requests_per_unit: {LEASED}}}}}
"""


def single(name: str) -> tuple[RedisServer, Mapping[str, object]]:
    server = RedisServer(redis_binaries().get(name))
    return server, {"REDIS_URL": server.address}


def cluster(name: str) -> tuple[RedisCluster, Mapping[str, object]]:
    nodes = RedisCluster(redis_binaries().get(name))
    return nodes, {"REDIS_URL": nodes.url, "REDIS_TYPE": "CLUSTER"}


class Releases:
    """A process of each release on one deployment, the previous one first."""

    def __init__(self, services: list[ServiceProcess], servers: list[RedisServer]) -> None:
        self.services = services
        self.addresses = [service.grpc_address for service in services]
        self.servers = servers

    def ask(self, release: int, *descriptors: dict[str, str]) -> RateLimitResponse:
        return ask(self.addresses[release], rate_limit_request("edge", *descriptors))


@pytest.fixture(
    scope="module",
    params=[(single, "valkey-9"), (cluster, "redis-6.2"), (cluster, "valkey-9")],
    ids=lambda one: f"{one[0].__name__}-{one[1]}",
)
def releases(
    request: pytest.FixtureRequest, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Releases]:
    deploy, name = request.param
    rules = tmp_path_factory.mktemp("rules") / "rules.yaml"
    rules.write_text(RULES)
    with ExitStack() as stack:
        deployment, variables = deploy(name)
        stack.enter_context(deployment)
        environment = {"RLS_RULES": rules, **variables}
        services = [PreviousService(package, environment), ServiceProcess(environment)]
        for service in services:
            stack.enter_context(service)
        yield Releases(services, deployment.nodes if isinstance(deployment, RedisCluster) else [deployment])


@ALGORITHMS
def test_calls_to_both_in_turn_see_the_charges_of_each_other(releases: Releases, algorithm: Algorithm) -> None:
    left = [
        releases.ask(number % 2, {algorithm.value: "in turn"}).statuses[0].limit_remaining for number in range(LIMIT)
    ]
    assert left == [*range(LIMIT - 1, -1, -1)]
    for release in (0, 1):
        assert releases.ask(release, {algorithm.value: "in turn"}).overall_code == Code.OVER_LIMIT


@ALGORITHMS
async def test_clients_of_both_are_admitted_exactly_up_to_the_limit(releases: Releases, algorithm: Algorithm) -> None:
    message = bytes(rate_limit_request("edge", {algorithm.value: "hot"}))
    outcomes = await run_load(releases.addresses, message, clients=16, calls=3 * LIMIT)
    assert outcomes == {Code.OK: LIMIT, Code.OVER_LIMIT: 2 * LIMIT}


async def test_denied_calls_of_both_charge_no_other_limit(releases: Releases) -> None:
    """Also over several slots of a cluster, where both give back what they have charged."""
    tags = [{"wide": value} for value in "abc"]
    message = bytes(rate_limit_request("edge", *tags, {"gcra": "all"}))
    outcomes = await run_load(releases.addresses, message, clients=16, calls=3 * LIMIT)
    if len(releases.servers) == 1:
        assert outcomes == {Code.OK: LIMIT, Code.OVER_LIMIT: 2 * LIMIT}
    assert outcomes[Code.OK] + outcomes[Code.OVER_LIMIT] == 3 * LIMIT
    for release in (0, 1):
        left = [status.limit_remaining for status in releases.ask(release, *tags).statuses]
        assert left == [1000 - outcomes[Code.OK] - 1 - release] * 3


async def test_leases_of_both_stay_within_the_limit(releases: Releases) -> None:
    message = bytes(rate_limit_request("edge", {"leased": "hot"}))
    outcomes: Counter[object] = Counter()
    while outcomes[Code.OVER_LIMIT] < LEASED or outcomes[Code.OK] < LEASED:  # a lease that is not used up is returned
        outcomes += await run_load(releases.addresses, message, clients=16, calls=LEASED)
    assert outcomes[Code.OK] == LEASED
    assert set(outcomes) == {Code.OK, Code.OVER_LIMIT}


def test_each_release_runs_its_script(releases: Releases) -> None:
    """Only this one runs it as a function."""
    stats = [server.cli("INFO", "commandstats") for server in releases.servers]
    runs = {name: sum(one.get(f"cmdstat_{name}", {}).get("calls", 0) for one in stats) for name in ("fcall", "evalsha")}
    assert runs["evalsha"] > 100
    assert (runs["fcall"] > 100) == ("valkey" in releases.servers[0].binary.name)
