"""ExtAuthzCodec: domain selection, caching and responses."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from ratelimit_rls.api.ext_authz.codec import ExtAuthzCodec
from ratelimit_rls.api.ext_authz.decode import attributes, parse
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline.batch import DelayedResponse
from ratelimit_rls.pipeline.limiter import PlannedCall, RateLimiter
from ratelimit_rls.pipeline.message_bounds import MessageBounds
from ratelimit_rls.pipeline.request_cache import CacheBudget
from ratelimit_rls.protos.messages import CheckRequest, CheckResponse
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.telemetry.metrics import Metrics
from tests.support.pipelines import new_pipeline, responses

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
    """Counts how often a request was prepared."""

    def __init__(self, *documents: str) -> None:
        self.snapshot, self.metrics = ActiveRules(), Metrics()
        super().__init__(self.snapshot, EmbeddedStore(), self.metrics, Policy())
        self.prepared = 0
        self.load(*documents)

    def load(self, *documents: str) -> None:
        tree = compile_documents({f"{number}.yaml": text.encode() for number, text in enumerate(documents)}).tree
        self.snapshot.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))

    def prepare(self, request: Any) -> PlannedCall:
        self.prepared += 1
        return super().prepare(request)


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


async def ask(codec: ExtAuthzCodec, *messages: bytes) -> list[Any]:
    """Decode responses; errors are returned as they are."""
    assert isinstance(codec.limiter, Limiter)
    answers = await responses(new_pipeline(codec, codec.limiter.metrics), messages)
    return [CheckResponse.FromString(answer) if isinstance(answer, bytes) else answer for answer in answers]


def lines(headers: Any) -> dict[str, str]:
    assert {header.append_action for header in headers} <= {OVERWRITE}
    return {header.header.key: header.header.value for header in headers}


async def test_allowed_request_has_client_and_upstream_headers() -> None:
    limiter = Limiter(RULES)
    (answer,) = await ask(ExtAuthzCodec(limiter), message(x_user="ann"))
    assert answer.HasField("status")
    assert answer.status.code == 0
    assert answer.WhichOneof("http_response") == "ok_response"
    sent = lines(answer.ok_response.response_headers_to_add)
    assert (sent["x-ratelimit-limit"], sent["x-ratelimit-remaining"]) == ("2", "1")
    assert sent["x-ratelimit-rule"] == "edge.user"
    assert lines(answer.ok_response.headers) == {"x-ratelimit-rule": "edge.user", "x-left-by": "per user of edge"}
    assert set(answer.ok_response.headers_to_remove) == RULE_LOOKALIKES | LEFT_BY_LOOKALIKES
    rule = answer.dynamic_metadata["rule"]
    assert (rule["path"], rule["window"], rule["limit"]) == ("edge.user", "hour", "per user")
    assert answer.dynamic_metadata["metadata"]["tier"] == "gold"


RULE_LOOKALIKES = {"x_ratelimit-rule", "x-ratelimit_rule", "x_ratelimit_rule"}
LEFT_BY_LOOKALIKES = {"x_left-by", "x-left_by", "x_left_by"}


async def test_denied_request_has_status_headers_and_body() -> None:
    *_, answer = await ask(ExtAuthzCodec(Limiter(RULES)), *[message(x_user="ann", x_request_id='a"b')] * 3)
    assert answer.status.code == 8
    assert answer.WhichOneof("http_response") == "denied_response"
    denied = answer.denied_response
    assert denied.status.code == 503
    sent = lines(denied.headers)
    assert (sent["x-ratelimit-remaining"], sent["x-why"], sent["content-type"]) == (
        "0",
        "edge.user",
        "application/json",
    )
    assert int(sent["retry-after"]) > 0
    assert "grpc-status" not in sent
    assert '"request_id":"a\\"b"' in denied.body
    assert answer.dynamic_metadata["rule"]["path"] == "edge.user"


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto"])
async def test_grpc_client_gets_a_grpc_status(content_type: str) -> None:
    *_, answer = await ask(ExtAuthzCodec(Limiter(RULES)), *[message(x_user="ann", content_type=content_type)] * 3)
    assert lines(answer.denied_response.headers)["grpc-status"] == "8"


@pytest.mark.parametrize(
    "sent", [message(), message(x_user=""), message(context={"ratelimit_domain": "nowhere"}, x_user="ann")]
)
async def test_request_without_a_limit_is_allowed_and_headers_are_removed(sent: bytes) -> None:
    (answer,) = await ask(ExtAuthzCodec(Limiter(RULES)), sent)
    assert answer.status.code == 0
    assert lines(answer.ok_response.headers) == lines(answer.ok_response.response_headers_to_add) == {}
    assert "x-ratelimit-rule" in answer.ok_response.headers_to_remove
    assert not answer.HasField("dynamic_metadata")


async def test_unlimited_rule_sends_no_numbers() -> None:
    (answer,) = await ask(ExtAuthzCodec(Limiter(RULES)), message(x_user="vip"))
    assert answer.status.code == 0
    removed = set(answer.ok_response.headers_to_remove)
    assert removed == {"x-ratelimit-rule", "x-left-by"} | RULE_LOOKALIKES | LEFT_BY_LOOKALIKES


async def test_domain_selection() -> None:
    limiter = Limiter(RULES, PLAIN + MAPPED)
    named = ExtAuthzCodec(limiter)
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
    assert isinstance(unnamed, RpcError)
    assert unnamed.code is StatusCode.INVALID_ARGUMENT
    assert "several domains have 'ext_authz' (edge, plain)" in unnamed.message
    assert "RLS_EXT_AUTHZ_DOMAIN" in unnamed.message
    (chosen,) = await ask(ExtAuthzCodec(limiter, default_domain="plain"), message(x_user="bob"))
    assert chosen.dynamic_metadata["rule"]["path"] == "plain.user"
    (other,) = await ask(
        ExtAuthzCodec(limiter, default_domain="plain"), message(context={"ratelimit_domain": "edge"}, x_user="b")
    )
    assert other.dynamic_metadata["rule"]["path"] == "edge.user"


async def test_missing_mapping_error_explains_the_fix() -> None:
    limiter = Limiter(PLAIN)
    (nothing,) = await ask(ExtAuthzCodec(limiter), message(x_user="ann"))
    assert isinstance(nothing, RpcError)
    assert nothing.code is StatusCode.UNAVAILABLE
    assert "ext_authz: {descriptors: [" in nothing.message
    limiter.load(RULES, PLAIN)
    (misnamed,) = await ask(ExtAuthzCodec(limiter, default_domain="plain"), message(x_user="ann"))
    assert isinstance(misnamed, RpcError)
    assert "RLS_EXT_AUTHZ_DOMAIN is 'plain'" in misnamed.message


async def test_each_call_of_a_batch_gets_its_own_response() -> None:
    limiter = Limiter(RULES)
    garbage, first, second, third = await ask(ExtAuthzCodec(limiter), b"\xff", *[message(x_user="ann")] * 3)
    assert isinstance(garbage, RpcError)
    assert garbage.code is StatusCode.INVALID_ARGUMENT
    assert [answer.status.code for answer in (first, second, third)] == [0, 0, 8]
    limiter.snapshot.current = None
    (unready,) = await ask(ExtAuthzCodec(limiter), message(x_user="ann"))
    assert unready == RpcError(StatusCode.UNAVAILABLE, "no rate limit configuration loaded")


async def test_request_is_prepared_once_per_descriptors_and_rules() -> None:
    limiter = Limiter(RULES)
    authz = ExtAuthzCodec(limiter)
    await ask(authz, *[message(path=f"/{number}", x_user="ann", x_request_id=str(number)) for number in range(5)])
    assert limiter.prepared == 1
    await ask(authz, message(x_user="bob"))
    assert limiter.prepared == 2
    limiter.load(RULES)
    await ask(authz, message(x_user="ann"))
    assert limiter.prepared == 3


async def test_cache_key_includes_every_part_of_the_descriptors() -> None:
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
    authz = ExtAuthzCodec(limiter)
    await ask(authz, *[message(**kind) for kind in kinds])
    assert limiter.prepared == len(authz.cache) == len(kinds)


async def test_cache_size_is_limited() -> None:
    limiter = Limiter(RULES)
    authz = ExtAuthzCodec(limiter, budget=CacheBudget(10_000))
    for start in range(0, 500, 50):
        await ask(authz, *[message(x_user=f"user-{number}") for number in range(start, start + 50)])
    assert 0 < len(authz.cache) < 40


async def test_throttled_request_is_delayed() -> None:
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
    first, second = await responses(new_pipeline(ExtAuthzCodec(Limiter(rules))), [message(x_user="ann")] * 2)
    assert isinstance(first, bytes)
    assert isinstance(second, DelayedResponse)
    assert CheckResponse.FromString(second.message).status.code == 0


def test_decoding_reads_all_attributes_of_a_mapping() -> None:
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


def test_decoding_reads_raw_headers() -> None:
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


def test_missing_http_or_unix_socket_peer_has_empty_attributes() -> None:
    request = CheckRequest()
    request.attributes.source.address.pipe.path = "/run/client.sock"
    read = attributes(parse(request.SerializeToString()), ())
    assert (read.peer, read.path, dict(read.headers)) == ("", "", {})
    assert attributes(parse(b""), ()).method == ""


async def test_oversized_check_is_rejected_and_recorded_as_abuse() -> None:
    limiter = Limiter(RULES)
    bounds = MessageBounds(check_fields=100, message_bytes=5000)
    many = {f"x-{number}": "" for number in range(100)}

    fields, long_value, fits = await ask(
        ExtAuthzCodec(limiter, bounds=bounds),
        message(**many),  # type: ignore[arg-type]
        message(x_user="u" * 5001),
        message(x_user="u" * 5000),
    )

    assert (fields.code, fields.reason) == (StatusCode.INVALID_ARGUMENT, Abuse.MESSAGE_TOO_COMPLEX)
    assert "at most 100 fields" in fields.message
    assert (long_value.code, long_value.reason) == (StatusCode.INVALID_ARGUMENT, Abuse.MESSAGE_TOO_COMPLEX)
    assert "5001 characters; at most 5000" in long_value.message
    assert fits.status.code == 0
    assert limiter.prepared == 1
