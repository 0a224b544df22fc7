"""Four server processes on one Redis, sixty-four clients on one key: the limit is used exactly, never exceeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ratelimit_rls.core.model import Algorithm, Code
from tests.support.grpc_client import rate_limit_request
from tests.support.load import run_load
from tests.support.servers import RedisServer, Service

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


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def addresses(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    rules: Path = tmp_path_factory.mktemp("rules") / "hammer.yaml"
    rules.write_text(RULES)
    with ExitStack() as stack:
        services = [stack.enter_context(Service({"RLS_RULES": rules, "REDIS_URL": redis.address})) for _ in range(4)]
        yield [service.grpc_address for service in services]


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
async def test_concurrent_clients_are_admitted_exactly_up_to_the_limit(
    algorithm: Algorithm, addresses: list[str]
) -> None:
    message = bytes(rate_limit_request("hammer", {algorithm.value: "hot"}))

    outcomes = await run_load(addresses, message, clients=CLIENTS, calls=CALLS)

    assert outcomes == {Code.OK: LIMIT, Code.OVER_LIMIT: CALLS - LIMIT}


async def test_denied_concurrent_calls_do_not_charge_other_limits(addresses: list[str], redis: RedisServer) -> None:
    message = bytes(rate_limit_request("hammer", {"wide": "a"}, {"wide": "b"}, {"narrow": "c"}))

    outcomes = await run_load(addresses, message, clients=CLIENTS, calls=800)

    assert outcomes == {Code.OK: 50, Code.OVER_LIMIT: 750}
    for value in "ab":
        state = int(redis.cli("GET", f"rl:{{hammer/wide={value}}}:fixed_window:31536000"))
        assert state >> 16 == 50
