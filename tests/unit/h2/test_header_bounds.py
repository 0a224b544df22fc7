"""Limits of header blocks: fields, binary metadata, and the memory of cached headers."""

from __future__ import annotations

import tracemalloc
from base64 import b64encode

import pytest

from ratelimit_rls.h2 import call_headers as head_module
from ratelimit_rls.h2.call_headers import MAX_BINARY_VALUES, CallHeaders, CallHeadersParser
from ratelimit_rls.h2.frames import END_HEADERS, ErrorCode, Http2ConnectionError, Http2StreamError
from ratelimit_rls.h2.header_blocks import MAX_CACHED_BLOCKS, MAX_CACHED_BYTES, HeaderBlock, HeaderBlocks
from ratelimit_rls.h2.hpack import MAX_FIELDS, MAX_FIELDS_READ, literal
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.h2.status import RpcError

METHOD = b"/a.Service/Method"
NEWEST = b"\xbe"
PSEUDO = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD)]
TYPE = (b"content-type", b"application/grpc")


def reader(request_id_metadata: str = "") -> CallHeadersParser:
    return CallHeadersParser({METHOD.decode(): []}, request_id_metadata)


def call(*more: tuple[bytes, bytes], path: bytes = METHOD) -> list[tuple[bytes, bytes]]:
    return [*PSEUDO[:2], (b":path", path), TYPE, *more]


def written(*fields: tuple[bytes, bytes]) -> bytes:
    return b"".join([literal(*field) for field in fields])


def read(blocks: HeaderBlocks[CallHeaders], payload: bytes) -> HeaderBlock:
    block = blocks.start(END_HEADERS, 1, payload)
    assert block is not None
    return block


class TestFields:
    def test_number_of_fields_is_limited(self) -> None:
        blocks: HeaderBlocks[CallHeaders] = HeaderBlocks()
        fits, rejected = (read(blocks, written((b"a", b"1")) * count) for count in (MAX_FIELDS, MAX_FIELDS + 1))

        assert fits.fields == [(b"a", b"1")] * MAX_FIELDS
        assert fits.field_count == MAX_FIELDS
        assert rejected.fields is None
        assert rejected.field_count == MAX_FIELDS + 1
        assert rejected.rejection == "the request has 101 header fields; at most 100 are allowed"

    def test_table_is_updated_by_a_rejected_list(self) -> None:
        blocks: HeaderBlocks[CallHeaders] = HeaderBlocks()
        assert read(blocks, written((b"a", b"1")) * MAX_FIELDS + b"\x40\x01b\x012").fields is None

        assert read(blocks, NEWEST).fields == [(b"b", b"2")]

    def test_oversized_list_is_rejected_with_a_message(self) -> None:
        rejected = read(HeaderBlocks(), written((b"a", b"x" * 33_000)))

        assert (rejected.fields, rejected.field_count) == (None, 1)
        assert rejected.rejection == "the headers are too large; at most 32768 bytes are allowed"

    @pytest.mark.parametrize("field", [b"\x82", b"\x40\x00\x00", b"\x00\x00\x00"], ids=["indexed", "added", "literal"])
    def test_block_with_thousands_of_fields_closes_connection(self, field: bytes) -> None:
        assert read(HeaderBlocks(), field * MAX_FIELDS_READ).field_count == MAX_FIELDS_READ

        with pytest.raises(Http2ConnectionError, match="at most 1000 fields") as fault:
            read(HeaderBlocks(), field * (MAX_FIELDS_READ + 1))
        assert (fault.value.code, fault.value.reason) == (ErrorCode.ENHANCE_YOUR_CALM, Reason.HPACK_FLOOD)

    @pytest.mark.parametrize("field", [b"\x40\x00\x00", b"\x00\x00\x00"], ids=["added", "literal"])
    def test_literals_beyond_the_limit_are_not_decoded(self, field: bytes) -> None:
        """The rest of the block would be a different error."""
        with pytest.raises(Http2ConnectionError, match="at most 1000 fields"):
            read(HeaderBlocks(), field * (MAX_FIELDS_READ + 1) + b"\x80")

    def test_third_table_size_update_closes_connection(self) -> None:
        assert read(HeaderBlocks(), b"\x20\x3f\xe1\x1f" + b"\x82").field_count == 1

        with pytest.raises(Http2ConnectionError, match="at most 2 table size updates") as fault:
            read(HeaderBlocks(), b"\x20\x21\x20" + b"\x82")
        assert fault.value.code is ErrorCode.ENHANCE_YOUR_CALM
        assert fault.value.reason is Reason.HPACK_FLOOD


