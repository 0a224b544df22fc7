"""The door for Check on its own: which domain decides, what is kept, and what an answer says."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest

from ratelimit_rls.core.plan import Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import Call, RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.authz_decode import attributes, parse
from ratelimit_rls.transport.grpc.cache import Budget
from ratelimit_rls.transport.grpc.door import Failure, FailureCode, Held
from ratelimit_rls.transport.grpc.ext_authz import ExtAuthzDoor
from ratelimit_rls.transport.grpc.messages import CheckRequest, CheckResponse
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

OVERWRITE = 2

RULES = """\
domain: edge
answer: {headers: [x-ratelimit, retry-after, rule]}
deny: {format: json, headers: {X-Why: "${rule}"}, status: 503}
ext_authz:
  descriptors:
    - entries: [{key: user, header: x-user}]
  upstream_headers: {X-Left-By: "${name} of ${domain}"}
descriptors:
  - key: user
    metadata: {tier: gold}
    rate_limit: {unit: hour, requests_per_unit: 2, name: "per user"}
  - {key: user, value: vip, rate_limit: {unlimited: true}}
"""
PLAIN = """\
domain: plain
descriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 1}}]
"""
MAPPED = """\
ext_authz:
  descriptors: [{entries: [{key: user, header: x-user}]}]
"""


class Limiter(RateLimiter):
    """Counts how often a request had to be worked out."""

    def __init__(self, *documents: str) -> None:
        self.snapshot, self.metrics = Rules(), Metrics()
        super().__init__(self.snapshot, EmbeddedStore(), self.metrics, Policy())
        self.prepared = 0
        self.load(*documents)

    def load(self, *documents: str) -> None:
        tree = compile_documents({f"{number}.yaml": text.encode() for number, text in enumerate(documents)}).tree
        self.snapshot.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))

    def prepare(self, request: Any) -> Call:
        self.prepared += 1
        return super().prepare(request)


def door(limiter: Limiter, **more: Any) -> ExtAuthzDoor:
    return ExtAuthzDoor(limiter, limiter.metrics, room=WaitingRoom(10, 0.003), **more)


def message(path: str = "/", context: Mapping[str, str] | None = None, **headers: str) -> bytes:
    request = CheckRequest()
    request.attributes.source.address.socket_address.address = "192.0.2.1"
    http = request.attributes.request.http
    http.method, http.path = "GET", path
    for name, value in headers.items():
        http.headers[name.replace("_", "-")] = value
    for name, value in (context or {}).items():
        request.attributes.context_extensions[name] = value
    return bytes(request.SerializeToString())


async def ask(door: ExtAuthzDoor, *messages: bytes) -> list[Any]:
    """Responses where there are some."""
    answers = await door.ask(messages, [inf] * len(messages)).answers()
    return [CheckResponse.FromString(answer) if isinstance(answer, bytes) else answer for answer in answers]


def lines(headers: Any) -> dict[str, str]:
    assert {header.append_action for header in headers} <= {OVERWRITE}
    return {header.header.key: header.header.value for header in headers}


async def test_an_allowed_request_is_told_what_it_has_left_and_so_is_the_upstream() -> None:
    limiter = Limiter(RULES)
    (answer,) = await ask(door(limiter), message(x_user="ann"))
    assert answer.HasField("status")
    assert answer.status.code == 0
    assert answer.WhichOneof("http_response") == "ok_response"
    told = lines(answer.ok_response.response_headers_to_add)
    assert (told["x-ratelimit-limit"], told["x-ratelimit-remaining"]) == ("2", "1")
    assert told["x-ratelimit-rule"] == "edge.user"
    assert lines(answer.ok_response.headers) == {"x-ratelimit-rule": "edge.user", "x-left-by": "per user of edge"}
    assert list(answer.ok_response.headers_to_remove) == []
    rule = answer.dynamic_metadata["rule"]
    assert (rule["path"], rule["window"], rule["limit"]) == ("edge.user", "hour", "per user")
    assert answer.dynamic_metadata["metadata"]["tier"] == "gold"


async def test_a_refused_request_is_told_why_in_status_headers_and_body() -> None:
    *_, answer = await ask(door(Limiter(RULES)), *[message(x_user="ann", x_request_id='a"b')] * 3)
    assert answer.status.code == 8
    assert answer.WhichOneof("http_response") == "denied_response"
    denied = answer.denied_response
    assert denied.status.code == 503
    told = lines(denied.headers)
    assert (told["x-ratelimit-remaining"], told["x-why"], told["content-type"]) == (
        "0",
        "edge.user",
        "application/json",
    )
    assert int(told["retry-after"]) > 0
    assert "grpc-status" not in told
    assert '"request_id":"a\\"b"' in denied.body
    assert answer.dynamic_metadata["rule"]["path"] == "edge.user"


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto"])
async def test_a_grpc_caller_is_told_its_own_code(content_type: str) -> None:
    *_, answer = await ask(door(Limiter(RULES)), *[message(x_user="ann", content_type=content_type)] * 3)
    assert lines(answer.denied_response.headers)["grpc-status"] == "8"


@pytest.mark.parametrize(
    "sent", [message(), message(x_user=""), message(context={"ratelimit_domain": "nowhere"}, x_user="ann")]
)
async def test_without_a_limit_the_request_passes_and_nothing_is_said_in_our_name(sent: bytes) -> None:
    (answer,) = await ask(door(Limiter(RULES)), sent)
    assert answer.status.code == 0
    assert lines(answer.ok_response.headers) == lines(answer.ok_response.response_headers_to_add) == {}
    assert "x-ratelimit-rule" in answer.ok_response.headers_to_remove
    assert not answer.HasField("dynamic_metadata")


async def test_unlimited_has_no_numbers_to_tell() -> None:
    (answer,) = await ask(door(Limiter(RULES)), message(x_user="vip"))
    assert answer.status.code == 0
    assert list(answer.ok_response.headers_to_remove) == ["x-ratelimit-rule", "x-left-by"]


async def test_which_domain_decides() -> None:
    limiter = Limiter(RULES, PLAIN + MAPPED)
    named = door(limiter)
    edge, plain, nowhere, unnamed = await ask(
        named,
        message(context={"ratelimit_domain": "edge"}, x_user="ann"),
        message(context={"ratelimit_domain": "plain"}, x_user="ann"),
        message(context={"ratelimit_domain": "nowhere"}, x_user="ann"),
        message(x_user="ann"),
    )
    paths = [answer.dynamic_metadata["rule"]["path"] for answer in (edge, plain)]
    assert paths == ["edge.user", "plain.user"]
    assert nowhere.status.code == 0
    assert isinstance(unnamed, Failure)
    assert unnamed.code is FailureCode.INVALID_ARGUMENT
    assert "several domains have 'ext_authz' (edge, plain)" in unnamed.message
    assert "RLS_EXT_AUTHZ_DOMAIN" in unnamed.message
    (chosen,) = await ask(door(limiter, default_domain="plain"), message(x_user="bob"))
    assert chosen.dynamic_metadata["rule"]["path"] == "plain.user"
    (other,) = await ask(
        door(limiter, default_domain="plain"), message(context={"ratelimit_domain": "edge"}, x_user="b")
    )
    assert other.dynamic_metadata["rule"]["path"] == "edge.user"


async def test_a_missing_mapping_is_a_failure_that_says_what_to_write() -> None:
    limiter = Limiter(PLAIN)
    (nothing,) = await ask(door(limiter), message(x_user="ann"))
    assert isinstance(nothing, Failure)
    assert nothing.code is FailureCode.UNAVAILABLE
    assert "ext_authz: {descriptors: [" in nothing.message
    limiter.load(RULES, PLAIN)
    (misnamed,) = await ask(door(limiter, default_domain="plain"), message(x_user="ann"))
    assert isinstance(misnamed, Failure)
    assert "RLS_EXT_AUTHZ_DOMAIN is 'plain'" in misnamed.message


async def test_each_call_of_a_batch_gets_its_own_answer() -> None:
    limiter = Limiter(RULES)
    garbage, first, second, third = await ask(door(limiter), b"\xff", *[message(x_user="ann")] * 3)
    assert isinstance(garbage, Failure)
    assert garbage.code is FailureCode.INVALID_ARGUMENT
    assert [answer.status.code for answer in (first, second, third)] == [0, 0, 8]
    limiter.snapshot.current = None
    (unready,) = await ask(door(limiter), message(x_user="ann"))
    assert unready == Failure(FailureCode.UNAVAILABLE, "no rate limit configuration loaded")


async def test_a_request_is_worked_out_once_per_its_descriptors_for_as_long_as_the_rules_stand() -> None:
    limiter = Limiter(RULES)
    asked = door(limiter)
    await ask(asked, *[message(path=f"/{number}", x_user="ann", x_request_id=str(number)) for number in range(5)])
    assert limiter.prepared == 1
    await ask(asked, message(x_user="bob"))
    assert limiter.prepared == 2
    limiter.load(RULES)
    await ask(asked, message(x_user="ann"))
    assert limiter.prepared == 3


async def test_what_is_kept_is_told_apart_by_every_part_of_the_descriptors() -> None:
    rules = """\
