"""`action: throttle` in a process of its own: on every store and transport, and with as many callers as it may hold."""

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
from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT, RateLimitResponse
from tests.client import rate_limit_request
from tests.launched import Watched
from tests.servers import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RULES = """\
domain: edge
descriptors:
  - key: slow      # one at once, one after ten seconds, and nobody waits for twenty
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

HELD = 10_000
CONNECTIONS = 12  # of at most 1024 calls each
MOST_KIB_EACH = {"native": 4, "grpcio": 40}
"""As docs/operations.md says: most of it is what the transport keeps for any call that is under way."""


@pytest.fixture(params=["native", "grpcio"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture(params=["embedded", "redis"])
def service(request: pytest.FixtureRequest, rules: Path, transport: str) -> Iterator[Watched]:
    with ExitStack() as stack:
        environment: dict[str, object] = {"RLS_RULES": rules, "RLS_TRANSPORT": transport}
        if request.param == "redis":
            environment["REDIS_URL"] = stack.enter_context(RedisServer()).address
        yield stack.enter_context(Watched(environment))


class Methods:
    """ShouldRateLimit on connections of their own."""

    def __init__(self, address: str, connections: int = 1) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [aio.insecure_channel(address, options=options) for _ in range(connections)]
        self._methods = [channel.unary_unary(SHOULD_RATE_LIMIT) for channel in self._channels]
        self._asked = 0

    def ask(self, message: bytes, timeout_s: float | None = None) -> aio.UnaryUnaryCall[bytes, bytes]:
        self._asked += 1
        return self._methods[self._asked % len(self._methods)](message, timeout=timeout_s)

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


def held(service: Watched) -> int:
    return service.stat("ratelimit.throttle.held")


async def test_short_deadlines_are_refused_at_once_and_slots_of_who_left_are_given_on(service: Watched) -> None:
    async with Methods(service.grpc_address) as methods:
        assert await methods.code(SLOW) == Code.OK
        begun_s = time.monotonic()
        assert [await methods.code(SLOW, timeout_s=5) for _ in range(5)] == [Code.OVER_LIMIT] * 5
        assert time.monotonic() - begun_s < 5  # not one of them was made to wait
        for number in range(3):
            call = methods.ask(SLOW)
            await eventually(lambda: held(service) == 1)
            assert await methods.code(SLOW) == Code.OVER_LIMIT
            call.cancel()
            await eventually(lambda left=number + 1: service.stat("ratelimit.throttle.left_total") == left)


async def test_two_processes_on_one_redis_share_the_queue(rules: Path, transport: str) -> None:
    with ExitStack() as stack:
        environment = {
            "RLS_RULES": rules,
            "RLS_TRANSPORT": transport,
            "REDIS_URL": stack.enter_context(RedisServer()).address,
        }
        services = [stack.enter_context(Watched(environment)) for _ in range(2)]
        async with AsyncExitStack() as clients:
            methods = [await clients.enter_async_context(Methods(service.grpc_address)) for service in services]
            begun_s = time.monotonic()
            codes = await asyncio.gather(*(methods[number % 2].code(CROWD) for number in range(101)))
            assert codes == [Code.OK] * 101
            assert time.monotonic() - begun_s >= 0.5  # two hundred a second, together


async def test_a_process_that_stops_answers_who_is_held(rules: Path, transport: str) -> None:
    with Watched({"RLS_RULES": rules, "RLS_TRANSPORT": transport}) as service:
        async with Methods(service.grpc_address) as methods:
            codes = asyncio.gather(*(methods.code(CROWD) for _ in range(201)))
            await eventually(lambda: held(service) > 50)
            service.signal(signal.SIGTERM)
            assert await codes == [Code.OK] * 201
        assert await asyncio.to_thread(service.ended) == 0
        assert "Traceback" not in service.log()


async def test_slots_of_who_is_still_held_when_the_time_is_up_are_given_back(
    rules: Path, transport: str, any_redis: RedisServer
) -> None:
    environment = {
        "RLS_RULES": rules,
        "RLS_TRANSPORT": transport,
        "REDIS_URL": any_redis.address,
        "RLS_DRAIN_TIMEOUT": "100ms",
    }
    for stop in (True, False):
        with Watched(environment) as service:
            async with Methods(service.grpc_address) as methods:
                if stop:
                    assert await methods.code(SLOW) == Code.OK
                call = methods.ask(SLOW)
                await eventually(lambda watched=service: held(watched) == 1, timeout_s=5)
                if stop:
                    assert await asyncio.to_thread(service.stop) == 0
                    assert "not given back" not in service.log()
                call.cancel()


async def test_ten_thousand_held_calls_stay_within_what_the_documentation_says(rules: Path, transport: str) -> None:
    with Watched({"RLS_RULES": rules, "RLS_TRANSPORT": transport}) as service:
        async with Methods(service.grpc_address, CONNECTIONS) as methods:
            await asyncio.gather(*(methods.code(CROWD) for _ in range(CONNECTIONS)))
            before = resident_kib(service.pid)
            # As many more as are answered while the others come: grpc.aio takes seconds to let ten thousand in.
            calls = []
            while (missing := HELD - await asyncio.to_thread(held, service)) > HELD // 100:
                calls += [asyncio.ensure_future(methods.ask(CROWD)) for _ in range(missing)]
                await asyncio.sleep(missing / 2500)
            most_held = await asyncio.to_thread(held, service)
            grown = resident_kib(service.pid) - before
            print(f"{transport}: {most_held} held calls, {grown / 1024:.0f} MiB, {grown / most_held:.1f} KiB each")
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await eventually(lambda: held(service) == 0)
        assert grown / most_held < MOST_KIB_EACH[transport]
        assert service.stop() == 0
        assert "Traceback" not in service.log()


def resident_kib(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0])
