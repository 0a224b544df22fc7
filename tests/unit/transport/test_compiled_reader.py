"""The compiled reader: requests that it covers, those that it leaves to the general reader, and the memory it keeps."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.api.rls import compiled_reader, request_shapes
from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.api.rls.compiled_reader import CompiledReader, ReadRequest
from ratelimit_rls.core.plan import MAX_SHARED_HITS, Policy
from ratelimit_rls.core.storage_keys import MAX_TAG_BYTES
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.message_bounds import MessageBounds
from ratelimit_rls.protos.messages import RateLimitRequest
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics

RULES = b"""
domain: edge
descriptors:
  - key: plan
    value: free
    descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 5}}]
  - {key: user, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: tenant, value_to_metric: true, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: "x-*", rate_limit: {unit: minute, requests_per_unit: 5}}
"""


def codec_of(rules: bytes = RULES, *, bounds: MessageBounds | None = None, dynamic_metadata: bool = False) -> RlsCodec:
    active = ActiveRules()
    active.swap(compile_documents({"f": rules}).tree, digest="", files=1, loaded_at=datetime.now(UTC))
    limiter = RateLimiter(active, EmbeddedStore(), Metrics(), Policy())
    return RlsCodec(limiter, ResponseOptions(dynamic_metadata=dynamic_metadata), bounds=bounds or MessageBounds())


def reader_of(codec: RlsCodec) -> CompiledReader:
    assert codec._reader is not None
    return codec._reader


def message(*descriptors: dict[str, str], domain: str = "edge", hits: int = 0) -> bytes:
    request = RateLimitRequest(domain=domain, hits_addend=hits)
    for descriptor in descriptors:
        entries = request.descriptors.add().entries
        for key, value in descriptor.items():
            entries.add(key=key, value=value)
    return bytes(request.SerializeToString())


def read(sent: bytes) -> ReadRequest | None:
    return reader_of(codec_of()).read(sent)


def test_tags_have_the_values_that_no_rule_names() -> None:
    found = read(message({"plan": "free", "user": "alice"}, {"user": "a/b"}, {"path": "/"}, hits=3))

    assert found is not None
    assert found.tags == [b"rl:{edge/plan=free/user=alice}", b"rl:{edge/user=a%2Fb}", b""]
    assert found.shape[0] == 3
    assert found.shape[-1] == 0


def test_requests_that_differ_in_values_only_share_a_shape() -> None:
    reader = reader_of(codec_of())
    alice, bob, other = (
        reader.read(message(one)) for one in ({"user": "alice"}, {"user": "bob"}, {"plan": "free", "user": "alice"})
    )

    assert alice is not None
    assert bob is not None
    assert other is not None
    assert alice.shape == bob.shape != other.shape


def test_values_in_metrics_are_part_of_the_shape() -> None:
    reader = reader_of(codec_of())
    acme, other = reader.read(message({"tenant": "acme"})), reader.read(message({"tenant": "other"}))

    assert acme is not None
    assert other is not None
    assert acme.shape != other.shape


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x0a",
        message(),
        message({"user": "alice"}, domain="unknown"),
        message({"user": ""}),
        message({"user": "\N{SNOWMAN}"}),
        message({"user": "x" * 128}),
        message({"user": "alice"}, hits=MAX_SHARED_HITS + 1),
        message({"x-anything": "1"}),
        message({"user": "alice"})[:-1],
        message({"user": "alice"}) + b"\x18",
        message({"user": "alice"}) + b"\x18\x01\x18\x01",
        # An entry that ends behind its descriptor.
        b"\x0a\x04edge\x12\x08\x0a\x0b\x0a\x04user\x12\x03bob",
    ],
)
def test_other_requests_are_left_to_the_general_reader(sent: bytes) -> None:
    assert read(sent) is None


def test_tag_that_must_be_shortened_is_left_to_the_general_reader() -> None:
    rules = b"domain: %s\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 5}}]" % (b"%" * 120)
    longest = MAX_TAG_BYTES - len("%25") * 120 - len("/user=")
    longest_escaped = "%" * (longest // 3) + "a" * (longest % 3)
    reader = reader_of(codec_of(rules.replace(b"%" * 120, b'"' + b"%" * 120 + b'"')))

    fits = reader.read(message({"user": longest_escaped}, domain="%" * 120))
    assert fits is not None
    assert len(fits.tags[0]) == len("rl:{}") + MAX_TAG_BYTES
    assert reader.read(message({"user": longest_escaped + "a"}, domain="%" * 120)) is None


def test_bounds_of_messages_hold() -> None:
    reader = reader_of(codec_of(bounds=MessageBounds(descriptors=2)))

    assert reader.read(message({"user": "a"}, {"user": "b"})) is not None
    assert reader.read(message({"user": "a"}, {"user": "b"}, {"user": "c"})) is None


def test_unknown_keys_are_not_kept() -> None:
    reader = reader_of(codec_of())
    (paths,) = reader._domains.values()
    for number in range(100):
        reader.read(message({f"unknown{number}": "1"}))
        reader.read(message({f"x-{number}": "1"}))

    assert paths._root.steps == {}


def test_descriptors_read_lately_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_reader, "MAX_DESCRIPTORS", 10)
    monkeypatch.setattr(compiled_reader, "MIN_DESCRIPTORS", 2)
    reader = reader_of(codec_of())
    (paths,) = reader._domains.values()
    for number in range(100):
        reader.read(message({"user": "frequent"}))
        reader.read(message({"user": f"user{number}"}))

    kept = paths.descriptors | paths._older
    assert 10 <= len(kept) <= 20
    assert message({"user": "frequent"})[8:] in kept


def test_values_of_exact_descriptors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_reader, "MAX_PATHS", 10)
    values = b"".join(
        b"  - {key: k, value: v%d, rate_limit: {unit: minute, requests_per_unit: 5}}\n" % number for number in range(50)
    )
    reader = reader_of(codec_of(b"domain: edge\ndescriptors:\n" + values))
    (paths,) = reader._domains.values()
    tags = [reader.read(message({"k": f"v{number}"})) for number in range(50)]

    assert [one.tags for one in tags if one] == [[b"rl:{edge/k=v%d}" % number] for number in range(50)]
    (level,) = paths._root.steps.values()
    assert isinstance(level, compiled_reader._Level)
    assert len(level._exact) == 10


def test_learned_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_shapes, "MAX_SHAPES_BYTES", 20_000)
    codec, sizes = codec_of(), []
    for number in range(100):
        codec.decode(message({"tenant": f"tenant{number}"}))
        sizes.append(len(codec._shapes._learned))

    assert 5 < max(sizes) < 15


def test_request_is_cached_when_it_is_repeated() -> None:
    codec = codec_of()
    codec.decode(message({"user": "first"}))  # from it, the shape is learned
    before = len(codec.cache)
    for _ in range(2):
        assert len(codec.cache) == before
        codec.decode(message({"user": "alice"}))

    assert len(codec.cache) == before + 1


def test_nothing_is_compiled_where_responses_describe_requests() -> None:
    assert codec_of(dynamic_metadata=True)._reader is None


def test_domain_with_credentials_in_entries_is_left_to_the_general_reader() -> None:
    identity = (
        b"identity:\n  credentials: [{kind: api_key, header: x-api-key}]\n  entries: [{key: api_key, kind: api_key}]\n"
    )
    codec = codec_of(RULES.replace(b"descriptors:", identity + b"descriptors:", 1))

    assert reader_of(codec).read(message({"user": "alice"})) is None
