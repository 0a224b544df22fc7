"""Four server processes on one Redis or cluster, sixty-four clients on one key: the limit is used exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ratelimit_rls.core.model import Algorithm, Code
from tests.support.grpc_client import rate_limit_request
from tests.support.load import run_load
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer, Service, redis_binaries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LIMIT = 700
CALLS = 1600
CLIENTS = 64

# A year is a window in which nothing comes back while the test runs.
RULES = "domain: hammer\ndescriptors:\n" + "".join(
    f"  - {{key: {algorithm.value}, rate_limit: "
    f"{{unit: year, requests_per_unit: {LIMIT}, algorithm: {algorithm.value}}}}}\n"
    for algorithm in Algorithm
)
RULES += """\
  - {key: wide, rate_limit: {unit: year, requests_per_unit: 100000, algorithm: fixed_window}}
  - {key: narrow, rate_limit: {unit: year, requests_per_unit: 50, algorithm: gcra}}
"""


@pytest.fixture(scope="module", params=["redis-6.2", "redis-on-path", "valkey-9", "cluster-valkey-9"])
def redis(request: pytest.FixtureRequest) -> Iterator[RedisServer | RedisCluster]:
    name = request.param.removeprefix("cluster-")
    binary = redis_binaries().get(name)
    if binary is None:
        pytest.skip(f"{name} is not on this machine")
    with RedisServer(binary) if name == request.param else RedisCluster(binary) as servers:
        yield servers


@pytest.fixture(scope="module")
def addresses(redis: RedisServer | RedisCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    rules: Path = tmp_path_factory.mktemp("rules") / "hammer.yaml"
    rules.write_text(RULES)
    with ExitStack() as stack:
        kind = "CLUSTER" if isinstance(redis, RedisCluster) else "SINGLE"
        variables = {"RLS_RULES": rules, "REDIS_URL": redis.url, "REDIS_TYPE": kind}
        services = [Service(variables) for _ in range(4)]
        for service in services:
            stack.enter_context(service)
        yield [service.grpc_address for service in services]


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
async def test_concurrent_clients_are_admitted_exactly_up_to_the_limit(
    algorithm: Algorithm, addresses: list[str]
) -> None:
    message = bytes(rate_limit_request("hammer", {algorithm.value: "hot"}))

    outcomes = await run_load(addresses, message, clients=CLIENTS, calls=CALLS)

    assert outcomes == {Code.OK: LIMIT, Code.OVER_LIMIT: CALLS - LIMIT}


async def test_denied_concurrent_calls_do_not_charge_other_limits(
    addresses: list[str], redis: RedisServer | RedisCluster
) -> None:
    """On a cluster the limits are in several slots, and what denied calls have charged is given back."""
    message = bytes(rate_limit_request("hammer", {"wide": "a"}, {"wide": "b"}, {"narrow": "c"}))

    outcomes = await run_load(addresses, message, clients=CLIENTS, calls=800)

    assert outcomes == {Code.OK: 50, Code.OVER_LIMIT: 750}
    for value in "ab":
        key = f"rl:{{hammer/wide={value}}}:fixed_window:31536000"
        server = redis.node_of(key) if isinstance(redis, RedisCluster) else redis
        assert int(server.cli("GET", key)) >> 16 == 50
