"""Request ids: extraction, idempotency and validation."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.model import Descriptor, Entry, LimitOverride, Purpose, Request, Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.request_id import MAX_ID_BYTES, extract_request_id, request_id_from_metadata
from ratelimit_rls.protos.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from tests.support.pipelines import new_pipeline, responses

OK, OVER_LIMIT = 1, 2
TOO_LONG = "x" * (MAX_ID_BYTES + 1)
RULES = b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 3}}]"


def request(*descriptors: dict[str, str]) -> Request:
    made = (Descriptor(tuple(Entry(*item) for item in one.items())) for one in descriptors)
    return Request("edge", tuple(made))


def test_id_entry_is_removed_at_any_position() -> None:
    found = extract_request_id(
        request({"user": "a", "id": "7", "path": "/"}, {"id": "8", "user": "a"}, {"user": "b"}), "id"
    )
    assert found.request == request({"user": "a", "path": "/"}, {"user": "a"}, {"user": "b"})
    assert (found.request_id, found.dropped) == (b"7", ())


def test_descriptor_with_only_the_id_is_dropped() -> None:
    found = extract_request_id(request({"id": ""}, {"user": "a"}, {"id": "ü"}), "id")
    assert (found.request, found.request_id, found.dropped) == (request({"user": "a"}), "ü".encode(), (0, 2))


def test_id_descriptor_with_a_limit_override_stays() -> None:
    own = Descriptor((Entry("id", "7"),), LimitOverride(5, Unit.MINUTE))
    found = extract_request_id(Request("edge", (own,)), "id")
    assert (found.request.descriptors, found.request_id) == ((own._replace(entries=()),), b"7")


def test_request_without_id_is_unchanged() -> None:
    assert extract_request_id(request({"user": "a"}), "id") == (request({"user": "a"}), None, ())


def test_id_that_is_too_long_is_rejected() -> None:
    with pytest.raises(BadRequest, match="257 bytes; at most 256"):
        extract_request_id(request({"id": TOO_LONG}), "id")
    assert extract_request_id(request({"id": TOO_LONG[1:]}), "id").request_id is not None


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ([("user-agent", "x"), ("x-id", "7"), ("x-id", "8")], b"7"),
        ([("x-id", b"\x00")], b"\x00"),
        ([("x-id", "")], None),
        ([], None),
    ],
)
def test_id_is_read_from_metadata(metadata: list[tuple[str, str | bytes]], found: bytes | None) -> None:
    assert request_id_from_metadata(metadata, "x-id") == found


class Harness:
    def __init__(self, entry: str = "id", purpose: Purpose = Purpose.DECIDE, **options: Any) -> None:
        rules, self.metrics = ActiveRules(), Metrics()
        tree = compile_documents({"rules.yaml": RULES}).tree
        rules.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))
        self.limiter = RateLimiter(rules, EmbeddedStore(), self.metrics, Policy(**options))
        self.codec = self.new_codec(entry, purpose)

    def new_codec(self, entry: str = "id", purpose: Purpose = Purpose.DECIDE) -> RlsCodec:
        options = ResponseOptions(headers_enabled=True)
        return RlsCodec(self.limiter, options, purpose=purpose, request_id_entry=entry)

    async def ask(self, *descriptors: dict[str, str], request_id: bytes | None = None, hits: int = 0) -> Any:
        return await send(self.codec, *descriptors, request_id=request_id, hits=hits)


async def send(codec: RlsCodec, *descriptors: dict[str, str], request_id: bytes | None = None, hits: int = 0) -> Any:
    message = RateLimitRequest(domain="edge", hits_addend=hits)
    for descriptor in descriptors:
        entries = message.descriptors.add().entries
        for key, value in descriptor.items():
            entries.add(key=key, value=value)
    ids = None if request_id is None else [request_id]
    (answer,) = await responses(new_pipeline(codec), [message.SerializeToString()], request_ids=ids)
    return RateLimitResponse.FromString(answer) if isinstance(answer, bytes) else answer


def remaining(response: Any) -> list[int]:
    return [status.limit_remaining for status in response.statuses]


async def test_retry_gets_the_same_response_and_is_counted_once() -> None:
    harness = Harness()
    first = await harness.ask({"user": "a", "id": "1"})
    assert await harness.ask({"user": "a", "id": "1"}) == first
    assert await harness.ask({"id": "1", "user": "a"}) == first
    assert remaining(await harness.ask({"user": "a", "id": "2"})) == [1]
    assert remaining(await harness.ask({"user": "a", "id": ""})) == [0]
    assert remaining(await harness.ask({"user": "b", "id": "1"})) == [2]


async def test_id_in_the_message_takes_precedence_over_metadata() -> None:
    harness = Harness()
    assert remaining(await harness.ask({"user": "a"}, request_id=b"1")) == [2]
    assert remaining(await harness.ask({"user": "a"}, request_id=b"1")) == [2]
    assert remaining(await harness.ask({"user": "a", "id": "1"}, request_id=b"2")) == [2]
    assert remaining(await harness.ask({"user": "a"}, request_id=b"2")) == [1]
    assert remaining(await harness.ask({"user": "a"})) == [0]


async def test_descriptor_with_only_the_id_has_a_status() -> None:
    harness = Harness()
    response = await harness.ask({"id": "1"}, {"user": "a"}, {"id": "1"})
    assert [status.code for status in response.statuses] == [OK] * 3
    assert [status.HasField("current_limit") for status in response.statuses] == [False, True, False]
    assert [header.value for header in response.response_headers_to_add][:2] == ["3", "2"]
    alone = await harness.ask({"id": "1"})
    assert (alone.overall_code, [status.code for status in alone.statuses]) == (OK, [OK])


async def test_descriptor_with_only_the_id_does_not_satisfy_quota_mode() -> None:
    harness = Harness(quota_mode=True)
    answers = [await harness.ask({"user": "a"}, {"id": str(number)}) for number in range(4)]
    assert [answer.overall_code for answer in answers] == [OK, OK, OK, OVER_LIMIT]


async def test_only_messages_without_ids_are_cached() -> None:
    harness = Harness()
    for number in range(20):
        await harness.ask({"user": "a", "id": str(number)})
    assert len(harness.codec.cache) == 0
    await harness.ask({"user": "a"})
    await harness.ask({"user": "a", "id": ""})
    assert len(harness.codec.cache) == 2


async def test_without_the_setting_the_id_is_an_ordinary_entry() -> None:
    harness = Harness(entry="")
    response = await harness.ask({"user": "a", "id": "1"})
    assert not response.statuses[0].HasField("current_limit")


@pytest.mark.parametrize(("entry", "request_id"), [(TOO_LONG, None), ("", TOO_LONG.encode())])
async def test_id_that_is_too_long_is_an_invalid_argument(entry: str, request_id: bytes | None) -> None:
    harness = Harness()
    answer = await harness.ask({"user": "a", "id": entry}, request_id=request_id)
    assert answer == RpcError(StatusCode.INVALID_ARGUMENT, "a request id of 257 bytes; at most 256 are taken")
    assert remaining(await harness.ask({"user": "a"})) == [2]


async def test_look_does_not_consume_the_id() -> None:
    harness = Harness()
    look, report = harness.new_codec(purpose=Purpose.LOOK), harness.new_codec(purpose=Purpose.REPORT)
    for _ in range(2):
        assert remaining(await send(look, {"user": "a", "id": "1"})) == [3]
    for _ in range(2):
        assert remaining(await send(report, {"user": "a", "id": "1"})) == [2]
    assert remaining(await send(look, {"user": "a", "id": "1"})) == [2]
