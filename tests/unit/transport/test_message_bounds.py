"""Bounds of messages: accepted at each bound, and rejected beyond it before protobuf decodes them."""

from __future__ import annotations

import zlib
from math import inf
from typing import Any

import pytest

from ratelimit_rls.api.ext_authz import decode as authz_decode
from ratelimit_rls.api.limiter import decode as limiter_read
from ratelimit_rls.api.rls import decode
from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.errors import BadRequest, TooComplex
from ratelimit_rls.h2.call_headers import CallHeaders, CallHeadersParser
from ratelimit_rls.h2.request_stream import UnaryRequest
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline.message_bounds import MAX_LIMITER_FIELDS, MAX_MESSAGE_BYTES, MessageBounds
from ratelimit_rls.protos.messages import CheckRequest, LimiterCheckRequest, RateLimitRequest
from ratelimit_rls.protos.scan import FieldBound, FieldShape, MessageScan, message_shape
from ratelimit_rls.telemetry.abuse import Abuse

METHOD = "/a.Service/Method"
BOUNDS = MessageBounds(descriptors=4, entries=8, entry_bytes=200, message_bytes=4000, check_fields=40)

EMPTY_DESCRIPTOR = b"\x12\x00"
EMPTY_ENTRY = b"\x0a\x00"
GROUP, GROUP_END = b"\x7b", b"\x7c"


def rate_limit_request(descriptors: int, entries: int = 1, value: str = "v") -> Any:
    request = RateLimitRequest(domain="edge")
    for _ in range(descriptors):
        descriptor = request.descriptors.add()
        for _ in range(entries):
            descriptor.entries.add(key="k", value=value)
    return request


def delimited(tag: int, content: bytes) -> bytes:
    length = len(content)
    size = bytes([length]) if length < 0x80 else bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14])
    return bytes([tag]) + size + content


class CountedBytes(bytes):
    """Message that counts its element accesses, as a measure of work that does not depend on time."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        CountedBytes.looks += 1
        return super().__getitem__(key)


@pytest.fixture
def no_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if protobuf decodes anything."""
    for module, name in ((decode, "RateLimitRequest"), (authz_decode, "CheckRequest")):
        monkeypatch.setattr(module, name, type("None", (), {"DESCRIPTOR": getattr(module, name).DESCRIPTOR}))


@pytest.fixture(autouse=True)
def looks() -> None:
    CountedBytes.looks = 0


