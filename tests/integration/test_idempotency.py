"""Calls with a request id, each sent three times to the real service: counted once, with the same response.

Some are sent three times concurrently, some one after the other, and some callers time out before Redis has answered.
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
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitResponse
from tests.support.grpc_client import rate_limit_request
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CALLS = {"metadata": 1000, "entry": 1000, "descriptor": 300}
"""Fewer calls where only the location of the id differs: the store gets the same request."""

TIMES = 3
CAPACITY = 4_000_000_000
TIGHT = 100
TIGHT_CALLS = 300
GIVES_UP_S = 0.1
GIVING_UP_AT_ONCE = 50
"""Few enough that all of them are sent to Redis well before their callers time out."""

RULES = f"""
domain: once
charge: admitted
descriptors:
  - {{key: roomy, rate_limit: {{unit: year, requests_per_unit: {CAPACITY}}}}}
  - {{key: tight, rate_limit: {{unit: year, requests_per_unit: {TIGHT}}}}}
"""

Descriptors = Sequence[Mapping[str, str]]


class CallResult(NamedTuple):
    code: int
    remaining: tuple[int, ...]  # of each descriptor


class RetryingClient:
    """A client that sends calls with ids: in the metadata, or as an entry of a descriptor."""

    def __init__(self, channel: aio.Channel, id_location: str) -> None:
        self._method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
        self._location = id_location

    async def ask(self, number: int, descriptors: Descriptors, timeout_s: float = 20) -> CallResult:
        request_id = f"4bf92f35-{number:08}"
        metadata = (("x-request-id", request_id),) if self._location == "metadata" else ()
        sent = [dict(descriptor) for descriptor in descriptors]
        if self._location == "entry":
            sent[0] = {"request_id": request_id, **sent[0]}
        elif self._location == "descriptor":
            sent.append({"request_id": request_id})
        message = bytes(rate_limit_request("once", *sent))
        answer = RateLimitResponse.FromString(await self._method(message, timeout=timeout_s, metadata=metadata))
        remaining = tuple(status.limit_remaining for status in answer.statuses[: len(descriptors)])
        return CallResult(answer.overall_code, remaining)

    async def gives_up(self, number: int, descriptors: Descriptors) -> None:
        with pytest.raises(aio.AioRpcError):
            await self.ask(number, descriptors, GIVES_UP_S)


async def ask_three_times(
    client: RetryingClient,
    calls: int,
    descriptors: Descriptors,
    while_silent: Callable[[Awaitable[None]], Awaitable[None]],
) -> list[set[CallResult]]:
    """Return the distinct responses by call. `while_silent` runs while Redis does not answer."""
    responses: list[set[CallResult]] = [set() for _ in range(calls)]

    async def ask(number: int) -> None:
        responses[number].add(await client.ask(number, descriptors))

    at_once, later, given_up = (range(calls)[first::3] for first in range(3))
    await asyncio.gather(*(ask(number) for number in at_once for _ in range(TIMES)))
    for _ in range(TIMES):
        await asyncio.gather(*(ask(number) for number in later))
    for first in range(0, len(given_up), GIVING_UP_AT_ONCE):
        some = given_up[first : first + GIVING_UP_AT_ONCE]
        await while_silent(_together(client.gives_up(number, descriptors) for number in some))
        await asyncio.gather(*(ask(number) for number in some))
        await asyncio.gather(*(ask(number) for number in some))
    return responses


async def _together(work: Iterator[Awaitable[None]]) -> None:
    await asyncio.gather(*work)


def one_answer_each(responses: list[set[CallResult]]) -> list[CallResult]:
    """Return the response of each call."""
    assert [number for number, answers in enumerate(responses) if len(answers) != 1] == []
    return [answer for (answer,) in responses]


def codes(responses: list[set[CallResult]]) -> list[int]:
    """Return the responses where some calls are denied: a denial charges nothing, so a retry may get other values."""
    one_answer_each([answers for answers in responses if any(answer.code == Code.OK for answer in answers)])
    return [answer.code for answer, *_ in responses]


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


def variables(rules: Path, id_location: str) -> dict[str, object]:
    return {
        "RLS_RULES": rules,
        "RLS_STORE_TIMEOUT": "2s",  # longer than callers wait: calls that timed out are still counted
        "RLS_REQUEST_ID_METADATA": "x-request-id" if id_location == "metadata" else None,
        "RLS_REQUEST_ID_ENTRY": None if id_location == "metadata" else "request_id",
    }


@pytest.fixture(params=["metadata", "entry", "descriptor"])
def id_location(request: pytest.FixtureRequest) -> str:
    """The location of the id: in the metadata, in a counted descriptor, or in a descriptor of its own."""
    return str(request.param)


def count(server: RedisServer, descriptor: str) -> int:
    state = server.cli("GET", f"rl:{{once/{descriptor}}}:fixed_window:31536000")
    return int(state or 0) >> 16


async def test_retried_calls_are_counted_once(id_location: str, rules: Path, any_redis: RedisServer) -> None:
    calls = CALLS[id_location]
    environment = {**variables(rules, id_location), "REDIS_URL": any_redis.address}
    with ServiceProcess(environment) as service:
        async with aio.insecure_channel(service.grpc_address) as channel:
            client = RetryingClient(channel, id_location)
            responses = await ask_three_times(client, calls, [{"roomy": "a"}], silencing(any_redis))
            counted = count(any_redis, "roomy=a")
            tight = await ask_three_times(client, TIGHT_CALLS, [{"tight": "a"}], silencing(any_redis))

    print(f"id by {id_location}: {calls:,} calls sent {TIMES} times each counted as {counted:,}")
    answers = one_answer_each(responses)
    assert counted == calls
    assert {answer.code for answer in answers} == {Code.OK}
    assert sorted(answer.remaining for answer in answers) == [(CAPACITY - n,) for n in range(calls, 0, -1)]
    assert Counter(codes(tight)) == {Code.OK: TIGHT, Code.OVER_LIMIT: TIGHT_CALLS - TIGHT}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(masters=3) as cluster:
        yield cluster


def on_three_nodes(cluster: RedisCluster, *keys: str) -> list[tuple[RedisServer, dict[str, str]]]:
    """Return a descriptor for each of three keys, each on a different node, with that node."""
    found: list[tuple[RedisServer, dict[str, str]]] = []
    for key in keys:
        taken = {node.port for node, _ in found}
        owners = ((number, cluster.node_of(f"rl:{{once/{key}={number}}}")) for number in range(1000))
        found.append(next((node, {key: str(number)}) for number, node in owners if node.port not in taken))
    return found


def counts(placed: list[tuple[RedisServer, dict[str, str]]]) -> list[int]:
    return [count(node, f"{key}={value}") for node, descriptor in placed for key, value in descriptor.items()]


async def settled(placed: list[tuple[RedisServer, dict[str, str]]]) -> list[int]:
    """Return the counts once they are stable: refunds of timed-out calls happen in the background."""
    before: list[int] = []
    while (now := counts(placed)) != before:
        before = now
        await asyncio.sleep(0.3)
    return now


async def test_retried_calls_over_three_nodes_are_counted_once_or_not_at_all(
    id_location: str, rules: Path, cluster: RedisCluster
) -> None:
    for node in cluster.nodes:
        node.flush()
    calls = CALLS[id_location]
    environment = {**variables(rules, id_location), "REDIS_URL": cluster.url, "REDIS_TYPE": "CLUSTER"}
    with ServiceProcess(environment) as service:
        async with aio.insecure_channel(service.grpc_address) as channel:
            client = RetryingClient(channel, id_location)
            roomy = on_three_nodes(cluster, "roomy", "roomy", "roomy")
            responses = await ask_three_times(client, calls, [one for _, one in roomy], silencing(*cluster.nodes))
            counted = counts(roomy)
            for node in cluster.nodes:
                node.cli("FLUSHALL")
            last_denies = on_three_nodes(cluster, "roomy", "roomy", "tight")
            tight = await ask_three_times(
                client, TIGHT_CALLS, [one for _, one in last_denies], silencing(*cluster.nodes)
            )
            charged = await settled(last_denies)

    print(f"three nodes, id by {id_location}: {calls:,} calls sent {TIMES} times each counted as {counted}")
    print(f"with {TIGHT} free on the last: {TIGHT_CALLS} calls counted as {charged}")
    answers = one_answer_each(responses)
    assert counted == [calls] * 3
    assert {answer.code for answer in answers} == {Code.OK}
    assert sorted(answer.remaining for answer in answers) == [(CAPACITY - n,) * 3 for n in range(calls, 0, -1)]
    assert Counter(codes(tight)) == {Code.OK: TIGHT, Code.OVER_LIMIT: TIGHT_CALLS - TIGHT}
    assert charged == [TIGHT] * 3
