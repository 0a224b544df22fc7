"""ShouldRateLimit over the wire on both transports: responses, and the status of rejected messages."""

from __future__ import annotations

import asyncio
import os

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.errors import RulesError, StoreUnavailable
from ratelimit_rls.pipeline.message_bounds import MAX_MESSAGE_BYTES
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitRequest, RateLimitResponse
from ratelimit_rls.telemetry.abuse import Abuse
from tests.integration.transport.conftest import Client, Service, eventually, message
from tests.support.windows import DAY_S, wait_for_time_left

OK, OVER_LIMIT = 1, 2
WEEK, YEAR = 7, 6


async def test_third_request_over_a_limit_of_two_is_denied(client: Client) -> None:
    codes = [(await client.ask({"user": "a"})).overall_code for _ in range(3)]
    assert codes == [OK, OK, OVER_LIMIT]


async def test_statuses_are_one_per_descriptor_in_order(client: Client) -> None:
    answer = await client.ask({"staff": "x"}, {"user": "a"}, {"nobody": "knows"})
    unlimited, limited, unknown = answer.statuses
    assert (unlimited.code, unlimited.limit_remaining, unlimited.HasField("current_limit")) == (OK, 2**32 - 1, False)
    assert (limited.code, limited.limit_remaining) == (OK, 1)
    limit = limited.current_limit
    assert (limit.name, limit.requests_per_unit, limit.unit) == ("per-user", 2, YEAR)
    assert 0 < limited.duration_until_reset.seconds <= 31_536_000
    assert limited.duration_until_reset.nanos == 0
    assert (unknown.code, unknown.limit_remaining, unknown.HasField("duration_until_reset")) == (OK, 0, False)
    assert not answer.response_headers_to_add
    assert not answer.HasField("dynamic_metadata")


async def test_hits_of_the_request_are_spent(client: Client) -> None:
    assert (await client.ask({"user": "a"}, hits=2)).statuses[0].limit_remaining == 0
    assert (await client.ask({"user": "a"})).overall_code == OVER_LIMIT


async def test_an_override_and_own_hits_are_read(client: Client) -> None:
    request = RateLimitRequest.FromString(message({"user": "a"}))
    request.descriptors[0].limit.requests_per_unit = 50
    request.descriptors[0].limit.unit = WEEK
    request.descriptors[0].hits_addend.value = 20
    wait_for_time_left(7 * DAY_S)
    answer = RateLimitResponse.FromString(await client.raw(request.SerializeToString()))
    status = answer.statuses[0]
    assert (status.current_limit.requests_per_unit, status.current_limit.unit, status.limit_remaining) == (50, WEEK, 30)
    request.descriptors[0].is_negative_hits = True
    request.descriptors[0].hits_addend.value = 5
    answer = RateLimitResponse.FromString(await client.raw(request.SerializeToString()))
    assert answer.statuses[0].limit_remaining == 35


@pytest.mark.parametrize("answers", [ResponseOptions(headers_enabled=True, reset_header="X-Reset")])
async def test_headers_are_sent_both_on_ok_and_on_over_limit(client: Client) -> None:
    for code, remaining in ((OK, "1"), (OK, "0"), (OVER_LIMIT, "0")):
        answer = await client.ask({"tenant": "t"}, {"user": "a"})
        headers = [(header.key, header.value) for header in answer.response_headers_to_add]
        assert answer.overall_code == code
        reset = str(answer.statuses[1].duration_until_reset.seconds)
        assert headers == [("RateLimit-Limit", "2"), ("RateLimit-Remaining", remaining), ("X-Reset", reset)]


@pytest.mark.parametrize("answers", [ResponseOptions(dynamic_metadata=True)])
async def test_dynamic_metadata_describes_request_and_rules(client: Client) -> None:
    answer = await client.ask({"tenant": "t"}, {"user": "a"}, hits=1)
    metadata = answer.dynamic_metadata
    assert metadata["domain"] == "edge"
    assert [list(descriptor["entries"]) for descriptor in metadata["descriptors"]] == [["tenant=t"], ["user=a"]]
    assert metadata["hitsAddend"] == 1
    assert (metadata["metadata"]["plan"], metadata["metadata"]["caps"]["burst"]) == ("free", 5)


async def test_a_request_without_domain_or_descriptors_is_invalid(client: Client, service: Service) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert await client.failure(message({"user": "a"}, domain="")) == (invalid, "rate limit domain must not be empty")
    assert await client.failure(message()) == (invalid, "rate limit descriptor list must not be empty")
    assert service.metrics.service.service_error == 2
    assert service.metrics.calls[SHOULD_RATE_LIMIT].by_status["INVALID_ARGUMENT"].count == 2


