"""HTTP/2 connection: start, frames, header blocks, streams, back pressure, drain and close."""

from __future__ import annotations

import pytest

from ratelimit_rls.h2 import frames, header_blocks
from ratelimit_rls.h2.config import CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES
from ratelimit_rls.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_FRAME_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FLAG,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Setting,
    frame,
)
from ratelimit_rls.h2.header_blocks import (
    MAX_BLOCK_BYTES,
    MAX_CACHED_BLOCKS,
    MAX_CACHED_BYTES,
    MAX_LIST_BYTES,
)
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.h2.streams import MAX_RESET_IDS
from tests.unit.h2.client import MAX_STREAMS, PROXIED_METHOD, Client, fields, prefixed, split

OPENING = PREFACE + frames.settings({})


@pytest.fixture
def client() -> Client:
    return Client()


class TestConnectionStart:
    def test_server_sends_its_preface_first(self) -> None:
        client = Client(sends_preface=False)
        client.settle()
        settings, window = client.connection_frames
        assert settings.kind == SETTINGS
        assert frames.parse_settings(settings.payload) == {
            Setting.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
        }
        assert (window.kind, frames.parse_window_update(window.payload)) == (
            WINDOW_UPDATE,
            CONNECTION_WINDOW_BYTES - 65_535,
        )

    @pytest.mark.parametrize("at", range(len(OPENING) + 1))
    def test_client_preface_may_arrive_in_parts(self, at: int) -> None:
        client = Client(sends_preface=False)
        client.send(OPENING[:at])
        client.send(OPENING[at:])
        assert client.acknowledged == 1
        assert client.respond(client.call()).message == b"world"

    @pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", PREFACE[:10] + b"?", b"\0" * 50])
    def test_other_protocols_get_goaway_with_a_message(self, data: bytes) -> None:
        client = Client(sends_preface=False)
        client.send(data)
        assert client.error == ErrorCode.PROTOCOL_ERROR
        assert b"this port serves gRPC" in client.frames_of_type(GOAWAY)[0].payload

    @pytest.mark.parametrize(
        "first", [frame(PING, 0, 0, b"12345678"), frame(SETTINGS, ACK, 0), frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1")]
    )
    def test_first_frame_must_be_settings(self, first: bytes) -> None:
        client = Client(sends_preface=False)
        client.send(PREFACE + first)
        assert client.error == ErrorCode.PROTOCOL_ERROR


class TestFrames:
    def test_unknown_frame_types_are_ignored(self, client: Client) -> None:
        client.send(frame(0x42, 0xFF, 77, b"whatever") + frame(0xFF, 0, 0))
        assert client.is_alive

    @pytest.mark.parametrize("kind", [DATA, HEADERS, SETTINGS, 0x42])
    def test_oversized_frame_closes_connection_before_it_arrives(self, client: Client, kind: int) -> None:
        client.send(frame(kind, 0, 1, b"\0" * (MAX_FRAME_BYTES + 1))[:9])
        assert client.error == ErrorCode.FRAME_SIZE_ERROR

    @pytest.mark.parametrize(
        ("faulty", "code"),
        [
            (frame(PING, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
            (frame(PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
            (frame(SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
            (frame(SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
            (frame(SETTINGS, ACK, 0, b"123456"), ErrorCode.FRAME_SIZE_ERROR),
            (frames.settings({Setting.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
            (frames.settings({Setting.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
            (frames.settings({Setting.MAX_FRAME_SIZE: 2**14 - 1}), ErrorCode.PROTOCOL_ERROR),
            (frames.settings({Setting.MAX_FRAME_SIZE: 2**24}), ErrorCode.PROTOCOL_ERROR),
            (frame(RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
            (frame(RST_STREAM, 0, 0, b"\0\0\0\0"), ErrorCode.PROTOCOL_ERROR),
            (frame(RST_STREAM, 0, 1, b"\0\0\0\0"), ErrorCode.PROTOCOL_ERROR),
            (frame(WINDOW_UPDATE, 0, 0, b"123"), ErrorCode.FRAME_SIZE_ERROR),
            (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
            (frames.window_update(1, 1), ErrorCode.PROTOCOL_ERROR),
            (frame(GOAWAY, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
            (frame(GOAWAY, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
            (frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
            (frame(PRIORITY, 0, 0, b"12345"), ErrorCode.PROTOCOL_ERROR),
            (frame(PRIORITY, 0, 7, b"\0\0\0\7\0"), ErrorCode.PROTOCOL_ERROR),
            (frame(DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
            (frame(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
            (frame(HEADERS, END_HEADERS, 0), ErrorCode.PROTOCOL_ERROR),
            (frame(HEADERS, END_HEADERS, 2), ErrorCode.PROTOCOL_ERROR),
            (frame(HEADERS, END_HEADERS | PADDED, 1), ErrorCode.PROTOCOL_ERROR),
            (frame(HEADERS, END_HEADERS | PADDED, 1, b"\1"), ErrorCode.PROTOCOL_ERROR),
            (frame(HEADERS, END_HEADERS | PRIORITY_FLAG, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
            (frame(HEADERS, END_HEADERS | PRIORITY_FLAG, 1, b"\0\0\0\1\0"), ErrorCode.PROTOCOL_ERROR),
            (frame(HEADERS, END_HEADERS, 1, b"\x80"), ErrorCode.COMPRESSION_ERROR),
            (frame(CONTINUATION, END_HEADERS, 1), ErrorCode.PROTOCOL_ERROR),
        ],
    )
    def test_protocol_violation_closes_connection(self, client: Client, faulty: bytes, code: ErrorCode) -> None:
        client.send(faulty)
        assert client.error == code
        assert client.goaways[0][0] in (0, 1)

    def test_input_after_a_connection_error_is_ignored(self, client: Client) -> None:
        client.send(frame(PING, 0, 0, b"") + frame(PING, 0, 0, b"12345678"))
        client.send(frame(PING, 0, 0, b"12345678"))
        client.call()
        assert not client.frames_of_type(PING)
        assert client.queued == []
        client.disconnect()

    def test_calls_queued_before_a_connection_error_are_decided(self, client: Client) -> None:
        """They are decided; only their responses are lost."""
        first = frame(HEADERS, END_HEADERS, 1, client.block(fields())) + frame(DATA, END_STREAM, 1, prefixed(b"1"))
        client.send(first + frame(PING, 0, 0))
        assert (client.queued, client.goaways) == ([b"1"], [(1, ErrorCode.FRAME_SIZE_ERROR)])
        assert client.server.queue_notifications > 0
        client.disconnect()
        assert client.server.cancelled_ids == [1]

    def test_ping_is_acknowledged_and_acknowledgements_are_not(self, client: Client) -> None:
        client.send(frame(PING, 0, 0, b"abcdefgh") + frame(PING, ACK, 0, b"whatever"))
        assert client.frames_of_type(PING) == [(PING, ACK, 0, b"abcdefgh")]
        assert client.is_alive

    def test_unknown_settings_are_acknowledged(self, client: Client) -> None:
        client.send(frame(SETTINGS, 0, 0, b"\xab\xcd\0\0\0\1"))
        client.send(frame(SETTINGS, ACK, 0))
        assert client.acknowledged == 1
        assert client.is_alive

    def test_priority_frames_have_no_effect(self, client: Client) -> None:
        client.send(frame(PRIORITY, 0, 9, b"\0\0\0\1\0"))
        assert client.is_alive

    def test_priority_of_wrong_size_is_a_stream_error(self, client: Client) -> None:
        stream_id = client.open()
        client.send(frame(PRIORITY, 0, stream_id, b"1234"))
        assert client.responses[stream_id].reset == ErrorCode.FRAME_SIZE_ERROR
        assert client.is_alive

    def test_reserved_bit_of_stream_id_is_ignored(self, client: Client) -> None:
        request = frame(HEADERS, END_HEADERS, 1, client.block(fields())) + frame(DATA, END_STREAM, 1, prefixed(b"1"))
        marked = bytearray(request)
        marked[5] |= 0x80
        marked[request.index(prefixed(b"1")) - 4] |= 0x80
        client.send(bytes(marked))
        assert client.respond(1).message == b"world"

    def test_calls_are_answered_after_goaway_from_client(self, client: Client) -> None:
        stream_id = client.call()
        client.send(frames.goaway(0, ErrorCode.NO_ERROR))
        assert client.respond(stream_id).message == b"world"


class TestHeaderBlocks:
    def test_repeated_header_block_is_not_decoded_again(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        for _ in range(2):  # the first one fills the table
            client.call(b"1")
        monkeypatch.setattr(header_blocks.Decoder, "decode", None)  # type: ignore[attr-defined]
        client.call(b"2")
        assert client.queued == [b"1", b"1", b"2"]
        assert client.server.queue[1][4] is client.server.queue[2][4]

    def test_table_change_invalidates_cached_blocks(self, client: Client) -> None:
        """The newest entry has index 62, so the same block has two meanings."""
        newest = client.plain_block(fields()) + b"\xbe"
        for name in (b"a", b"b"):
            added = b"\x40\x01" + name + b"\x01x"
            for block in (added, newest, newest):
                stream_id = client.next_id
                client.next_id += 2
                client.send(
                    frame(HEADERS, END_HEADERS, stream_id, client.plain_block(fields()) + added)
                    + frame(RST_STREAM, 0, stream_id, b"\0\0\0\0")
                    if block is added
                    else frame(HEADERS, END_HEADERS, stream_id, block)
                    + frame(DATA, END_STREAM, stream_id, prefixed(name))
                )
        names = [head.metadata[-1][0] for *_, head in client.server.queue]
        assert names == ["a", "a", "b", "b"]

    def test_block_that_changes_the_table_is_not_cached(self, client: Client) -> None:
        plain = client.plain_block(fields())
        for added in (b"\x40\x01a\x01x", b"\x40\x01a\x01x", b"\xbf"):  # the entry before the last one
            client.send(frame(HEADERS, END_HEADERS, client.next_id, plain + added))
            client.data(client.next_id, prefixed(b"1"), END_STREAM)
            client.next_id += 2
        assert [head.metadata for *_, head in client.server.queue] == [(("a", "x"),)] * 3

    def test_number_of_cached_blocks_is_limited(self, client: Client) -> None:
        for number in range(MAX_CACHED_BLOCKS + 1):
            stream_id = client.next_id
            client.next_id += 2
            block = client.plain_block(fields(number=f"{number}"))
            client.send(frame(HEADERS, END_HEADERS, stream_id, block))
            client.reset(stream_id)
            assert block in client.connection._header_blocks.cache
        assert len(client.connection._header_blocks.cache) <= MAX_CACHED_BLOCKS

    def test_memory_of_cached_blocks_is_limited(self, client: Client) -> None:
        """The decoded size counts, too: a few bytes can reference a large field of the table."""
        added = b"\x40\x01a\x7f\xd9\x1e" + b"x" * 4056
        plain = client.plain_block(fields())
        client.send(frame(HEADERS, END_HEADERS, 1, plain + added))
        for number in range(50):
            client.next_id = 3 + 2 * number
            block = client.plain_block(fields(number=f"{number}")) + b"\xbe" * 7
            client.send(frame(HEADERS, END_HEADERS, client.next_id, block))
            client.reset(client.next_id)
            known = client.connection._header_blocks.cache
            assert block in known
            assert len(known) * 7 * 4056 <= MAX_CACHED_BYTES
        assert len(known) > 1

    @pytest.mark.parametrize("flags", [PADDED, PRIORITY_FLAG, PADDED | PRIORITY_FLAG])
    def test_padding_and_priority_of_headers_are_removed(self, client: Client, flags: int) -> None:
        block = client.block(fields())
        payload = b"\7" * bool(flags & PADDED) + b"\0\0\0\0\x10" * bool(flags & PRIORITY_FLAG) + block
        payload += b"\0" * 7 * bool(flags & PADDED)
        client.send(frame(HEADERS, END_HEADERS | flags, 1, payload) + frame(DATA, END_STREAM, 1, prefixed(b"1")))
        assert client.respond(1).message == b"world"

    def test_headers_with_only_padding_are_an_empty_block(self, client: Client) -> None:
        """The block is then empty, which is an invalid request."""
        client.send(frame(HEADERS, END_HEADERS | PADDED, 1, b"\2\0\0"))
        assert client.responses[1].reset == ErrorCode.PROTOCOL_ERROR
        assert client.is_alive

    @pytest.mark.parametrize("cut", [0, 1, 20])
    def test_header_block_may_span_continuation_frames(self, client: Client, cut: int) -> None:
        block = client.block(fields())
        client.send(frame(HEADERS, 0, 1, block[:cut]))
        client.send(frame(CONTINUATION, 0, 1, block[cut:-3]) + frame(CONTINUATION, END_HEADERS, 1, block[-3:]))
        client.data(1, prefixed(b"1"), END_STREAM)
        assert client.respond(1).message == b"world"

    def test_end_stream_is_a_flag_of_the_first_frame(self, client: Client) -> None:
        block = client.block(fields(PROXIED_METHOD))
        client.send(frame(HEADERS, END_STREAM, 1, block) + frame(CONTINUATION, END_HEADERS, 1))
        assert client.server.proxied[1].has_ended

    @pytest.mark.parametrize(
        "between",
        [frame(PING, 0, 0, b"12345678"), frame(CONTINUATION, END_HEADERS, 3), frame(DATA, 0, 1), frame(0x42, 0, 0)],
    )
    def test_other_frames_before_continuation_close_connection(self, client: Client, between: bytes) -> None:
        client.send(frame(HEADERS, 0, 1, client.block(fields())) + between)
        assert client.error == ErrorCode.PROTOCOL_ERROR

    def test_call_before_continuation_closes_connection(self, client: Client) -> None:
        block = client.plain_block(fields())
        for between in (frame(DATA, END_STREAM, 1, prefixed(b"1")), frame(HEADERS, END_HEADERS, 5, block)):
            client = Client()
            client.send(frame(HEADERS, END_HEADERS, 1, block))  # cached from here on
            client.send(frame(HEADERS, 0, 3, block) + between)
            assert client.error == ErrorCode.PROTOCOL_ERROR
            assert client.queued == []

    @pytest.mark.parametrize("size", [0, 1, MAX_FRAME_BYTES])
    def test_endless_header_block_closes_connection(self, client: Client, size: int) -> None:
        client.send(frame(HEADERS, 0, 1))
        sent = 0
        while not client.is_closed:
            client.send(frame(CONTINUATION, 0, 1, b"\x82" * size))
            sent += 9 + size
            assert sent <= MAX_BLOCK_BYTES + 9 + size
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_oversized_header_list_is_rejected_and_next_call_works(self, client: Client) -> None:
        large = {f"name-{number}": "x" * 1000 for number in range(33)}
        block = client.block(fields(**large))
        client.send(
            frame(HEADERS, 0, 1, block[:MAX_FRAME_BYTES])
            + frame(CONTINUATION, 0, 1, block[MAX_FRAME_BYTES : 2 * MAX_FRAME_BYTES])
            + frame(CONTINUATION, END_HEADERS, 1, block[2 * MAX_FRAME_BYTES :])
        )
        client.data(1, prefixed(b"1"), END_STREAM)
        assert client.responses[1].blocks == [{":status": "431", "content-type": "text/plain"}]
        assert client.responses[1].data == b"the headers are too large; at most 32768 bytes are allowed\n"
        assert client.responses[1].has_ended
        client.next_id = 3
        assert client.respond(client.call()).message == b"world"

    @pytest.mark.parametrize(
        "headers",
        [
            [],
            fields()[1:],
            [*fields()[:1], *fields()[2:]],
            fields(""),
            [*fields(), (":path", "/x")],
            [(":path", "/x"), *fields()],
            [(":status", "200"), *fields()],
            fields(connection="close"),
            fields(te="gzip"),
            fields(Upper="x"),
            [*fields(), ("", "x")],
            fields(a="x\ny"),
            fields(a="x\0y"),
            fields(content_length="x"),
            fields(content_length="-1"),
            fields(content_length="1" * 19),
            [*fields(content_length="1"), ("content-length", "2")],
        ],
    )
    def test_malformed_request_is_a_stream_error(self, client: Client, headers: list[tuple[str, str]]) -> None:
        client.send(frame(HEADERS, END_HEADERS, 1, client.block(headers)))
        assert client.responses[1].reset == ErrorCode.PROTOCOL_ERROR
        client.data(1, prefixed(b"1"), END_STREAM)
        assert client.queued == []
        assert client.is_alive


class TestStreams:
    def test_number_of_open_streams_is_limited(self, client: Client) -> None:
        for _ in range(MAX_STREAMS):
            client.call()
        for rejected in (client.call(), client.call()):
            assert client.responses[rejected].reset == ErrorCode.REFUSED_STREAM
        assert len(client.queued) == MAX_STREAMS
        assert client.respond(1).message == b"world"
        assert client.respond(client.call()).message == b"world"

    def test_skipped_stream_ids_cannot_be_used_later(self, client: Client) -> None:
        client.next_id = 7
        client.call()
        client.next_id = 5
        client.open()
        assert client.error == ErrorCode.STREAM_CLOSED

    def test_answered_stream_cannot_be_reopened(self, client: Client) -> None:
        client.respond(client.call())
        client.next_id = 1
        client.open()
        assert client.error == ErrorCode.STREAM_CLOSED

    def test_data_after_end_stream_is_a_stream_error(self, client: Client) -> None:
        stream_id = client.call()
        client.data(stream_id, b"x")
        assert client.responses[stream_id].reset == ErrorCode.STREAM_CLOSED
        assert client.server.cancelled_ids == [stream_id]
        client.respond(stream_id)
        assert client.responses[stream_id].blocks == []
        assert client.is_alive

    def test_data_after_the_response_is_reset_once(self, client: Client) -> None:
        stream_id = client.call()
        client.respond(stream_id)
        client.data(stream_id, b"x")
        client.data(stream_id, b"x")
        assert client.responses[stream_id].reset == ErrorCode.STREAM_CLOSED

    @pytest.mark.parametrize("path", ["/a.Service/Method", PROXIED_METHOD])
    def test_headers_after_end_stream_are_a_stream_error(self, client: Client, path: str) -> None:
        stream_id = client.call(b"1", fields(path))
        client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, client.block([("a", "b")])))
        assert client.responses[stream_id].reset == ErrorCode.STREAM_CLOSED

    def test_trailers_end_a_request(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(b"1"))
        client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, client.block([("a", "b")])))
        assert client.queued == [b"1"]

    @pytest.mark.parametrize(
        ("flags", "trailers"), [(0, [("a", "b")]), (END_STREAM, [(":path", "/")]), (END_STREAM, [("te", "x")])]
    )
    def test_trailers_without_end_stream_or_invalid_are_a_stream_error(
        self, client: Client, flags: int, trailers: list[tuple[str, str]]
    ) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(b"1"))
        client.send(frame(HEADERS, END_HEADERS | flags, stream_id, client.block(trailers)))
        assert client.responses[stream_id].reset == ErrorCode.PROTOCOL_ERROR
        assert client.connection._unfinished_bytes == 0
        assert client.is_alive

    def test_frames_for_streams_that_we_reset_are_ignored(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, b"\0\xff\xff\xff\xff")
        assert client.responses[stream_id].reset == ErrorCode.NO_ERROR
        client.data(stream_id, b"more")
        client.window(stream_id, 1)
        client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, client.block([("a", "b")])))
        assert client.is_alive

    def test_only_the_latest_reset_streams_are_remembered(self, client: Client) -> None:
        for _ in range(MAX_RESET_IDS + 1):
            last = client.open(fields(te="x"))
        assert len(client.connection._reset_ids) == MAX_RESET_IDS
        client.data(last, b"x")
        assert client.is_alive


class TestCancelledCalls:
    def test_cancel_before_the_message(self, client: Client) -> None:
        stream_id = client.open()
        client.reset(stream_id)
        assert not client.connection.is_waiting(stream_id)
        assert client.server.cancelled_ids == []

    def test_cancel_within_the_message(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(b"123456")[:-1])
        assert client.connection._unfinished_bytes == 10
        client.reset(stream_id)
        assert client.connection._unfinished_bytes == 0
        assert (client.queued, client.server.cancelled_ids) == ([], [])

    def test_cancel_before_the_response(self, client: Client) -> None:
        stream_id = client.call()
        assert client.connection.is_waiting(stream_id)
        client.reset(stream_id)
        assert not client.connection.is_waiting(stream_id)
        client.reset(stream_id)
        assert client.server.cancelled_ids == [stream_id]
        writes = len(client.writes)
        client.respond(stream_id)
        client.connection.fail(stream_id, RpcError(StatusCode.INTERNAL, "too late"))
        client.settle()
        assert len(client.writes) == writes
        client.disconnect()
        assert client.server.cancelled_ids == [stream_id]

    def test_cancel_within_the_response(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 3})
        stream_id = client.call()
        client.respond(stream_id)
        assert client.responses[stream_id].data == b"\0\0\0"
        client.reset(stream_id)
        client.window(0, 10)
        client.settings({Setting.INITIAL_WINDOW_SIZE: 100})
        assert client.responses[stream_id].data == b"\0\0\0"
        assert client.server.cancelled_ids == []
        assert client.connection._outbound.stream_credit == {}

    def test_cancel_after_the_response(self, client: Client) -> None:
        stream_id = client.call()
        client.respond(stream_id)
        client.reset(stream_id)
        assert client.server.cancelled_ids == []
        assert client.is_alive

    def test_cancel_of_a_proxied_call(self, client: Client) -> None:
        stream_id = client.open(fields(PROXIED_METHOD))
        client.data(stream_id, b"12345")
        client.reset(stream_id)
        assert client.server.proxied[stream_id].is_cancelled
        assert client.connection._unfinished_bytes == 0

    def test_disconnect_cancels_all_calls(self, client: Client) -> None:
        stream_ids = [client.call(), client.call()]
        arriving = client.open()
        client.data(arriving, b"\0\0")
        client.open()
        proxied = client.open(fields(PROXIED_METHOD))
        client.data(proxied, b"12345")
        client.disconnect()
        assert client.server.cancelled_ids == stream_ids
        assert client.server.proxied[proxied].is_cancelled
        assert client.connection._unfinished_bytes == 0
        for stream_id in stream_ids:
            client.respond(stream_id)
        assert client.server.cancelled_ids == stream_ids


def test_test_client_reads_the_frames_it_writes() -> None:
    """Checks the test client itself."""
    assert [*split(frame(PING, ACK, 0, b"12345678") + frame(DATA, 0, 5))] == [
        (PING, ACK, 0, b"12345678"),
        (DATA, 0, 5, b""),
    ]
