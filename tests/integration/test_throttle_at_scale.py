"""`action: throttle` in a real process: on every store, and with the maximum of delayed calls."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from grpc import aio

from ratelimit_rls.core.model import Code
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitResponse
from tests.support.grpc_client import rate_limit_request
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RULES = """\
domain: edge
descriptors:
  - key: slow      # one immediately, one after ten seconds; a wait of twenty is too long
    rate_limit: {unit: minute, requests_per_unit: 6, algorithm: token_bucket, burst: 1}
    action: throttle
    max_delay: 15s
  - key: crowd     # ten thousand slots within the minute
    rate_limit: {unit: second, requests_per_unit: 200, algorithm: leaky_bucket, burst: 1}
    action: throttle
    max_delay: 1m
"""
SLOW = bytes(rate_limit_request("edge", {"slow": "x"}))
CROWD = bytes(rate_limit_request("edge", {"crowd": "x"}))

DELAYED = 10_000
CONNECTIONS = 12  # of at most 1024 calls each
MAX_KIB_EACH = 4
"""Memory of a throttled call that docs/operations.md states."""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture(params=["embedded", "redis"])
def service(request: pytest.FixtureRequest, rules: Path) -> Iterator[ServiceProcess]:
    with ExitStack() as stack:
        environment: dict[str, object] = {"RLS_RULES": rules}
        if request.param == "redis":
            environment["REDIS_URL"] = stack.enter_context(RedisServer()).address
        yield stack.enter_context(ServiceProcess(environment))


class Methods:
    """ShouldRateLimit on separate connections."""

    def __init__(self, address: str, connections: int = 1) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [aio.insecure_channel(address, options=options) for _ in range(connections)]
        self._methods: list[aio.UnaryUnaryMultiCallable[bytes, bytes]] = [
            channel.unary_unary(SHOULD_RATE_LIMIT) for channel in self._channels
        ]
        self._calls = 0

    def ask(self, message: bytes, timeout_s: float | None = None) -> aio.UnaryUnaryCall[bytes, bytes]:
        self._calls += 1
        return self._methods[self._calls % len(self._methods)](message, timeout=timeout_s)

    async def code(self, message: bytes, timeout_s: float | None = None) -> int:
        return int(RateLimitResponse.FromString(await self.ask(message, timeout_s)).overall_code)

    async def __aenter__(self) -> Methods:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))


async def eventually(happened: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(happened):
            await asyncio.sleep(0.02)


def delayed(service: ServiceProcess) -> int:
    return service.stat("ratelimit.throttle.queue_length")


async def test_short_deadlines_are_denied_and_slots_of_disconnected_callers_reused(service: ServiceProcess) -> None:
    async with Methods(service.grpc_address) as methods:
        assert await methods.code(SLOW) == Code.OK
        started_s = time.monotonic()
        assert [await methods.code(SLOW, timeout_s=5) for _ in range(5)] == [Code.OVER_LIMIT] * 5
        assert time.monotonic() - started_s < 5  # none of them was delayed
        for number in range(3):
            call = methods.ask(SLOW)
            await eventually(lambda: delayed(service) == 1)
            assert await methods.code(SLOW) == Code.OVER_LIMIT
            call.cancel()
            await eventually(lambda left=number + 1: service.stat("ratelimit.throttle.cancelled") == left)  # type: ignore[misc]


async def test_two_processes_on_one_redis_share_the_queue(rules: Path) -> None:
    with ExitStack() as stack:
        environment = {
            "RLS_RULES": rules,
            "REDIS_URL": stack.enter_context(RedisServer()).address,
        }
        services = [stack.enter_context(ServiceProcess(environment)) for _ in range(2)]
        async with AsyncExitStack() as clients:
            methods = [await clients.enter_async_context(Methods(service.grpc_address)) for service in services]
            started_s = time.monotonic()
            codes = await asyncio.gather(*(methods[number % 2].code(CROWD) for number in range(101)))
            assert codes == [Code.OK] * 101
            assert time.monotonic() - started_s >= 0.5  # two hundred a second, together


async def test_a_stopping_process_answers_delayed_calls(rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules}) as service:
        async with Methods(service.grpc_address) as methods:
            codes = asyncio.gather(*(methods.code(CROWD) for _ in range(201)))
            await eventually(lambda: delayed(service) > 50)
            service.signal(signal.SIGTERM)
            assert await codes == [Code.OK] * 201
        assert await asyncio.to_thread(service.ended) == 0
        assert "Traceback" not in service.log()


async def test_slots_of_calls_delayed_beyond_the_drain_timeout_are_refunded(
    rules: Path, any_redis: RedisServer
) -> None:
    environment = {
        "RLS_RULES": rules,
        "REDIS_URL": any_redis.address,
        "RLS_DRAIN_TIMEOUT": "100ms",
    }
    for stop in (True, False):
        with ServiceProcess(environment) as service:
            async with Methods(service.grpc_address) as methods:
                if stop:
                    assert await methods.code(SLOW) == Code.OK
                call = methods.ask(SLOW)
                await eventually(lambda watched=service: delayed(watched) == 1, timeout_s=5)  # type: ignore[misc]
                if stop:
                    assert await asyncio.to_thread(service.stop) == 0
                    assert "not given back" not in service.log()
                call.cancel()


async def test_ten_thousand_delayed_calls_use_the_documented_memory(rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules}) as service:
        async with Methods(service.grpc_address, CONNECTIONS) as methods:
            await asyncio.gather(*(methods.code(CROWD) for _ in range(CONNECTIONS)))
            before = resident_kib(service.pid)
            # Plus as many as are answered while the others arrive: grpc.aio takes seconds to accept ten thousand.
            calls = []
            while (missing := DELAYED - await asyncio.to_thread(delayed, service)) > DELAYED // 100:
                calls += [asyncio.ensure_future(methods.ask(CROWD)) for _ in range(missing)]
                await asyncio.sleep(missing / 2500)
            max_delayed = await asyncio.to_thread(delayed, service)
            grown = resident_kib(service.pid) - before
            print(f"{max_delayed} held calls, {grown / 1024:.0f} MiB, {grown / max_delayed:.1f} KiB each")
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await eventually(lambda: delayed(service) == 0)
        assert grown / max_delayed < MAX_KIB_EACH
        assert service.stop() == 0
        assert "Traceback" not in service.log()


def resident_kib(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0])
