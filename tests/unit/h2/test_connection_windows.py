"""Flow control of a connection: it sends only what the client's windows allow, and the rest when they grow."""

from __future__ import annotations

import pytest
from hpack.exceptions import InvalidTableSizeError

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.frames import (
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    ErrorCode,
    Setting,
    frame,
)
from ratelimit_rls.h2.status import RpcError, StatusCode
from tests.unit.h2.client import PROXIED_METHOD, Client, fields, prefixed

MESSAGE = bytes(range(250)) * 200
WHOLE = 5 + len(MESSAGE)


@pytest.fixture
def client() -> Client:
    return Client()


class TestStreamWindows:
    def test_response_is_sent_byte_by_byte(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.call()
        client.respond(stream_id, b"abc")
        response = client.responses[stream_id]
        for number in range(8):
            assert (response.frames_of_data, response.has_ended) == ([1] * number, False)
            assert client.connection.is_waiting(stream_id)
            client.window(stream_id, 1)
        assert response.message == b"abc"
        assert not client.connection.is_waiting(stream_id)
        assert client.connection._outbound.stream_credit == {}

    def test_an_empty_message_has_its_prefix(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 4})
        stream_id = client.call()
        client.respond(stream_id, b"")
        assert not client.responses[stream_id].has_ended
        client.window(stream_id, 1)
        assert client.responses[stream_id].message == b""

    def test_window_may_grow_before_the_response(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.open()
        client.window(stream_id, 6)
        client.send(frame(frames.DATA, END_STREAM, stream_id, b"\0\0\0\0\0"))
        client.window(stream_id, 4)
        assert client.respond(stream_id).message == b"world"
        assert client.connection._outbound.stream_credit == {}

    def test_unused_window_is_discarded(self, client: Client) -> None:
        stream_id = client.call()
        client.window(stream_id, 6)
        assert client.respond(stream_id).message == b"world"
        assert client.connection._outbound.stream_credit == {}

    def test_unused_window_of_a_failed_call_is_discarded(self, client: Client) -> None:
        stream_id = client.call()
        client.window(stream_id, 6)
        client.connection.fail(stream_id, RpcError(StatusCode.INTERNAL, "no"))
        assert client.connection._outbound.stream_credit == {}

    def test_reserved_bit_of_window_increment_is_ignored(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        client.respond(client.call())
        client.window(1, 2**31 + 3)
        assert client.responses[1].frames_of_data == [3]

    def test_messages_keep_their_order_while_they_wait(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 2})
        stream_id = client.call(b"1", fields(PROXIED_METHOD))
        client.connection.start_response(stream_id)
        assert not client.connection.send_message(stream_id, b"a")
        assert not client.connection.send_message(stream_id, b"b")
        client.window(stream_id, 100)
        assert client.responses[stream_id].data == prefixed(b"a") + prefixed(b"b")

    def test_stream_without_window_does_not_block_others(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        first = client.call()
        client.respond(first)
        client.settings({Setting.INITIAL_WINDOW_SIZE: 10})
        assert client.responses[first].message == b"world"

    def test_settings_may_shrink_windows_below_zero(self, client: Client) -> None:
        """Sent data stays counted, so the window becomes negative."""
        stream_id = client.call()
        client.settings({Setting.INITIAL_WINDOW_SIZE: 20_000})
        client.respond(stream_id, MESSAGE)
        response = client.responses[stream_id]
        assert len(response.data) == 20_000
        client.settings({Setting.INITIAL_WINDOW_SIZE: 10})
        client.window(stream_id, 19_990)
        assert len(response.data) == 20_000
        client.window(stream_id, 1)
        assert len(response.data) == 20_001
        client.settings({Setting.INITIAL_WINDOW_SIZE: 100_000})
        assert response.message == MESSAGE

    def test_zero_window_increment_is_a_stream_error(self, client: Client) -> None:
        stream_id = client.call()
        client.window(stream_id, 0)
        assert client.responses[stream_id].reset == ErrorCode.PROTOCOL_ERROR
        assert client.server.cancelled_ids == [stream_id]

    def test_window_overflow_is_an_error(self, client: Client) -> None:
        stream_id = client.call()
        client.window(stream_id, MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        assert stream_id not in client.responses
        client.window(stream_id, 1)
        assert client.responses[stream_id].reset == ErrorCode.FLOW_CONTROL_ERROR
        assert client.is_alive

    def test_settings_that_overflow_a_window_close_connection(self, client: Client) -> None:
        client.window(client.call(), MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        client.settings({Setting.INITIAL_WINDOW_SIZE: DEFAULT_WINDOW_BYTES})
        assert client.error is None
        client.settings({Setting.INITIAL_WINDOW_SIZE: DEFAULT_WINDOW_BYTES + 1})
        assert client.error == ErrorCode.FLOW_CONTROL_ERROR

    def test_ended_stream_leaves_no_state(self, client: Client) -> None:
        stream_id = client.call()
        client.respond(stream_id)
        client.window(stream_id, 0)
        client.window(stream_id, 5)
        assert client.connection._outbound.stream_credit == {}
        assert client.is_alive


class TestConnectionWindow:
    def test_streams_share_the_connection_window(self, client: Client) -> None:
        stream_ids = [client.call() for _ in range(3)]
        for stream_id in stream_ids:
            client.respond(stream_id, MESSAGE)
        sent = [len(client.responses[stream_id].data) for stream_id in stream_ids]
        assert sent == [WHOLE, DEFAULT_WINDOW_BYTES - WHOLE, 0]
        client.respond(client.call(), b"short")
        assert [client.connection.is_waiting(stream_id) for stream_id in (*stream_ids, 7)] == [False, True, True, True]
        client.window(0, 100)
        assert len(client.responses[3].data) == DEFAULT_WINDOW_BYTES - WHOLE + 100
        client.window(0, 2 * WHOLE)
        assert [client.responses[stream_id].message for stream_id in stream_ids] == [MESSAGE] * 3
        assert client.responses[7].message == b"short"
        assert not any(map(client.connection.is_waiting, (1, 3, 5, 7)))

    def test_fast_path_responses_use_the_connection_window(self, client: Client) -> None:
        size = DEFAULT_WINDOW_BYTES // 13 - 5
        for _ in range(13):
            assert client.respond(client.call(), b"x" * size).message == b"x" * size
        assert client.connection._outbound.window == 2
        client.respond(client.call(), b"")
        assert client.responses[27].data == b"\0\0"

    def test_reset_stream_uses_no_connection_window(self, client: Client) -> None:
        first, second = client.call(), client.call()
        client.respond(first, MESSAGE + MESSAGE)
        client.respond(second, b"short")
        client.reset(first)
        client.window(0, 10)
        assert client.responses[second].message == b"short"

    def test_window_overflow_is_an_error(self, client: Client) -> None:
        client.window(0, MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        assert client.is_alive
        client.window(0, 1)
        assert client.error == ErrorCode.FLOW_CONTROL_ERROR


class TestFrames:
    def test_frames_respect_the_clients_max_frame_size(self, client: Client) -> None:
        client.respond(client.call(), MESSAGE)
        assert client.responses[1].frames_of_data == [MAX_FRAME_BYTES] * 3 + [WHOLE - 3 * MAX_FRAME_BYTES]
        client.window(0, WHOLE)
        client.settings({Setting.MAX_FRAME_SIZE: 40_000})
        client.respond(client.call(), MESSAGE)
        assert client.responses[3].frames_of_data == [40_000, WHOLE - 40_000]
        client.window(0, WHOLE)
        client.settings({Setting.MAX_FRAME_SIZE: 2**24 - 1})
        client.respond(client.call(), MESSAGE)
        assert client.responses[5].frames_of_data == [WHOLE]


class TestClientHeaderTable:
    @pytest.mark.parametrize("size", [0, 1, 4095])
    def test_smaller_table_is_acknowledged(self, client: Client, size: int) -> None:
        client.decoder.max_allowed_table_size = size
        client.settings({Setting.HEADER_TABLE_SIZE: size})
        for _ in range(2):
            assert client.respond(client.call()).message == b"world"
        assert client.decoder.header_table_size == 0

    def test_table_update_is_sent_once(self, client: Client) -> None:
        client.settings({Setting.HEADER_TABLE_SIZE: 0})
        client.respond(client.call())
        writes = len(client.writes)
        client.respond(client.call())
        assert frames.EMPTY_TABLE_UPDATE + b"\x88" not in b"".join(client.writes[writes:])

    def test_larger_table_needs_no_update(self, client: Client) -> None:
        client.settings({Setting.HEADER_TABLE_SIZE: 4096})
        client.settings({Setting.HEADER_TABLE_SIZE: 65_536})
        assert client.respond(client.call()).message == b"world"
        assert client.decoder.header_table_size == 4096

    @pytest.mark.parametrize("kind", ["failure", "proxied", "http"])
    def test_table_update_precedes_any_next_block(self, client: Client, kind: str) -> None:
        client.decoder.max_allowed_table_size = 0
        client.settings({Setting.HEADER_TABLE_SIZE: 0})
        if kind == "failure":
            client.open(flags=END_STREAM)
        elif kind == "http":
            client.open(fields()[:4], flags=END_STREAM)
        else:
            client.call(b"1", fields(PROXIED_METHOD))
            client.connection.start_response(1)
            client.settle()
        assert client.decoder.header_table_size == 0

    def test_table_update_precedes_delayed_trailers(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        client.respond(client.call())
        client.decoder.max_allowed_table_size = 0
        client.settings({Setting.HEADER_TABLE_SIZE: 0, Setting.INITIAL_WINDOW_SIZE: 100})
        assert client.responses[1].message == b"world"
        assert client.respond(client.call()).message == b"world"

    def test_hpack_library_detects_a_missing_update(self, client: Client) -> None:
        client.decoder.max_allowed_table_size = 0
        client.call()
        with pytest.raises(InvalidTableSizeError):
            client.respond(1)


def test_headers_of_a_large_response_come_first(client: Client) -> None:
    client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
    client.respond(client.call())
    assert client.responses[1].blocks == [{":status": "200", "content-type": "application/grpc"}]
    client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, client.block([("a", "b")])))
    assert client.responses[1].reset == ErrorCode.STREAM_CLOSED
