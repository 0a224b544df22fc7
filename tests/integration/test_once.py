"""Calls that carry a request id, each sent three times to the real service: counted once, and answered as at first.

Some are sent three times at once, some one after the other, and of some the caller gave up before Redis had answered.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from grpc import aio

from ratelimit_rls.core.model import Code
from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT, RateLimitResponse
from tests.client import rate_limit_request
from tests.launched import Watched
from tests.redis_servers import RedisCluster
from tests.servers import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CALLS = {"metadata": 1000, "entry": 1000, "descriptor": 300}
"""Fewer, where only the door differs: the store is told the same, wherever an id was found."""

TIMES = 3
ROOM = 4_000_000_000
TIGHT = 100
TIGHT_CALLS = 300
GIVES_UP_S = 0.1
GIVING_UP_AT_ONCE = 50
"""Few enough that all of them are on their way to Redis well before their callers give up."""

RULES = f"""
domain: once
charge: admitted
descriptors:
  - {{key: roomy, rate_limit: {{unit: year, requests_per_unit: {ROOM}}}}}
  - {{key: tight, rate_limit: {{unit: year, requests_per_unit: {TIGHT}}}}}
"""

Descriptors = Sequence[Mapping[str, str]]


class Told(NamedTuple):
    code: int
    remaining: tuple[int, ...]  # of each descriptor


class Retrying:
    """A client that sends calls under ids: in the metadata, or as an entry of a descriptor."""

    def __init__(self, channel: aio.Channel, way: str) -> None:
        self._method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
        self._way = way

    async def ask(self, number: int, descriptors: Descriptors, timeout_s: float = 20) -> Told:
        request_id = f"4bf92f35-{number:08}"
        metadata = (("x-request-id", request_id),) if self._way == "metadata" else ()
        asked = [dict(descriptor) for descriptor in descriptors]
        if self._way == "entry":
            asked[0] = {"request_id": request_id, **asked[0]}
        elif self._way == "descriptor":
            asked.append({"request_id": request_id})
        message = bytes(rate_limit_request("once", *asked))
        answer = RateLimitResponse.FromString(await self._method(message, timeout=timeout_s, metadata=metadata))
        remaining = tuple(status.limit_remaining for status in answer.statuses[: len(descriptors)])
        return Told(answer.overall_code, remaining)

    async def gives_up(self, number: int, descriptors: Descriptors) -> None:
        with pytest.raises(aio.AioRpcError):
            await self.ask(number, descriptors, GIVES_UP_S)


async def ask_three_times(
    client: Retrying, calls: int, descriptors: Descriptors, while_silent: Callable[[Awaitable[None]], Awaitable[None]]
) -> list[set[Told]]:
    """By call, the different answers it got. `while_silent` runs something while Redis does not answer."""
    told: list[set[Told]] = [set() for _ in range(calls)]

    async def ask(number: int) -> None:
        told[number].add(await client.ask(number, descriptors))

    at_once, later, given_up = (range(calls)[first::3] for first in range(3))
    await asyncio.gather(*(ask(number) for number in at_once for _ in range(TIMES)))
    for _ in range(TIMES):
        await asyncio.gather(*(ask(number) for number in later))
    for first in range(0, len(given_up), GIVING_UP_AT_ONCE):
        some = given_up[first : first + GIVING_UP_AT_ONCE]
        await while_silent(_together(client.gives_up(number, descriptors) for number in some))
        await asyncio.gather(*(ask(number) for number in some))
        await asyncio.gather(*(ask(number) for number in some))
    return told


async def _together(work: Iterator[Awaitable[None]]) -> None:
    await asyncio.gather(*work)


def all_answered_alike(told: list[set[Told]]) -> list[Told]:
    """What each call was told."""
    assert [number for number, answers in enumerate(told) if len(answers) != 1] == []
    return [answer for (answer,) in told]


def codes(told: list[set[Told]]) -> list[int]:
    """Of calls some of which are refused: that charges nobody, so it is decided anew, and may tell of other numbers."""
    all_answered_alike([answers for answers in told if any(answer.code == Code.OK for answer in answers)])
    return [answer.code for answer, *_ in told]


def silencing(*servers: RedisServer) -> Callable[[Awaitable[None]], Awaitable[None]]:
    async def while_silent(work: Awaitable[None]) -> None:
        for server in servers:
            server.pause()
        try:
            await work
        finally:
            for server in servers:
                server.resume()

    return while_silent


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "once.yaml"
    path.write_text(RULES)
    return path


def variables(rules: Path, way: str) -> dict[str, object]:
    return {
        "RLS_RULES": rules,
        "RLS_STORE_TIMEOUT": "2s",  # longer than callers wait: what they gave up on is still counted
        "RLS_REQUEST_ID_METADATA": "x-request-id" if way == "metadata" else None,
        "RLS_REQUEST_ID_ENTRY": None if way == "metadata" else "request_id",
    }


@pytest.fixture(params=["metadata", "entry", "descriptor"])
def way(request: pytest.FixtureRequest) -> str:
    """Where the id stands: beside the call, in a descriptor that counts, or in one of its own."""
    return str(request.param)


def count(server: RedisServer, descriptor: str) -> int:
    state = server.cli("GET", f"rl:{{once/{descriptor}}}:fixed_window:31536000")
    return int(state or 0) >> 16


@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_retried_calls_count_once_each(transport: str, way: str, rules: Path, any_redis: RedisServer) -> None:
    calls = CALLS[way]
    environment = {**variables(rules, way), "REDIS_URL": any_redis.address, "RLS_TRANSPORT": transport}
    with Watched(environment) as service:
        async with aio.insecure_channel(service.grpc_address) as channel:
            client = Retrying(channel, way)
            told = await ask_three_times(client, calls, [{"roomy": "a"}], silencing(any_redis))
            counted = count(any_redis, "roomy=a")
            tight = await ask_three_times(client, TIGHT_CALLS, [{"tight": "a"}], silencing(any_redis))

    print(f"{transport}, id by {way}: {calls:,} calls sent {TIMES} times each counted as {counted:,}")
    answers = all_answered_alike(told)
    assert counted == calls
    assert {answer.code for answer in answers} == {Code.OK}
    assert sorted(answer.remaining for answer in answers) == [(ROOM - n,) for n in range(calls, 0, -1)]
    assert Counter(codes(tight)) == {Code.OK: TIGHT, Code.OVER_LIMIT: TIGHT_CALLS - TIGHT}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(masters=3) as cluster:
        yield cluster


def on_three_nodes(cluster: RedisCluster, *keys: str) -> list[tuple[RedisServer, dict[str, str]]]:
    """A descriptor for each of the three keys, with the node that counts it: each another."""
    found: list[tuple[RedisServer, dict[str, str]]] = []
    for key in keys:
        taken = {node.port for node, _ in found}
        owners = ((number, cluster.node_of(f"rl:{{once/{key}={number}}}")) for number in range(1000))
        found.append(next((node, {key: str(number)}) for number, node in owners if node.port not in taken))
    return found


def counts(placed: list[tuple[RedisServer, dict[str, str]]]) -> list[int]:
    return [count(node, f"{key}={value}") for node, descriptor in placed for key, value in descriptor.items()]


async def settled(placed: list[tuple[RedisServer, dict[str, str]]]) -> list[int]:
    """The counts once they stand still: what a caller left behind that gave up is settled without anybody waiting."""
    before: list[int] = []
    while (now := counts(placed)) != before:
        before = now
        await asyncio.sleep(0.3)
    return now


async def test_three_descriptors_on_three_nodes_count_once_each_or_not_at_all(
    way: str, rules: Path, cluster: RedisCluster
) -> None:
    for node in cluster.nodes:
        node.flush()
    calls = CALLS[way]
    environment = {**variables(rules, way), "REDIS_URL": cluster.url, "REDIS_TYPE": "CLUSTER"}
    with Watched(environment) as service:
        async with aio.insecure_channel(service.grpc_address) as channel:
            client = Retrying(channel, way)
            roomy = on_three_nodes(cluster, "roomy", "roomy", "roomy")
            told = await ask_three_times(client, calls, [one for _, one in roomy], silencing(*cluster.nodes))
            counted = counts(roomy)
            for node in cluster.nodes:
                node.cli("FLUSHALL")
            last_refuses = on_three_nodes(cluster, "roomy", "roomy", "tight")
            tight = await ask_three_times(
                client, TIGHT_CALLS, [one for _, one in last_refuses], silencing(*cluster.nodes)
            )
            charged = await settled(last_refuses)

    print(f"three nodes, id by {way}: {calls:,} calls sent {TIMES} times each counted as {counted}")
    print(f"with {TIGHT} free on the last: {TIGHT_CALLS} calls counted as {charged}")
    answers = all_answered_alike(told)
    assert counted == [calls] * 3
    assert {answer.code for answer in answers} == {Code.OK}
    assert sorted(answer.remaining for answer in answers) == [(ROOM - n,) * 3 for n in range(calls, 0, -1)]
    assert Counter(codes(tight)) == {Code.OK: TIGHT, Code.OVER_LIMIT: TIGHT_CALLS - TIGHT}
    assert charged == [TIGHT] * 3