@pytest.mark.parametrize("unit", [0, 8, 2**31 - 1])
async def test_an_unknown_unit_in_an_override_is_invalid(client: Client, unit: int) -> None:
    request = RateLimitRequest.FromString(message({"user": "a"}))
    request.descriptors[0].limit.requests_per_unit = 5
    request.descriptors[0].limit.unit = unit
    code, words = await client.failure(request.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "unit" in words


async def test_ten_thousand_descriptors_are_rejected(client: Client) -> None:
    code, words = await client.failure(message(*[{"user": "a"}] * 10_000))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words == "at most 256 descriptors are allowed in one message (RLS_MAX_DESCRIPTORS)"
    largest = [{"user": f"{number:02}" + "x" * (60 * 1024 - 2)} for number in range(8)]
    assert (await client.ask(*largest)).overall_code == OK


async def test_thousands_of_empty_descriptors_are_rejected(client: Client, service: Service) -> None:
    bomb = b"\x12\x00" * 2**18
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
        with pytest.raises(aio.AioRpcError) as raised:
            await client.raw(bomb, compression=compression)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(aio.AioRpcError) as raised:
            await client.raw(bomb * 3, compression=compression)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert service.abuse.count(Abuse.MESSAGE_TOO_COMPLEX) == 3
    assert service.abuse.count(Abuse.MESSAGE_TOO_LARGE) + service.abuse.count(Abuse.DECOMPRESSION_BOMB) == 3
    assert (await client.ask({"user": "a"})).overall_code == OK


async def test_malformed_request_is_invalid(client: Client) -> None:
    not_utf8 = message({"user": "abcd"}).replace(b"abcd", b"\xff\xfe\xfd\xfc")
    cut_short = message({"user": "abcd"})[:-1]
    for bad in (not_utf8, cut_short, b"\xff" * 100):
        code, words = await client.failure(bad)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "RateLimitRequest" in words


async def test_random_bytes_never_break_the_server(client: Client) -> None:
    for size in range(1, 200):
        with pytest.raises(aio.AioRpcError) as raised:
            await client.raw(os.urandom(size))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await client.ask({"user": "a"})).overall_code == OK


async def test_a_message_over_four_mebibytes_is_not_read(client: Client) -> None:
    code, _ = await client.failure(b"\x00" * (MAX_MESSAGE_BYTES + 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await client.ask({"user": "a"})).overall_code == OK


async def test_missing_store_is_unavailable(client: Client, service: Service) -> None:
    service.store.fault = StoreUnavailable("no connection to the store")
    assert await client.failure(message({"user": "a"})) == (
        grpc.StatusCode.UNAVAILABLE,
        "no connection to the store",
    )
    assert (service.metrics.service.redis_error, service.metrics.service.service_error) == (1, 0)


async def test_without_rules_the_service_is_unavailable(client: Client, service: Service) -> None:
    service.rules.current = None
    assert await client.failure(message({"user": "a"})) == (
        grpc.StatusCode.UNAVAILABLE,
        "no rate limit configuration loaded",
    )


async def test_unexpected_error_is_internal_without_details(client: Client, service: Service) -> None:
    service.store.fault = fault = ZeroDivisionError("a secret")
    with capture_logs() as logs:
        assert await client.failure(message({"user": "a"})) == (grpc.StatusCode.INTERNAL, "internal error")
    assert logs == [{"event": "rate_limit_call_failed", "exc_info": fault, "log_level": "error"}]


async def test_new_rules_apply_to_cached_requests(client: Client, service: Service) -> None:
    assert (await client.ask({"user": "a"})).statuses[0].current_limit.requests_per_unit == 2
    service.load(b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 77}}]")
    assert (await client.ask({"user": "a"})).statuses[0].current_limit.requests_per_unit == 77
    service.rules.reject(RulesError(()))
    assert (await client.ask({"user": "a"})).statuses[0].limit_remaining == 75


# grpc.aio passes on one call per iteration, so there is nothing to batch.
async def test_concurrent_calls_share_a_batch(client: Client, service: Service) -> None:
    await client.ask({"tenant": "warm"})
    service.store.batches.clear()
    await asyncio.gather(*(client.ask({"tenant": "t"}) for _ in range(200)))
    assert sum(service.store.batches) == 200
    assert len(service.store.batches) < 100


async def test_cancelled_and_expired_calls_do_not_affect_others(client: Client, service: Service) -> None:
    service.store.gate.clear()
    service.throttle_queue.margin_s = 0.5  # so that a busy machine does not miss the deadline
    cancelled = client.raw(message({"user": "gone"}))
    late = client.raw(message({"user": "late"}), timeout=0.95)
    patient = client.raw(message({"user": "here"}))
    await eventually(lambda: service.servers[0].in_flight == 3)
    cancelled.cancel()
    with pytest.raises(aio.AioRpcError) as missed:
        await late
    assert (
        missed.value.code() is grpc.StatusCode.UNAVAILABLE
    )  # before its deadline, by the policy of its rules (test_store_timeouts.py)
    service.store.gate.set()
    assert RateLimitResponse.FromString(await patient).overall_code == OK
    assert (await client.ask({"user": "here"})).statuses[0].limit_remaining == 0
