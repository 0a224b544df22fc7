"""Request ids: where they are found, that they count for nothing else, and what they may be."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest

from ratelimit_rls.core.model import Descriptor, Entry, Override, Purpose, Request, Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.grpc.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.grpc.request_id import LONGEST_ID_BYTES, identified, sent_along
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

OK, OVER_LIMIT = 1, 2
TOO_LONG = "x" * (LONGEST_ID_BYTES + 1)
RULES = b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 3}}]"


def request(*descriptors: dict[str, str]) -> Request:
    made = (Descriptor(tuple(Entry(*item) for item in one.items())) for one in descriptors)
    return Request("edge", tuple(made))


def test_an_entry_with_the_id_is_taken_out_wherever_it_stands() -> None:
    found = identified(request({"user": "a", "id": "7", "path": "/"}, {"id": "8", "user": "a"}, {"user": "b"}), "id")
    assert found.request == request({"user": "a", "path": "/"}, {"user": "a"}, {"user": "b"})
    assert (found.request_id, found.dropped) == (b"7", ())


def test_a_descriptor_of_nothing_but_the_id_is_dropped() -> None:
    found = identified(request({"id": ""}, {"user": "a"}, {"id": "ü"}), "id")
    assert (found.request, found.request_id, found.dropped) == (request({"user": "a"}), "ü".encode(), (0, 2))


def test_one_that_brings_a_limit_stays() -> None:
    own = Descriptor((Entry("id", "7"),), Override(5, Unit.MINUTE))
    found = identified(Request("edge", (own,)), "id")
    assert (found.request.descriptors, found.request_id) == ((own._replace(entries=()),), b"7")


def test_without_one_the_request_is_as_it_was() -> None:
    assert identified(request({"user": "a"}), "id") == (request({"user": "a"}), None, ())


def test_one_that_is_too_long_is_refused() -> None:
    with pytest.raises(BadRequest, match="257 bytes; at most 256"):
        identified(request({"id": TOO_LONG}), "id")
    assert identified(request({"id": TOO_LONG[1:]}), "id").request_id is not None


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ([("user-agent", "x"), ("x-id", "7"), ("x-id", "8")], b"7"),
        ([("x-id", b"\x00")], b"\x00"),
        ([("x-id", "")], None),
        ([], None),
    ],
)
def test_metadata_has_it_under_its_key(metadata: list[tuple[str, str | bytes]], found: bytes | None) -> None:
    assert sent_along(metadata, "x-id") == found


class House:
    def __init__(self, entry: str = "id", purpose: Purpose = Purpose.DECIDE, **options: Any) -> None:
        rules, self.metrics = Rules(), Metrics()
        tree = compile_documents({"rules.yaml": RULES}).tree
        rules.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))
        self.limiter = RateLimiter(rules, EmbeddedStore(), self.metrics, Policy(**options))
        self.door = self.new_door(entry, purpose)

    def new_door(self, entry: str = "id", purpose: Purpose = Purpose.DECIDE) -> RlsDoor:
        options = AnswerOptions(headers_enabled=True)
        return RlsDoor(
            self.limiter, self.metrics, options, room=WaitingRoom(1, 0.003), purpose=purpose, request_id_entry=entry
        )

    async def ask(self, *descriptors: dict[str, str], request_id: bytes | None = None, hits: int = 0) -> Any:
        return await asked(self.door, *descriptors, request_id=request_id, hits=hits)


async def asked(door: RlsDoor, *descriptors: dict[str, str], request_id: bytes | None = None, hits: int = 0) -> Any:
    message = RateLimitRequest(domain="edge", hits_addend=hits)
    for descriptor in descriptors:
        entries = message.descriptors.add().entries
        for key, value in descriptor.items():
            entries.add(key=key, value=value)
    ids = None if request_id is None else [request_id]
    (answer,) = await door.ask([message.SerializeToString()], [inf], ids).answers()
    return RateLimitResponse.FromString(answer) if isinstance(answer, bytes) else answer


def left(response: Any) -> list[int]:
    return [status.limit_remaining for status in response.statuses]


async def test_a_retry_is_told_what_was_told_before_and_counts_once() -> None:
    house = House()
    first = await house.ask({"user": "a", "id": "1"})
    assert await house.ask({"user": "a", "id": "1"}) == first
    assert await house.ask({"id": "1", "user": "a"}) == first
    assert left(await house.ask({"user": "a", "id": "2"})) == [1]
    assert left(await house.ask({"user": "a", "id": ""})) == [0]
    assert left(await house.ask({"user": "b", "id": "1"})) == [2]


async def test_an_id_in_metadata_does_the_same_and_the_message_s_own_goes_before_it() -> None:
    house = House()
    assert left(await house.ask({"user": "a"}, request_id=b"1")) == [2]
    assert left(await house.ask({"user": "a"}, request_id=b"1")) == [2]
    assert left(await house.ask({"user": "a", "id": "1"}, request_id=b"2")) == [2]
    assert left(await house.ask({"user": "a"}, request_id=b"2")) == [1]
    assert left(await house.ask({"user": "a"})) == [0]


async def test_every_descriptor_has_its_status_though_one_was_only_the_id() -> None:
    house = House()
    response = await house.ask({"id": "1"}, {"user": "a"}, {"id": "1"})
    assert [status.code for status in response.statuses] == [OK] * 3
    assert [status.HasField("current_limit") for status in response.statuses] == [False, True, False]
    assert [header.value for header in response.response_headers_to_add][:2] == ["3", "2"]
    alone = await house.ask({"id": "1"})
    assert (alone.overall_code, [status.code for status in alone.statuses]) == (OK, [OK])


async def test_a_descriptor_that_was_only_the_id_is_no_quota_that_passes() -> None:
    house = House(quota_mode=True)
    answers = [await house.ask({"user": "a"}, {"id": str(number)}) for number in range(4)]
    assert [answer.overall_code for answer in answers] == [OK, OK, OK, OVER_LIMIT]


async def test_messages_with_ids_are_not_kept_and_those_without_are() -> None:
    house = House()
    for number in range(20):
        await house.ask({"user": "a", "id": str(number)})
    assert len(house.door.cache) == 0
    await house.ask({"user": "a"})
    await house.ask({"user": "a", "id": ""})
    assert len(house.door.cache) == 2


async def test_without_the_setting_it_is_an_entry_like_any_other() -> None:
    house = House(entry="")
    response = await house.ask({"user": "a", "id": "1"})
    assert not response.statuses[0].HasField("current_limit")


@pytest.mark.parametrize(("entry", "request_id"), [(TOO_LONG, None), ("", TOO_LONG.encode())])
async def test_an_id_that_is_too_long_is_an_invalid_argument(entry: str, request_id: bytes | None) -> None:
    house = House()
    answer = await house.ask({"user": "a", "id": entry}, request_id=request_id)
    assert answer == Failure(FailureCode.INVALID_ARGUMENT, "a request id of 257 bytes; at most 256 are taken")
    assert left(await house.ask({"user": "a"})) == [2]


async def test_whoever_only_looks_uses_no_id_up() -> None:
    house = House()
    look, report = house.new_door(purpose=Purpose.LOOK), house.new_door(purpose=Purpose.REPORT)
    for _ in range(2):
        assert left(await asked(look, {"user": "a", "id": "1"})) == [3]
    for _ in range(2):
        assert left(await asked(report, {"user": "a", "id": "1"})) == [2]
    assert left(await asked(look, {"user": "a", "id": "1"})) == [2]
