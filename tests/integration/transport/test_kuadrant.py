"""Kuadrant's API for costs that are known only afterwards: check first, then report."""

from __future__ import annotations

import grpc
import pytest
from grpc import aio

from ratelimit_rls.protos.messages import KUADRANT_CHECK, KUADRANT_REPORT, SHOULD_RATE_LIMIT, RateLimitResponse
from tests.integration.transport.conftest import Client, Service, message

OK, OVER_LIMIT = 1, 2

RULES = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 10, algorithm: token_bucket}
  - key: old
    rate_limit: {unit: year, requests_per_unit: 10}
"""


class Halves:
    def __init__(self, channel: aio.Channel) -> None:
        self._check: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(KUADRANT_CHECK)
        self._report: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(KUADRANT_REPORT)

    async def check(self, **entry: str) -> int:
        return int(RateLimitResponse.FromString(await self._check(message(entry), timeout=10)).overall_code)

    async def report(self, hits: int, **entry: str) -> int:
        answer = await self._report(message(entry, hits=hits), timeout=10)
        return int(RateLimitResponse.FromString(answer).overall_code)


@pytest.fixture
def halves(client: Client, service: Service) -> Halves:
    service.load(RULES)
    return Halves(client.channel)


@pytest.mark.parametrize("key", ["user", "old"])
async def test_check_counts_nothing_and_report_counts_into_debt(key: str, halves: Halves, client: Client) -> None:
    assert [await halves.check(**{key: "a"}) for _ in range(20)] == [OK] * 20
    assert await halves.report(9, **{key: "a"}) == OK
    assert await halves.check(**{key: "a"}) == OK
    assert await halves.report(50, **{key: "a"}) == OK  # reported hits are always counted: a debt of forty-nine
    assert await halves.check(**{key: "a"}) == OVER_LIMIT
    assert await halves.check(**{key: "b"}) == OK
    assert (await client.ask({key: "a"})).overall_code == OVER_LIMIT


async def test_check_denies_if_the_next_hit_would_be_denied(halves: Halves) -> None:
    assert await halves.report(10, user="a") == OK
    assert await halves.check(user="a") == OVER_LIMIT


async def test_same_message_depends_on_the_method(halves: Halves, client: Client) -> None:
    assert await halves.check(user="a") == OK
    assert (await client.ask({"user": "a"})).statuses[0].limit_remaining == 9
    assert await halves.check(user="a") == OK
    assert await halves.report(0, user="a") == OK  # 0 on the wire means 1
    assert (await client.ask({"user": "a"})).statuses[0].limit_remaining == 7


async def test_only_should_rate_limit_counts_in_reference_metrics(halves: Halves, service: Service) -> None:
    await halves.check(user="a")
    await halves.report(1, user="a")
    assert service.metrics.calls[SHOULD_RATE_LIMIT].count == 0


async def test_malformed_request_is_invalid(client: Client) -> None:
    for method in (KUADRANT_CHECK, KUADRANT_REPORT):
        with pytest.raises(aio.AioRpcError) as raised:
            await client.channel.unary_unary(method)(b"\xff" * 10, timeout=10)  # type: ignore[arg-type]
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