class TestPseudoHeaders:
    @pytest.mark.parametrize("path", [b"/a\r\nb", b"/a\nb", b"/a\0b", b"/a\r"])
    def test_path_with_line_break_is_a_stream_error(self, path: bytes) -> None:
        with pytest.raises(Http2StreamError) as fault:
            reader().read(call(path=path))
        assert fault.value.code is ErrorCode.PROTOCOL_ERROR

    def test_authority_with_line_break_is_a_stream_error(self) -> None:
        with pytest.raises(Http2StreamError):
            reader().read([*PSEUDO, (b":authority", b"a\nb"), TYPE])


class TestBinaryMetadata:
    def test_binary_metadata_is_decoded_only_if_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(head_module, "b64decode", None)
        head = reader().read(call((b"a-bin", b"," * 4000), (b"b", b"text")))

        assert isinstance(head, CallHeaders)
        assert head.metadata == (("b", "text"),)

    def test_binary_values_of_proxied_calls_are_limited(self) -> None:
        def values(count: int) -> CallHeaders | RpcError:
            return reader().read(call((b"a-bin", b"MQ," * (count - 2) + b"MQ"), (b"b-bin", b"Mg"), path=b"/other"))

        head = values(MAX_BINARY_VALUES)
        assert isinstance(head, CallHeaders)
        assert list(head.metadata) == [("a-bin", b"1")] * (MAX_BINARY_VALUES - 1) + [("b-bin", b"2")]
        failure = values(MAX_BINARY_VALUES + 1)
        assert isinstance(failure, RpcError)
        assert "at most 100 values of -bin metadata are allowed" in failure.message

    def test_too_many_binary_values_are_rejected_before_decoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(head_module, "b64decode", None)

        assert isinstance(reader().read(call(*[(b"a-bin", b"," * 4000)] * 8, path=b"/other")), RpcError)

    def test_binary_request_id_decodes_no_other_metadata(self) -> None:
        head = reader("x-id-bin").read(call((b"x-id-bin", b"MQ,!" + b"," * 4000), (b"b-bin", b"!")))

        assert isinstance(head, CallHeaders)
        assert head.request_id == b"1"

    @pytest.mark.parametrize(("value", "read_as"), [(b"abc", b"abc"), (b"", None), (b"\xe4", "ä".encode())])
    def test_text_request_id(self, value: bytes, read_as: bytes | None) -> None:
        head = reader("X-Id").read(call((b"x-id", value)))

        assert isinstance(head, CallHeaders)
        assert head.request_id == read_as

    def test_binary_request_id_must_be_base64(self) -> None:
        assert isinstance(reader("x-id-bin").read(call((b"x-id-bin", b"!"))), RpcError)


HOSTILE = {
    "an ordinary call": [(b"user-agent", b"grpc-go/1.60"), (b"traceparent", b"0" * 55), (b"x-forwarded-for", b"1.2.3")],
    "no metadata": [],
    "many small fields": [(b"%d" % number, b"") for number in range(90)],
    "large fields": [(b"a", b"x" * 4000)] * 7,
    "not ASCII": [(b"a", b"\xe4" * 300)] * 80,
    "binary values": [(b"a-bin", b"," * 4000)] * 7,
    "an encoding": [(b"grpc-encoding", b"x" * 8000), (b"grpc-timeout", b"12345678n")],
    "an id": [(b"x-id-bin", b64encode(b"x" * 8000))],
}


class TestMemoryOfCachedHeaders:
    @pytest.mark.parametrize("more", HOSTILE.values(), ids=HOSTILE)
    def test_charged_bytes_match_memory(self, more: list[tuple[bytes, bytes]]) -> None:
        heads, blocks = reader("x-id-bin"), HeaderBlocks[CallHeaders]()
        payloads = [written(*call(*more, (b"n", b"%d" % number))) for number in range(2 * MAX_CACHED_BLOCKS)]
        peak_known_bytes = 0
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for payload in payloads:
                block = read(blocks, bytes(bytearray(payload)))  # a copy, as received from a socket
                assert block.fields is not None
                head = heads.read(block.fields)
                assert isinstance(head, CallHeaders)
                blocks.store(block, head)
                peak_known_bytes = max(peak_known_bytes, blocks.cache_bytes)
            del block, head
            kept_bytes = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()

        assert peak_known_bytes <= MAX_CACHED_BYTES
        assert blocks.cache_bytes / 3 <= kept_bytes <= 1.05 * blocks.cache_bytes + 4096