domain: edge
ext_authz:
  descriptors:
    - entries: [{key: a, header: x-a, default: "-"}, {key: b, header: x-b, default: "-"}]
    - entries: [{key: a, header: x-c}]
      hits: 1
    - entries: [{key: a, header: x-d}]
      hits: 2
descriptors: [{key: a, rate_limit: {unit: hour, requests_per_unit: 100}}]
"""
    limiter = Limiter(rules)
    kinds: list[dict[str, Any]] = [
        {"x_a": "1", "x_b": "2"},
        {"x_a": "1,1:b1:2"},
        {"x_a": "1", "x_b": "2,1:bX"},
        {"x_a": "1,1:b2", "x_b": "X"},
        {"x_a": "12"},
        {"x_b": "12"},
        {"x_c": "1"},
        {"x_d": "1"},
        {"x_c": "1", "x_d": "1"},
    ]
    asked = door(limiter)
    await ask(asked, *[message(**kind) for kind in kinds])
    assert limiter.prepared == len(asked.cache) == len(kinds)


async def test_the_cache_is_bounded() -> None:
    limiter = Limiter(RULES)
    asked = door(limiter, budget=Budget(10_000))
    for start in range(0, 500, 50):
        await ask(asked, *[message(x_user=f"user-{number}") for number in range(start, start + 50)])
    assert 0 < len(asked.cache) < 40


async def test_a_throttled_request_is_held() -> None:
    rules = (
        MAPPED
        + """\
