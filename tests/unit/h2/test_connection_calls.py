"""HTTP/2 connection: calls, whole or in parts, and requests that are not gRPC."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Callable
from gzip import compress as gzip
from math import inf

import pytest

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.call_headers import deadline_in_s
from ratelimit_rls.h2.config import WINDOW_UPDATE_BYTES
from ratelimit_rls.h2.frame_handlers import MAX_UNFINISHED_BYTES
from ratelimit_rls.h2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME_BYTES,
    PADDED,
    WINDOW_UPDATE,
    ErrorCode,
    Setting,
    frame,
)
from ratelimit_rls.h2.request_stream import MAX_REJECTED_BODY_BYTES
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.h2.streams import MAX_DECIDED_SHARE
from tests.unit.h2.client import (
    MAX_MESSAGE_BYTES,
    MAX_STREAMS,
    METHOD,
    PROXIED_METHOD,
    Client,
    fields,
    prefixed,
)

TOO_LARGE = (StatusCode.RESOURCE_EXHAUSTED, "the message is too large; at most 4194304 bytes are read")
NOT_ONE = (StatusCode.INTERNAL, "the call must have exactly one message")


@pytest.fixture
def client() -> Client:
    return Client()


def compressed(message: bytes) -> bytes:
    return prefixed(message, compressed=1)


class TestMessages:
    def test_call_is_queued_with_its_headers(self, client: Client) -> None:
        client.call(b"1", fields(grpc_timeout="1500m", user="me"))
        ((connection, stream_id, message, at_s, head),) = client.server.queue
        assert (connection, stream_id, message) == (client.connection, 1, b"1")
        assert at_s == client.now_s
        assert (head.path, head.metadata) == ("/a.Service/Method", (("user", "me"),))
        assert client.server.queue_notifications == 1

    @pytest.mark.parametrize("message", [b"", b"x", b"x" * 10_000])
    def test_message_may_span_several_frames(self, client: Client, message: bytes) -> None:
        client.call(message)
        sent = prefixed(message)
        for cut in (0, 1, 4, 5, len(sent)):
            stream_id = client.open()
            client.data(stream_id, sent[:cut])
            client.data(stream_id, sent[cut:])
            client.data(stream_id, b"", END_STREAM)
        assert client.queued == [message] * 6
        assert client.connection._unfinished_bytes == 0
        assert client.server.queue_notifications == 6

    def test_partial_message_is_buffered(self, client: Client) -> None:
        stream_id = client.open()
        for number, byte in enumerate(prefixed(b"12345")):
            assert client.connection._unfinished_bytes == number
            client.data(stream_id, bytes([byte]))
        client.data(stream_id, b"", END_STREAM)
        assert (client.queued, client.connection._unfinished_bytes) == ([b"12345"], 0)

    @pytest.mark.parametrize("padding", [0, 1, 255])
    def test_padding_is_not_part_of_the_message(self, client: Client, padding: int) -> None:
        stream_id = client.open()
        client.data(stream_id, bytes([padding]) + prefixed(b"1") + b"\0" * padding, PADDED | END_STREAM)
        assert client.queued == [b"1"]

    @pytest.mark.parametrize("path", [METHOD, PROXIED_METHOD])
    def test_padding_is_returned_to_the_stream_window(self, client: Client, path: str) -> None:
        """Otherwise a padded stream would stall although nothing of it is buffered."""
        stream_id = client.open(fields(path))
        client.data(stream_id, b"\2x\0\0", PADDED)
        assert client.frames_of_type(WINDOW_UPDATE) == [(WINDOW_UPDATE, 0, stream_id, b"\0\0\0\3")]
        client.data(stream_id, b"\2\0\0\0\0\0\0", PADDED | END_STREAM)
        assert len(client.frames_of_type(WINDOW_UPDATE)) == 1

    def test_padding_longer_than_payload_closes_connection(self, client: Client) -> None:
        client.data(client.open(), b"\5abcd", PADDED)
        assert client.error == ErrorCode.PROTOCOL_ERROR

    @pytest.mark.parametrize("sent", [b"", b"\0\0\0\0", prefixed(b"123")[:-1]])
    def test_truncated_message_is_rejected(self, client: Client, sent: bytes) -> None:
        stream_id = client.open(data=sent)
        assert client.responses[stream_id].status == NOT_ONE
        assert client.responses[stream_id].has_ended
        assert (client.queued, client.connection._unfinished_bytes) == ([], 0)

    def test_call_without_a_message_is_rejected(self, client: Client) -> None:
        stream_id = client.open(flags=END_STREAM)
        assert client.responses[stream_id].status == NOT_ONE
        assert client.responses[stream_id].reset is None

    def test_second_message_is_rejected(self, client: Client) -> None:
        for flags in (0, END_STREAM):
            stream_id = client.open()
            client.data(stream_id, prefixed(b"1") + prefixed(b"2"), flags)
            assert client.responses[stream_id].status == NOT_ONE
            assert client.responses[stream_id].reset == ErrorCode.NO_ERROR
        assert (client.queued, client.connection._unfinished_bytes) == ([], 0)
        assert client.is_alive

    def test_oversized_message_is_rejected_by_its_prefix(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(b"")[:1] + (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        assert client.responses[stream_id].status == TOO_LARGE
        assert client.responses[stream_id].reset == ErrorCode.NO_ERROR
        assert client.connection._unfinished_bytes == 0

    def test_message_of_maximum_size_is_accepted(self, client: Client) -> None:
        sent = prefixed(b"x" * MAX_MESSAGE_BYTES)
        stream_id = client.open()
        for at in range(0, len(sent), MAX_FRAME_BYTES):
            client.data(stream_id, sent[at : at + MAX_FRAME_BYTES])
        client.data(stream_id, b"", END_STREAM)
        assert [len(message) for message in client.queued] == [MAX_MESSAGE_BYTES]
        given_back = [frames.parse_window_update(one.payload) for one in client.frames_of_type(WINDOW_UPDATE)]
        assert len(sent) - WINDOW_UPDATE_BYTES < sum(given_back) <= len(sent)

    def test_connection_window_is_replenished_for_whole_calls(self, client: Client) -> None:
        block, sent = client.plain_block(fields()), 0
        message = prefixed(b"x" * (MAX_FRAME_BYTES - 5))
        for stream_id in range(1, 200, 2):
            client.send(frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, message))
            client.respond(stream_id)
            sent += len(message)
        given_back = [frames.parse_window_update(one.payload) for one in client.frames_of_type(WINDOW_UPDATE)]
        assert len(given_back) == 1
        assert WINDOW_UPDATE_BYTES <= given_back[0] <= sent

    def test_unfinished_bytes_are_limited(self, client: Client) -> None:
        part = prefixed(b"x" * MAX_MESSAGE_BYTES)[:MAX_FRAME_BYTES]
        streams = [client.open() for _ in range(5)]
        sent = 0
        while not any(stream_id in client.responses for stream_id in streams):
            for stream_id in streams:
                if sent == 0 or stream_id not in client.responses:
                    client.data(stream_id, part if sent < 5 * MAX_FRAME_BYTES else b"x" * MAX_FRAME_BYTES)
                    sent += MAX_FRAME_BYTES
                assert client.connection._unfinished_bytes <= MAX_UNFINISHED_BYTES
        assert MAX_UNFINISHED_BYTES < sent <= MAX_UNFINISHED_BYTES + 5 * MAX_FRAME_BYTES
        (rejected,) = client.responses
        assert client.responses[rejected].status[0] == StatusCode.RESOURCE_EXHAUSTED
        assert client.responses[rejected].reset == ErrorCode.NO_ERROR
        client.disconnect()
        assert client.connection._unfinished_bytes == 0


FOLLOWING: dict[str, Callable[[int], bytes]] = {
    "message": lambda stream_id: frame(DATA, END_STREAM, stream_id, prefixed(b"hello")),
    "empty message": lambda stream_id: frame(DATA, END_STREAM, stream_id, prefixed(b"")),
    "message and PING": lambda stream_id: (
        frame(DATA, END_STREAM, stream_id, prefixed(b"hello")) + frame(frames.PING, 0, 0, b"12345678")
    ),
    "half a message": lambda stream_id: frame(DATA, END_STREAM, stream_id, prefixed(b"hello"))[:-2],
    "message that does not end the stream": lambda stream_id: frame(DATA, 0, stream_id, prefixed(b"hello")),
    "padded message": lambda stream_id: frame(DATA, END_STREAM | PADDED, stream_id, b"\1" + prefixed(b"hello") + b"\0"),
    "compressed message": lambda stream_id: frame(DATA, END_STREAM, stream_id, compressed(gzip(b"hello"))),
    "message without end": lambda stream_id: frame(DATA, END_STREAM, stream_id, prefixed(b"hello!")[:-1]),
    "two messages": lambda stream_id: frame(DATA, END_STREAM, stream_id, prefixed(b"hello") * 2),
    "message of an idle stream": lambda stream_id: frame(DATA, END_STREAM, stream_id + 2, prefixed(b"hello")),
    "message of a closed stream": lambda stream_id: frame(DATA, END_STREAM, 1, prefixed(b"hello")),
    "frame of another type": lambda stream_id: frame(frames.RST_STREAM, END_STREAM, stream_id, prefixed(b"")[:4]),
    "PRIORITY as long as a message": lambda stream_id: frame(frames.PRIORITY, END_STREAM, stream_id, prefixed(b"")),
    "largest frame": lambda stream_id: frame(DATA, END_STREAM, stream_id, prefixed(b"x" * (MAX_FRAME_BYTES - 5))),
    "frame that is too large": lambda stream_id: frame(
        DATA, END_STREAM, stream_id, prefixed(b"x" * (MAX_FRAME_BYTES - 4))
    ),
}


class TestCachedHeaderBlock:
    """A call with a cached header block is read together with the frame that follows."""

    @staticmethod
    def outcome(following: Callable[[int], bytes], *, at_once: bool) -> object:
        client = Client()
        block = client.plain_block(fields())
        client.send(frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, prefixed(b"first")))
        client.respond(1)
        pieces = [frame(HEADERS, END_HEADERS, 3, block), following(3)]
        for piece in [b"".join(pieces)] if at_once else pieces:
            client.send(piece)
        connection = client.connection
        return (
            client.queued,
            client.queued_ids,
            client.responses,
            client.connection_frames,
            client.is_closed,
            {stream_id: type(stream) for stream_id, stream in connection._streams.items()},
            (connection._last_id, connection._buffer, connection._unfinished_bytes, connection._unacknowledged_bytes),
        )

    @pytest.mark.parametrize("following", FOLLOWING)
    def test_next_frame_has_the_same_effect_together_or_later(self, following: str) -> None:
        assert self.outcome(FOLLOWING[following], at_once=True) == self.outcome(FOLLOWING[following], at_once=False)

    def test_message_in_the_same_read_is_queued(self) -> None:
        messages, *_ = self.outcome(FOLLOWING["message"], at_once=True)  # type: ignore[misc]
        assert messages == [b"first", b"hello"]  # type: ignore[has-type]


class TestLengths:
    @pytest.mark.parametrize("path", ["/a.Service/Method", PROXIED_METHOD])
    @pytest.mark.parametrize("difference", [-1, 0, 1])
    def test_body_must_match_content_length(self, client: Client, path: str, difference: int) -> None:
        sent = prefixed(b"123")
        stream_id = client.open(fields(path, content_length=f"{len(sent) + difference}"), data=sent)
        reset = client.responses[stream_id].reset if stream_id in client.responses else None
        assert reset == (ErrorCode.PROTOCOL_ERROR if difference else None)
        assert client.connection._unfinished_bytes == (len(sent) if path == PROXIED_METHOD and not difference else 0)

    @pytest.mark.parametrize("sent", [None, b""])
    def test_missing_body_must_match_content_length(self, client: Client, sent: bytes | None) -> None:
        flags = END_STREAM if sent is None else 0
        stream_id = client.open(fields(content_length="1"), flags=flags, data=sent)
        assert client.responses[stream_id].reset == ErrorCode.PROTOCOL_ERROR

    def test_body_of_a_rejected_request_must_match_content_length(self, client: Client) -> None:
        headers = [(":method", "GET"), (":scheme", "http"), (":path", "/"), ("content-length", "3")]
        stream_id = client.open(headers, data=b"12")
        assert client.responses[stream_id].reset == ErrorCode.PROTOCOL_ERROR
        stream_id = client.open(headers, data=b"123")
        assert client.responses[stream_id].blocks[0][":status"] == "405"

    def test_equal_content_lengths_are_accepted(self, client: Client) -> None:
        client.call(b"1", [*fields(content_length="6"), ("content-length", "6")])
        assert client.queued == [b"1"]


class TestCompressedMessages:
    @pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip), ("deflate", zlib.compress)])
    @pytest.mark.parametrize("message", [b"", b"hello", b"x" * MAX_MESSAGE_BYTES])
    def test_compressed_messages_are_decompressed(
        self, client: Client, encoding: str, pack: Callable[[bytes], bytes], message: bytes
    ) -> None:
        client.open(fields(grpc_encoding=encoding), data=compressed(pack(message)))
        assert client.queued == [message]

    def test_uncompressed_message_with_an_encoding_is_accepted(self, client: Client) -> None:
        client.call(b"plain", fields(grpc_encoding="gzip"))
        assert client.queued == [b"plain"]

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_decompression_bomb_is_rejected(self, client: Client, encoding: str) -> None:
        bomb = (gzip if encoding == "gzip" else zlib.compress)(bytes(MAX_MESSAGE_BYTES + 1))
        stream_id = client.open(fields(grpc_encoding=encoding), data=compressed(bomb))
        assert client.responses[stream_id].status == TOO_LARGE

    @pytest.mark.parametrize(
        ("encoding", "sent", "code"),
        [
            ("br", b"x", StatusCode.UNIMPLEMENTED),
            ("identity", b"x", StatusCode.UNIMPLEMENTED),
            ("gzip", b"x", StatusCode.INTERNAL),
            ("gzip", b"", StatusCode.INTERNAL),
            ("gzip", zlib.compress(b"x"), StatusCode.INTERNAL),
            pytest.param("gzip", gzip(b"hello")[:-1], StatusCode.INTERNAL, id="truncated gzip"),
            ("deflate", b"\xff\xff", StatusCode.INTERNAL),
        ],
    )
    def test_invalid_compression_is_rejected_with_a_message(
        self, client: Client, encoding: str, sent: bytes, code: StatusCode
    ) -> None:
        stream_id = client.open(fields(grpc_encoding=encoding), data=compressed(sent))
        assert client.responses[stream_id].status[0] == code
        assert "compressed" in client.responses[stream_id].status[1]
        assert client.queued == []


class TestHeaders:
    @pytest.mark.parametrize(
        ("text", "allowed_s"),
        [
            ("1H", 3600 * 0.99),
            ("2M", 120 * 0.99),
            ("3S", 3 * 0.99),
            ("1S", 0.99),
            ("20m", 0.02),
            ("300u", 0.0003),
            ("99999999n", 0.099999999),
            ("0S", 0),
        ],
    )
    def test_timeout_units(self, client: Client, text: str, allowed_s: float) -> None:
        client.call(b"1", fields(grpc_timeout=text))
        assert client.server.queue[0][4].deadline_in_s == pytest.approx(allowed_s)

    def test_call_without_timeout_has_no_deadline(self, client: Client) -> None:
        client.call()
        assert client.server.queue[0][4].deadline_in_s == inf

    @pytest.mark.parametrize("text", ["", "S", "1", "1s", "1.5S", "-1S", "123456789S", "1 S", "٣S"])
    def test_invalid_timeout_is_rejected(self, client: Client, text: str) -> None:
        stream_id = client.open(fields(grpc_timeout=text), data=prefixed(b"1"))
        assert client.responses[stream_id].status == (
            StatusCode.INTERNAL,
            "invalid request headers: grpc-timeout must be up to eight digits and a unit",
        )
        assert client.responses[stream_id].reset == ErrorCode.NO_ERROR
        assert client.queued == []

    def test_rejected_call_that_has_ended_is_not_reset(self, client: Client) -> None:
        stream_id = client.open(fields(grpc_timeout="soon"), flags=END_STREAM)
        assert client.responses[stream_id].has_ended
        assert client.responses[stream_id].reset is None

    def test_metadata_excludes_transport_fields(self, client: Client) -> None:
        headers = fields(grpc_timeout="1S", user_agent="x", grpc_encoding="identity", a="1", content_length="6")
        client.call(b"1", [*headers, ("b", "2"), ("a", "3")])
        assert client.server.queue[0][4].metadata == (("a", "1"), ("b", "2"), ("a", "3"))

    @pytest.mark.parametrize("value", [b"", b"1", b"12", b"123", b"\0\xff\xfe"])
    def test_binary_metadata_is_decoded(self, client: Client, value: bytes) -> None:
        padded = b64encode(value).decode()
        for text in (padded, padded.rstrip("=")):
            client.call(b"1", fields(PROXIED_METHOD, a_bin=text))
        assert [call.headers.metadata for call in client.server.proxied.values()] == [(("a-bin", value),)] * 2

    def test_joined_binary_metadata_is_split(self, client: Client) -> None:
        """The gRPC protocol allows intermediaries to join values with commas."""
        stream_id = client.call(b"1", fields(PROXIED_METHOD, a_bin="MQ,Mg==, Mw", b="x,y"))
        metadata = client.server.proxied[stream_id].headers.metadata
        assert metadata == (("b", "x,y"), ("a-bin", b"1"), ("a-bin", b"2"), ("a-bin", b"3"))

    @pytest.mark.parametrize("text", ["a", "a b=", "!!!!", "===="])
    def test_invalid_binary_metadata_is_rejected(self, client: Client, text: str) -> None:
        stream_id = client.open(fields(PROXIED_METHOD, a_bin=text), data=prefixed(b"1"))
        assert client.responses[stream_id].status == (
            StatusCode.INTERNAL,
            "invalid request headers: -bin metadata must be base64",
        )


class TestOtherRequests:
    def test_other_http_methods_get_405(self, client: Client) -> None:
        stream_id = client.open([(":method", "GET"), *fields()[1:]], flags=END_STREAM)
        response = client.responses[stream_id]
        assert response.blocks == [{":status": "405", "content-type": "text/plain"}]
        assert response.data == b"this is a gRPC port: the method must be POST\n"
        assert (response.has_ended, response.reset) == (True, None)

    @pytest.mark.parametrize(
        "headers",
        [
            fields(content_type="application/json"),
            fields(content_type="application/grpc-web"),
            fields(content_type="application/grpcx"),
            fields()[:4],
        ],
    )
    def test_other_content_types_get_415(self, client: Client, headers: list[tuple[str, str]]) -> None:
        stream_id = client.open(headers)
        client.data(stream_id, b"{}")
        assert stream_id not in client.responses  # the response is sent at its end
        client.data(stream_id, b"", END_STREAM)
        response = client.responses[stream_id]
        assert response.blocks == [{":status": "415", "content-type": "text/plain"}]
        assert response.data == b"this is a gRPC port: the content-type must be application/grpc\n"
        assert (response.has_ended, response.reset) == (True, None)

    @pytest.mark.parametrize("text", ["application/grpc+proto", "application/grpc;charset=utf-8"])
    def test_grpc_content_types_are_accepted(self, client: Client, text: str) -> None:
        client.call(b"1", fields(content_type=text))
        assert client.queued == [b"1"]

    def test_http_error_waits_for_flow_control(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.open(fields()[:4], flags=END_STREAM)
        assert client.connection.is_waiting(stream_id)
        assert (client.responses[stream_id].data, client.responses[stream_id].has_ended) == (b"", False)
        client.window(stream_id, 100)
        assert client.responses[stream_id].data.endswith(b"application/grpc\n")
        assert client.responses[stream_id].has_ended
        assert not client.connection.is_waiting(stream_id)

    def test_body_of_a_rejected_request_is_limited(self, client: Client) -> None:
        stream_id = client.open(fields()[:4])
        sent = 0
        while stream_id not in client.responses:
            client.data(stream_id, b"x" * 8192)
            sent += 8192
        assert sent == MAX_REJECTED_BODY_BYTES + 8192
        assert client.responses[stream_id].blocks == [{":status": "415", "content-type": "text/plain"}]
        assert client.responses[stream_id].data.startswith(b"this is a gRPC port")
        assert client.responses[stream_id].has_ended
        assert client.responses[stream_id].reset == ErrorCode.NO_ERROR
        assert client.is_alive

    def test_rejected_request_can_be_cancelled(self, client: Client) -> None:
        stream_id = client.open(fields()[:4])
        client.reset(stream_id)
        assert client.server.cancelled_ids == []
        assert client.is_alive


class TestResponses:
    def test_failed_call_gets_status_and_message(self, client: Client) -> None:
        stream_id = client.call()
        client.connection.fail(stream_id, RpcError(StatusCode.UNAVAILABLE, "100% schön\n"))
        client.settle()
        assert client.responses[stream_id].blocks == [
            {
                ":status": "200",
                "content-type": "application/grpc",
                "grpc-status": "14",
                "grpc-message": "100%25 sch%C3%B6n%0A",
            }
        ]
        assert client.responses[stream_id].has_ended
        assert not client.connection.is_waiting(stream_id)

    @pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 40_000])
    def test_responses_of_any_size(self, client: Client, size: int) -> None:
        message = bytes(size % 251 for size in range(size))
        assert client.respond(client.call(), message).message == message


class TestProxiedCalls:
    def test_response_of_several_messages(self, client: Client) -> None:
        stream_id = client.call(b"1", fields(PROXIED_METHOD))
        call = client.server.proxied[stream_id]
        assert (call.taken, call.has_ended) == (prefixed(b"1"), True)
        client.connection.start_response(stream_id)
        assert client.connection.send_message(stream_id, b"a")
        assert client.connection.send_message(stream_id, b"b")
        client.connection.end_response(stream_id, 0, "", ())
        client.settle()
        response = client.responses[stream_id]
        assert response.blocks == [{":status": "200", "content-type": "application/grpc"}, {"grpc-status": "0"}]
        assert response.data == prefixed(b"a") + prefixed(b"b")
        assert (response.has_ended, response.reset) == (True, None)
        assert not client.frames_of_type(WINDOW_UPDATE)
        assert client.connection._unfinished_bytes == 0

    def test_response_may_end_before_its_request(self, client: Client) -> None:
        stream_id = client.open(fields(PROXIED_METHOD))
        client.data(stream_id, b"12345")
        client.connection.end_response(stream_id, 5, "no such thing", (("a", "1"), ("b-bin", b"\0")))
        client.settle()
        response = client.responses[stream_id]
        head = {":status": "200", "content-type": "application/grpc"}
        assert response.blocks == [
            head | {"grpc-status": "5", "grpc-message": "no such thing", "a": "1", "b-bin": "AA=="}
        ]
        assert (response.has_ended, response.reset) == (True, ErrorCode.NO_ERROR)
        assert client.connection._unfinished_bytes == 0
        client.data(stream_id, b"12345", END_STREAM)
        assert client.is_alive

    def test_received_bytes_count_until_the_call_ends(self, client: Client) -> None:
        """The server is notified immediately when the call ends: the client may never send anything again."""
        before_bytes = client.server.buffered_bytes
        stream_id = client.open(fields(PROXIED_METHOD))
        client.data(stream_id, bytes(1000))
        assert client.server.buffered_bytes - before_bytes == 1000
        client.connection.start_response(stream_id)
        client.connection.end_response(stream_id, 0, "", ())
        assert client.server.buffered_bytes == before_bytes

    def test_error_may_have_metadata(self, client: Client) -> None:
        stream_id = client.open(fields(PROXIED_METHOD))
        client.server.proxied[stream_id].failure = RpcError(StatusCode.UNIMPLEMENTED, "no", metadata=(("a", "1"),))
        client.data(stream_id, b"12345")
        assert client.responses[stream_id].blocks[0]["a"] == "1"

    def test_error_on_data_cancels_the_call(self, client: Client) -> None:
        stream_id = client.open(fields(PROXIED_METHOD))
        call = client.server.proxied[stream_id]
        call.failure = RpcError(StatusCode.INTERNAL, "no")
        client.data(stream_id, b"12345")
        assert call.is_cancelled
        assert client.responses[stream_id].status == (StatusCode.INTERNAL, "no")
        assert client.connection._unfinished_bytes == 0

    def test_error_at_end_of_request_cancels_the_call(self, client: Client) -> None:
        stream_id = client.open(fields(PROXIED_METHOD))
        call = client.server.proxied[stream_id]
        call.failure_at_end = RpcError(StatusCode.INTERNAL, "no")
        client.data(stream_id, b"12345", END_STREAM)
        assert call.is_cancelled
        assert client.responses[stream_id].status == (StatusCode.INTERNAL, "no")
        assert client.responses[stream_id].reset is None
        assert client.connection._unfinished_bytes == 0

    @pytest.mark.parametrize("when", ["failure", "failure_at_end"])
    def test_error_after_response_started_sends_headers_once(self, client: Client, when: str) -> None:
        stream_id = client.open(fields(PROXIED_METHOD))
        client.connection.start_response(stream_id)
        client.connection.send_message(stream_id, b"a")
        setattr(client.server.proxied[stream_id], when, RpcError(StatusCode.INTERNAL, "no"))
        client.data(stream_id, b"12345", END_STREAM)
        assert client.responses[stream_id].blocks[1:] == [{"grpc-status": "13", "grpc-message": "no"}]

    def test_call_is_notified_when_it_can_write_again(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 7})
        stream_id = client.call(b"1", fields(PROXIED_METHOD))
        call = client.server.proxied[stream_id]
        client.connection.start_response(stream_id)
        assert client.connection.send_message(stream_id, b"a")
        assert not client.connection.send_message(stream_id, b"b")
        client.window(stream_id, 4)
        assert call.window_openings == 0
        client.window(stream_id, 4)
        assert call.window_openings == 1
        assert client.connection.is_waiting(stream_id)
        client.settle()
        assert client.responses[stream_id].data == prefixed(b"a") + prefixed(b"b")


def test_many_calls_in_one_read(client: Client) -> None:
    block = client.plain_block(fields())
    sent = b"".join(
        frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, prefixed(b"%d" % stream_id))
        for stream_id in (1, 3, 5, 7)
    )
    client.send(sent)
    assert client.queued == [b"1", b"3", b"5", b"7"]
    assert client.server.queue_notifications == 1


class TestCancelledCallsBeingDecided:
    def cancelled(self, client: Client, count: int) -> list[int]:
        stream_ids = []
        for _ in range(count):
            stream_ids.append(client.call())
            client.reset(stream_ids[-1])
        assert client.server.cancelled_ids == stream_ids
        client.responses.clear()
        return stream_ids

    def test_cancelled_calls_take_no_place_of_others(self, client: Client) -> None:
        self.cancelled(client, (MAX_DECIDED_SHARE - 1) * MAX_STREAMS)
        calls = [client.call() for _ in range(MAX_STREAMS + 1)]
        assert [client.connection.is_waiting(one) for one in calls] == [True] * MAX_STREAMS + [False]
        assert client.responses[calls[-1]].reset is ErrorCode.REFUSED_STREAM

    def test_number_of_cancelled_calls_that_are_being_decided_is_limited(self, client: Client) -> None:
        """Otherwise a client that opens and cancels calls could make the store decide without limit."""
        stream_ids = self.cancelled(client, MAX_DECIDED_SHARE * MAX_STREAMS)

        assert client.responses[client.call()].reset is ErrorCode.REFUSED_STREAM
        client.connection.respond(stream_ids[0], b"late")
        client.connection.fail(stream_ids[1], RpcError(StatusCode.UNAVAILABLE, "late"))
        client.connection.discard()
        more = [client.call() for _ in range(4)]
        assert [client.connection.is_waiting(stream_id) for stream_id in more] == [True, True, True, False]
        assert set(client.responses) == {stream_ids[-1] + 2, more[-1]}

    def test_cancelled_delayed_call_is_closed_at_once(self, client: Client) -> None:
        client.server.delays_all = True
        for stream_id in [client.call() for _ in range(MAX_STREAMS)]:
            client.reset(stream_id)
        assert client.connection.is_waiting(client.call())

    def test_cancelled_calls_in_one_read_respect_the_stream_limit(self, client: Client) -> None:
        block = client.plain_block(fields())
        client.send(b"".join(_cancelled_call(block, stream_id) for stream_id in range(1, 20 * MAX_STREAMS, 2)))
        assert len(client.server.queue) == MAX_DECIDED_SHARE * MAX_STREAMS


def _cancelled_call(block: bytes, stream_id: int) -> bytes:
    """Frames of a complete call and of its cancellation."""
    call = frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, prefixed(b"x"))
    return call + frames.rst_stream(stream_id, ErrorCode.CANCEL)


def test_client_rounding_is_subtracted_from_the_deadline() -> None:
    """Clients send 1.51 s for 1.5 s, and 20.1 s for 20 s."""
    assert deadline_in_s(None) == inf
    assert deadline_in_s(0.02) == 0.02
    assert deadline_in_s(1.51) <= 1.5
    assert deadline_in_s(20.1) <= 20
    assert deadline_in_s(20.1) > 19.8