class TestRateLimitRequests:
    PLAIN, WITH_HITS, NOT_ASCII = "plain", "hits of descriptors", "not ASCII"

    def message(self, kind: str, descriptors: int, entries: int) -> bytes:
        request = rate_limit_request(descriptors, entries, "ä" if kind == self.NOT_ASCII else "v")
        if kind == self.WITH_HITS:
            for descriptor in request.descriptors:
                descriptor.hits_addend.value = 300
        return bytes(request.SerializeToString())

    @pytest.mark.parametrize("kind", [PLAIN, WITH_HITS, NOT_ASCII])
    def test_descriptors(self, kind: str) -> None:
        assert len(decode.decode(self.message(kind, 4, 1), bounds=BOUNDS).descriptors) == 4

        with pytest.raises(
            TooComplex, match=r"at most 4 descriptors are allowed in one message \(RLS_MAX_DESCRIPTORS\)"
        ):
            decode.decode(self.message(kind, 5, 1), bounds=BOUNDS)

    @pytest.mark.parametrize("kind", [PLAIN, WITH_HITS, NOT_ASCII])
    def test_entries_of_all_descriptors(self, kind: str) -> None:
        assert len(decode.decode(self.message(kind, 2, 4), bounds=BOUNDS).descriptors[1].entries) == 4

        with pytest.raises(TooComplex, match=r"at most 8 entries are allowed in one message \(RLS_MAX_ENTRIES\)"):
            decode.decode(self.message(kind, 3, 3), bounds=BOUNDS)

    @pytest.mark.parametrize("text", ["v", "ä"])
    @pytest.mark.parametrize("where", ["key", "value", "domain"])
    def test_length_of_strings(self, where: str, text: str) -> None:
        def message(size: int) -> bytes:
            request = rate_limit_request(1)
            place = request if where == "domain" else request.descriptors[0].entries[0]
            setattr(place, where, text * (size // len(text.encode())))
            return bytes(request.SerializeToString())

        decode.decode(message(200), bounds=BOUNDS)
        with pytest.raises(
            TooComplex, match=r"string of 202 bytes in the message; at most 200 are allowed \(RLS_MAX_ENTRY"
        ):
            decode.decode(message(202), bounds=BOUNDS)

    @pytest.mark.parametrize(
        "repeated",
        [
            pytest.param(b"\x0a\x00", id="the domain again and again"),
            pytest.param(b"\x18\x01", id="the hits"),
            pytest.param(b"\x78\x01", id="numbers that are not known"),
            pytest.param(b"\x7a\x00", id="bytes that are not known"),
            pytest.param(b"\x7d\x00\x00\x00\x00", id="four bytes that are not known"),
            pytest.param(b"\x79" + bytes(8), id="eight bytes that are not known"),
            pytest.param(GROUP + GROUP_END, id="groups"),
        ],
    )
    def test_fields_of_any_kind(self, repeated: bytes) -> None:
        each = 2 if repeated.startswith(GROUP) else 1
        most = (64 + 16 * 4 + 4 * 8) // each
        decode.decode(repeated * most, bounds=BOUNDS)

        with pytest.raises(TooComplex, match="at most 160 fields"):
            decode.decode(repeated * (most + 1), bounds=BOUNDS)

    @pytest.mark.parametrize(
        "bomb",
        [
            pytest.param(EMPTY_DESCRIPTOR * 2**19, id="descriptors"),
            pytest.param(delimited(0x12, EMPTY_ENTRY * 2**18), id="entries"),
            pytest.param(delimited(0x12, b"\x12\x00" * 2**18), id="overrides"),
            pytest.param(delimited(0x12, delimited(0x0A, b"\x0a\x00" * 2**18)), id="keys"),
            pytest.param(b"\x78\x01" * 2**19, id="unknown"),
            pytest.param(GROUP * 2**19, id="nested groups"),
        ],
    )
    def test_bombs_are_rejected_after_a_short_scan(self, bomb: bytes, no_protobuf: None) -> None:
        message = CountedBytes(bomb)

        with pytest.raises(TooComplex):
            decode.decode(message)
        assert CountedBytes.looks < 40_000

    def test_fast_decoder_respects_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Messages above a certain length are not tried with the fast decoder."""
        monkeypatch.setattr(decode, "decode_fast", None)

        with pytest.raises(TooComplex):
            decode.decode(EMPTY_DESCRIPTOR * 4096)

    def test_small_messages_are_not_scanned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MessageScan, "check", None)
        request = rate_limit_request(8, 4, "ä")
        request.descriptors[0].limit.requests_per_unit = 7

        assert len(decode.decode(bytes(request.SerializeToString())[:512]).descriptors) == 8

    def test_unscanned_message_cannot_exceed_a_bound(self) -> None:
        size = BOUNDS.unscanned_bytes
        for smallest in (EMPTY_DESCRIPTOR, EMPTY_ENTRY):
            assert size // len(smallest) <= min(BOUNDS.descriptors, BOUNDS.entries)
        assert size <= BOUNDS.entry_bytes


class TestCheckRequests:
    def check(self, headers: int) -> Any:
        request = CheckRequest()
        for number in range(headers):
            request.attributes.request.http.headers[f"h{number}"] = "v"
        return request

    def test_fields(self) -> None:
        """Three fields enclose the headers, and each header has three fields."""
        message = self.check(12).SerializeToString()
        assert len(authz_decode.parse(message, BOUNDS).request.http.headers) == 12

        with pytest.raises(TooComplex, match=r"at most 40 fields are allowed in one message \(RLS_MAX_CHECK_FIELDS\)"):
            authz_decode.parse(self.check(13).SerializeToString(), BOUNDS)

    @pytest.mark.parametrize("size", [200, 201])
    def test_texts(self, size: int) -> None:
        request = self.check(1)
        request.attributes.request.http.path = "p" * size
        if size == 200:
            assert authz_decode.parse(request.SerializeToString(), BOUNDS).request.http.path == "p" * 200
        else:
            with pytest.raises(TooComplex, match="string of 201 bytes"):
                authz_decode.parse(request.SerializeToString(), BOUNDS)

    def test_body_may_be_long(self) -> None:
        """The body is not in our .proto files, so it is skipped."""
        body = delimited(0x5A, b"b" * 3000)
        message = delimited(0x0A, delimited(0x22, delimited(0x12, b"\x12\x01G" + body)))

        assert authz_decode.parse(message, BOUNDS).request.http.method == "G"

    @pytest.mark.parametrize(
        "path",
        [
            pytest.param([0x22, 0x12, 0x1A], id="headers"),
            pytest.param([0x22, 0x12, 0x6A, 0x0A], id="raw headers"),
            pytest.param([0x52], id="context extensions"),
            pytest.param([0x5A, 0x0A], id="metadata"),
            pytest.param([0x5A, 0x0A, 0x12, 0x0A], id="metadata of a namespace"),
            pytest.param([0x0A], id="sources"),
            pytest.param([0x7A], id="unknown"),
        ],
    )
    def test_millions_of_empty_submessages(self, path: list[int], no_protobuf: None) -> None:
        content = bytes([path[-1], 0]) * 2**19
        for tag in reversed([0x0A, *path[:-1]]):
            content = delimited(tag, content)
        message = CountedBytes(content)

        with pytest.raises(TooComplex, match="at most 8192 fields"):
            authz_decode.parse(message)
        assert CountedBytes.looks < 20_000

    def test_descriptors_that_repeat_a_long_value_are_limited(self) -> None:
        def made(descriptors: int) -> Request:
            return Request("edge", tuple([Descriptor((Entry("path", "p" * 1000),))] * descriptors))

        BOUNDS.check_descriptors(made(4))
        with pytest.raises(TooComplex, match="have 5000 characters; at most 4000 are counted"):
            BOUNDS.check_descriptors(made(5))


class TestMessagesOfRateLimiter:
    SCAN = BOUNDS.limiter_scan(LimiterCheckRequest)

    def test_fields(self) -> None:
        limiter_read.parse(LimiterCheckRequest, b"\x10\x01" * MAX_LIMITER_FIELDS, self.SCAN)
        with pytest.raises(TooComplex, match="at most 100 fields are allowed in one message"):
            limiter_read.parse(LimiterCheckRequest, b"\x10\x01" * (MAX_LIMITER_FIELDS + 1), self.SCAN)

    def test_texts(self) -> None:
        fits, long = (LimiterCheckRequest(endpoint="e" * size).SerializeToString() for size in (200, 201))
        limiter_read.parse(LimiterCheckRequest, fits, self.SCAN)
        with pytest.raises(TooComplex):
            limiter_read.parse(LimiterCheckRequest, long, self.SCAN)


class TestScan:
    """The scan, compared with protobuf on the same bytes."""

    SCAN = MessageScan(
        "envoy.service.ratelimit.v3.RateLimitRequest",
        message_shape(RateLimitRequest.DESCRIPTOR),
        FieldBound("fields", 1000),
        FieldBound("bytes", 1000),
    )

    @pytest.mark.parametrize(
        "message",
        [
            b"",
            GROUP + b"\x12\xff\x01" + b"x" * 255 + GROUP_END,  # fields in a group are not descriptors
            GROUP + GROUP + b"\x08\x01" + GROUP_END + GROUP_END,
            b"\x92\x80\x00\x00",  # a descriptor with a tag of three bytes
            b"\x12\x80\x80\x00",  # a length of three bytes
            b"\x10" + b"\xff" * 9 + b"\x01",
            b"\x15\x00\x00\x00\x00",
            b"\x11" + bytes(8),
        ],
    )
    def test_valid_protobuf_is_accepted(self, message: bytes) -> None:
        RateLimitRequest.FromString(message)
        self.SCAN.check(message)

    @pytest.mark.parametrize(
        "message",
        [
            b"\x12",
            b"\x12\x01",
            b"\x12\x02\x0a\x01",  # an entry longer than its descriptor
            b"\x0a\xff\xff\xff\xff\x0f",
            GROUP,
            GROUP_END,
            b"\x12\x01" + GROUP,
            b"\x12\x01" + GROUP + GROUP_END,  # the group ends outside of the descriptor in which it began
            b"\x0e",
            b"\x0f",
            b"\x10" + b"\xff" * 10 + b"\x01",
            b"\x15\x00",
            b"\x11\x00",
            b"\x12\x02\x15\x00",
        ],
    )
    def test_invalid_protobuf_is_rejected(self, message: bytes) -> None:
        with pytest.raises(BadRequest) as by_protobuf:
            decode.decode_protobuf(message)
        with pytest.raises(BadRequest) as by_hand:
            self.SCAN.check(message)
        assert str(by_hand.value) == str(by_protobuf.value)

    def test_recursive_message_type(self) -> None:
        shape = message_shape(CheckRequest.DESCRIPTOR)

        def inner(shape: Any, *tags: int) -> Any:
            for tag in tags:
                shape = shape[tag].inner
            return shape

        struct = inner(shape, 0x0A, 0x5A, 0x0A, 0x12)
        assert inner(struct, 0x0A, 0x12, 0x2A) is struct
        assert inner(struct, 0x0A)[0x0A] == FieldShape()


def head(max_message_bytes: int, encoding: bytes = b"deflate") -> CallHeaders:
    reader = CallHeadersParser({METHOD: []}, "", {METHOD: max_message_bytes})
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD.encode())]
    read = reader.read([*pseudo, (b"content-type", b"application/grpc"), (b"grpc-encoding", encoding)])
    assert isinstance(read, CallHeaders)
    return read


def prefixed(message: bytes, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


class TestSizes:
    def test_message_limit_of_a_method(self) -> None:
        arriving = UnaryRequest(head(1000))
        assert arriving.receive_data(prefixed(bytes(1000)), MAX_MESSAGE_BYTES) is None
        assert arriving.message(MAX_MESSAGE_BYTES) == bytes(1000)

        failure = UnaryRequest(head(1000)).receive_data(prefixed(bytes(1001))[:5], MAX_MESSAGE_BYTES)
        assert failure == RpcError(
            StatusCode.RESOURCE_EXHAUSTED,
            "the message is too large; at most 1000 bytes are read",
            Abuse.MESSAGE_TOO_LARGE,
        )

    def test_message_limit_after_decompression(self) -> None:
        def unpacked(size: int) -> bytes | RpcError:
            arriving = UnaryRequest(head(1000))
            assert arriving.receive_data(prefixed(zlib.compress(bytes(size)), 1), MAX_MESSAGE_BYTES) is None
            return arriving.message(MAX_MESSAGE_BYTES)

        assert unpacked(1000) == bytes(1000)
        failure = unpacked(1001)
        assert isinstance(failure, RpcError)
        assert (failure.code, failure.reason) == (StatusCode.RESOURCE_EXHAUSTED, Abuse.DECOMPRESSION_BOMB)

    def test_default_message_limit(self) -> None:
        reader = CallHeadersParser({METHOD: []})
        pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD.encode())]
        read = reader.read([*pseudo, (b"content-type", b"application/grpc")])
        assert isinstance(read, CallHeaders)
        assert (read.max_message_bytes, read.deadline_in_s) == (MAX_MESSAGE_BYTES, inf)