domain: edge
descriptors:
  - key: user
    action: throttle
    max_delay: 1m
    rate_limit: {unit: minute, requests_per_unit: 2, algorithm: gcra, burst: 1}
"""
    )
    first, second = await door(Limiter(rules)).ask([message(x_user="ann")] * 2, [inf, inf]).answers()
    assert isinstance(first, bytes)
    assert isinstance(second, Held)
    assert CheckResponse.FromString(second.answer).status.code == 0


def test_decoding_reads_what_a_mapping_can_ask_for() -> None:
    request = CheckRequest.FromString(message("/a/b?c=d?e", context={"name": "route"}, x_user="ann"))
    filters = request.attributes.metadata_context.filter_metadata
    filters["jwt"].update(
        {"sub": "ann", "age": 42, "share": 0.5, "admin": True, "roles": ["a"], "none": None, "deep": {"er": {"x": "y"}}}
    )
    wanted = [
        ("jwt", "sub"),
        ("jwt", "age"),
        ("jwt", "share"),
        ("jwt", "admin"),
        ("jwt", "deep", "er", "x"),
        ("jwt", "roles"),
        ("jwt", "none"),
        ("jwt", "deep"),
        ("jwt", "sub", "x"),
        ("jwt", "deep", "x", "er"),
        ("other", "sub"),
    ]
    read = attributes(parse(request.SerializeToString()), wanted)
    assert (read.path, read.query, read.method, read.peer) == ("/a/b", "c=d?e", "GET", "192.0.2.1")
    assert (read.headers["x-user"], read.context["name"]) == ("ann", "route")
    assert read.metadata == {
        ("jwt", "sub"): "ann",
        ("jwt", "age"): "42",
        ("jwt", "share"): "0.5",
        ("jwt", "admin"): "true",
        ("jwt", "deep", "er", "x"): "y",
    }


def test_decoding_reads_raw_headers_too() -> None:
    request = CheckRequest()
    headers = request.attributes.request.http.header_map.headers
    for value in (b"192.0.2.1", b"192.0.2.2"):
        headers.add(key="x-forwarded-for", raw_value=value)
        headers.add(key="x-empty")
    headers.add(key="x-odd", raw_value=b"a\xff")
    headers.add(key="x-forwarded-for", value="192.0.2.3")
    read = attributes(parse(request.SerializeToString()), ())
    assert read.headers == {
        "x-forwarded-for": "192.0.2.1,192.0.2.2,192.0.2.3",
        "x-empty": ",",
        "x-odd": "a\\xff",
    }


def test_a_connection_without_http_and_one_from_a_unix_socket_have_empty_attributes() -> None:
    request = CheckRequest()
    request.attributes.source.address.pipe.path = "/run/client.sock"
    read = attributes(parse(request.SerializeToString()), ())
    assert (read.peer, read.path, dict(read.headers)) == ("", "", {})
    assert attributes(parse(b""), ()).method == ""
