"""A connection of the native transport: what becomes of calls, whole or in parts, and of what is no call."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Callable
from gzip import compress as gzip
from math import inf
from time import monotonic

import pytest

from ratelimit_rls.transport.grpc.arriving import MOST_TURNED_AWAY_BYTES
from ratelimit_rls.transport.grpc.connection import GIVE_BACK_BYTES, MOST_HELD_BYTES
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.http2 import frames
from ratelimit_rls.transport.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MOST_FRAME_BYTES,
    PADDED,
    WINDOW_UPDATE,
    ErrorCode,
    Setting,
    frame,
)
from tests.unit.transport.http2_client import (
    METHOD,
    MOST_MESSAGE_BYTES,
    MOST_STREAMS,
    RELAYED,
    Client,
    fields,
    prefixed,
)

TOO_LARGE = (FailureCode.RESOURCE_EXHAUSTED, "the message is too large; at most 4194304 bytes are read")
NOT_ONE = (FailureCode.INTERNAL, "the call has to have exactly one message")


@pytest.fixture
def client() -> Client:
    return Client()


def compressed(message: bytes) -> bytes:
    return prefixed(message, compressed=1)


class TestMessages:
    def test_a_call_is_handed_over_with_its_head(self, client: Client) -> None:
        before_s = monotonic()
        client.ask(b"1", fields(grpc_timeout="1500m", user="me"))
        ((connection, stream_id, message, at_s, head),) = client.host.gathering
        assert (connection, stream_id, message) == (client.connection, 1, b"1")
        assert before_s <= at_s <= monotonic()
        assert (head.path, head.metadata) == ("/a.Service/Method", (("user", "me"),))
        assert client.host.gathered_times == 1

    @pytest.mark.parametrize("message", [b"", b"x", b"x" * 10_000])
    def test_one_frame_or_several_it_is_the_same_call(self, client: Client, message: bytes) -> None:
        client.ask(message)
        sent = prefixed(message)
        for cut in (0, 1, 4, 5, len(sent)):
            stream_id = client.open()
            client.data(stream_id, sent[:cut])
            client.data(stream_id, sent[cut:])
            client.data(stream_id, b"", END_STREAM)
        assert client.asked == [message] * 6
        assert client.connection._held_bytes == 0
        assert client.host.gathered_times == 6

    def test_what_is_not_whole_is_held(self, client: Client) -> None:
        stream_id = client.open()
        for number, byte in enumerate(prefixed(b"12345")):
            assert client.connection._held_bytes == number
            client.data(stream_id, bytes([byte]))
        client.data(stream_id, b"", END_STREAM)
        assert (client.asked, client.connection._held_bytes) == ([b"12345"], 0)

    @pytest.mark.parametrize("padding", [0, 1, 255])
    def test_padding_is_no_part_of_it(self, client: Client, padding: int) -> None:
        stream_id = client.open()
        client.data(stream_id, bytes([padding]) + prefixed(b"1") + b"\0" * padding, PADDED | END_STREAM)
        assert client.asked == [b"1"]

    @pytest.mark.parametrize("path", [METHOD, RELAYED])
    def test_padding_takes_no_room(self, client: Client, path: str) -> None:
        """Or a stream that is padded well comes to a halt with nothing held of it."""
        stream_id = client.open(fields(path))
        client.data(stream_id, b"\2x\0\0", PADDED)
        assert client.of_kind(WINDOW_UPDATE) == [(WINDOW_UPDATE, 0, stream_id, b"\0\0\0\3")]
        client.data(stream_id, b"\2\0\0\0\0\0\0", PADDED | END_STREAM)
        assert len(client.of_kind(WINDOW_UPDATE)) == 1

    def test_more_padding_than_payload_ends_the_connection(self, client: Client) -> None:
        client.data(client.open(), b"\5abcd", PADDED)
        assert client.fault == ErrorCode.PROTOCOL_ERROR

    @pytest.mark.parametrize("sent", [b"", b"\0\0\0\0", prefixed(b"123")[:-1]])
    def test_one_that_is_cut_short_is_none(self, client: Client, sent: bytes) -> None:
        stream_id = client.open(data=sent)
        assert client.answers[stream_id].status == NOT_ONE
        assert client.answers[stream_id].has_ended
        assert (client.asked, client.connection._held_bytes) == ([], 0)

    def test_nor_is_a_head_alone(self, client: Client) -> None:
        stream_id = client.open(flags=END_STREAM)
        assert client.answers[stream_id].status == NOT_ONE
        assert client.answers[stream_id].reset is None

    def test_two_are_one_too_many(self, client: Client) -> None:
        for flags in (0, END_STREAM):
            stream_id = client.open()
            client.data(stream_id, prefixed(b"1") + prefixed(b"2"), flags)
            assert client.answers[stream_id].status == NOT_ONE
            assert client.answers[stream_id].reset == ErrorCode.NO_ERROR
        assert (client.asked, client.connection._held_bytes) == ([], 0)
        assert client.is_well

    def test_one_that_is_too_large_is_refused_when_it_says_so(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(b"")[:1] + (MOST_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        assert client.answers[stream_id].status == TOO_LARGE
        assert client.answers[stream_id].reset == ErrorCode.NO_ERROR
        assert client.connection._held_bytes == 0

    def test_one_of_the_largest_size_is_taken(self, client: Client) -> None:
        sent = prefixed(b"x" * MOST_MESSAGE_BYTES)
        stream_id = client.open()
        for at in range(0, len(sent), MOST_FRAME_BYTES):
            client.data(stream_id, sent[at : at + MOST_FRAME_BYTES])
        client.data(stream_id, b"", END_STREAM)
        assert [len(message) for message in client.asked] == [MOST_MESSAGE_BYTES]
        given_back = [frames.read_window_update(one.payload) for one in client.of_kind(WINDOW_UPDATE)]
        assert len(sent) - GIVE_BACK_BYTES < sum(given_back) <= len(sent)

    def test_the_connection_has_its_window_back_for_calls_in_one_frame(self, client: Client) -> None:
        block, sent = client.plain_block(fields()), 0
        message = prefixed(b"x" * (MOST_FRAME_BYTES - 5))
        for stream_id in range(1, 200, 2):
            client.give(frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, message))
            client.answer(stream_id)
            sent += len(message)
        given_back = [frames.read_window_update(one.payload) for one in client.of_kind(WINDOW_UPDATE)]
        assert len(given_back) == 1
        assert GIVE_BACK_BYTES <= given_back[0] <= sent

    def test_so_many_bytes_are_held_and_no_more(self, client: Client) -> None:
        part = prefixed(b"x" * MOST_MESSAGE_BYTES)[:MOST_FRAME_BYTES]
        streams = [client.open() for _ in range(5)]
        sent = 0
        while not any(stream_id in client.answers for stream_id in streams):
            for stream_id in streams:
                if sent == 0 or stream_id not in client.answers:
                    client.data(stream_id, part if sent < 5 * MOST_FRAME_BYTES else b"x" * MOST_FRAME_BYTES)
                    sent += MOST_FRAME_BYTES
                assert client.connection._held_bytes <= MOST_HELD_BYTES
        assert MOST_HELD_BYTES < sent <= MOST_HELD_BYTES + 5 * MOST_FRAME_BYTES
        (refused,) = client.answers
        assert client.answers[refused].status[0] == FailureCode.RESOURCE_EXHAUSTED
        assert client.answers[refused].reset == ErrorCode.NO_ERROR
        client.lose()
        assert client.connection._held_bytes == 0


class TestLengths:
    @pytest.mark.parametrize("path", ["/a.Service/Method", RELAYED])
    @pytest.mark.parametrize("difference", [-1, 0, 1])
    def test_a_body_is_as_long_as_its_head_says(self, client: Client, path: str, difference: int) -> None:
        sent = prefixed(b"123")
        stream_id = client.open(fields(path, content_length=f"{len(sent) + difference}"), data=sent)
        reset = client.answers[stream_id].reset if stream_id in client.answers else None
        assert reset == (ErrorCode.PROTOCOL_ERROR if difference else None)
        assert client.connection._held_bytes == (len(sent) if path == RELAYED and not difference else 0)

    @pytest.mark.parametrize("sent", [None, b""])
    def test_also_one_that_is_not_there(self, client: Client, sent: bytes | None) -> None:
        flags = END_STREAM if sent is None else 0
        stream_id = client.open(fields(content_length="1"), flags=flags, data=sent)
        assert client.answers[stream_id].reset == ErrorCode.PROTOCOL_ERROR

    def test_also_of_what_is_no_call(self, client: Client) -> None:
        headers = [(":method", "GET"), (":scheme", "http"), (":path", "/"), ("content-length", "3")]
        stream_id = client.open(headers, data=b"12")
        assert client.answers[stream_id].reset == ErrorCode.PROTOCOL_ERROR
        stream_id = client.open(headers, data=b"123")
        assert client.answers[stream_id].blocks[0][":status"] == "405"

    def test_the_length_may_be_said_twice(self, client: Client) -> None:
        client.ask(b"1", [*fields(content_length="6"), ("content-length", "6")])
        assert client.asked == [b"1"]


class TestCompressedMessages:
    @pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip), ("deflate", zlib.compress)])
    @pytest.mark.parametrize("message", [b"", b"hello", b"x" * MOST_MESSAGE_BYTES])
    def test_they_are_unpacked(
        self, client: Client, encoding: str, pack: Callable[[bytes], bytes], message: bytes
    ) -> None:
        client.open(fields(grpc_encoding=encoding), data=compressed(pack(message)))
        assert client.asked == [message]

    def test_a_message_need_not_be_packed(self, client: Client) -> None:
        client.ask(b"plain", fields(grpc_encoding="gzip"))
        assert client.asked == [b"plain"]

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_a_bomb_is_not_unpacked(self, client: Client, encoding: str) -> None:
        bomb = (gzip if encoding == "gzip" else zlib.compress)(bytes(MOST_MESSAGE_BYTES + 1))
        stream_id = client.open(fields(grpc_encoding=encoding), data=compressed(bomb))
        assert client.answers[stream_id].status == TOO_LARGE

    @pytest.mark.parametrize(
        ("encoding", "sent", "code"),
        [
            ("br", b"x", FailureCode.UNIMPLEMENTED),
            ("identity", b"x", FailureCode.UNIMPLEMENTED),
            ("gzip", b"x", FailureCode.INTERNAL),
            ("gzip", b"", FailureCode.INTERNAL),
            ("gzip", zlib.compress(b"x"), FailureCode.INTERNAL),
            ("gzip", gzip(b"hello")[:-1], FailureCode.INTERNAL),
            ("deflate", b"\xff\xff", FailureCode.INTERNAL),
        ],
    )
    def test_what_cannot_be_unpacked_is_told_so(
        self, client: Client, encoding: str, sent: bytes, code: FailureCode
    ) -> None:
        stream_id = client.open(fields(grpc_encoding=encoding), data=compressed(sent))
        assert client.answers[stream_id].status[0] == code
        assert "compressed" in client.answers[stream_id].status[1]
        assert client.asked == []


class TestHeads:
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
    def test_how_long_a_caller_waits(self, client: Client, text: str, allowed_s: float) -> None:
        client.ask(b"1", fields(grpc_timeout=text))
        assert client.host.gathering[0][4].allowed_s == pytest.approx(allowed_s)

    def test_it_may_wait_for_ever(self, client: Client) -> None:
        client.ask()
        assert client.host.gathering[0][4].allowed_s == inf

    @pytest.mark.parametrize("text", ["", "S", "1", "1s", "1.5S", "-1S", "123456789S", "1 S", "٣S"])
    def test_a_timeout_that_is_none(self, client: Client, text: str) -> None:
        stream_id = client.open(fields(grpc_timeout=text), data=prefixed(b"1"))
        assert client.answers[stream_id].status == (
            FailureCode.INTERNAL,
            "the call's headers cannot be read: grpc-timeout is not a number of up to eight digits and a unit",
        )
        assert client.answers[stream_id].reset == ErrorCode.NO_ERROR
        assert client.asked == []

    def test_one_with_nothing_but_a_wrong_head_is_not_reset(self, client: Client) -> None:
        stream_id = client.open(fields(grpc_timeout="soon"), flags=END_STREAM)
        assert client.answers[stream_id].has_ended
        assert client.answers[stream_id].reset is None

    def test_metadata_is_what_the_caller_wrote(self, client: Client) -> None:
        headers = fields(grpc_timeout="1S", user_agent="x", grpc_encoding="identity", a="1", content_length="6")
        client.ask(b"1", [*headers, ("b", "2"), ("a", "3")])
        assert client.host.gathering[0][4].metadata == (("a", "1"), ("b", "2"), ("a", "3"))

    @pytest.mark.parametrize("value", [b"", b"1", b"12", b"123", b"\0\xff\xfe"])
    def test_metadata_of_bytes(self, client: Client, value: bytes) -> None:
        padded = b64encode(value).decode()
        for text in (padded, padded.rstrip("=")):
            client.ask(b"1", fields(a_bin=text))
        assert [head.metadata for *_, head in client.host.gathering] == [(("a-bin", value),)] * 2

    def test_metadata_of_bytes_may_have_been_joined(self, client: Client) -> None:
        """By anybody on the way: the protocol allows that, and names commas as what to split by."""
        client.ask(b"1", fields(a_bin="MQ,Mg==, Mw", b="x,y"))
        assert client.host.gathering[0][4].metadata == (("a-bin", b"1"), ("a-bin", b"2"), ("a-bin", b"3"), ("b", "x,y"))

    @pytest.mark.parametrize("text", ["a", "a b=", "!!!!", "===="])
    def test_metadata_of_bytes_that_is_none(self, client: Client, text: str) -> None:
        stream_id = client.open(fields(a_bin=text), data=prefixed(b"1"))
        assert client.answers[stream_id].status == (
            FailureCode.INTERNAL,
            "the call's headers cannot be read: metadata whose name ends in -bin is not base64",
        )


class TestWhatIsNoCall:
    def test_another_method(self, client: Client) -> None:
        stream_id = client.open([(":method", "GET"), *fields()[1:]], flags=END_STREAM)
        answer = client.answers[stream_id]
        assert answer.blocks == [{":status": "405", "content-type": "text/plain"}]
        assert answer.data == b"this is a gRPC port: calls are POST requests\n"
        assert (answer.has_ended, answer.reset) == (True, None)

    @pytest.mark.parametrize(
        "headers",
        [
            fields(content_type="application/json"),
            fields(content_type="application/grpc-web"),
            fields(content_type="application/grpcx"),
            fields()[:4],
        ],
    )
    def test_another_type(self, client: Client, headers: list[tuple[str, str]]) -> None:
        stream_id = client.open(headers)
        client.data(stream_id, b"{}")
        assert stream_id not in client.answers  # it is told at its end
        client.data(stream_id, b"", END_STREAM)
        answer = client.answers[stream_id]
        assert answer.blocks == [{":status": "415", "content-type": "text/plain"}]
        assert answer.data == b"this is a gRPC port: calls have a content-type of application/grpc\n"
        assert (answer.has_ended, answer.reset) == (True, None)

    @pytest.mark.parametrize("text", ["application/grpc+proto", "application/grpc;charset=utf-8"])
    def test_types_of_calls(self, client: Client, text: str) -> None:
        client.ask(b"1", fields(content_type=text))
        assert client.asked == [b"1"]

    def test_words_wait_for_room_as_answers_do(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.open(fields()[:4], flags=END_STREAM)
        assert client.connection.waits(stream_id)
        assert (client.answers[stream_id].data, client.answers[stream_id].has_ended) == (b"", False)
        client.window(stream_id, 100)
        assert client.answers[stream_id].data.endswith(b"application/grpc\n")
        assert client.answers[stream_id].has_ended
        assert not client.connection.waits(stream_id)

    def test_one_that_does_not_end_is_not_read_for_ever(self, client: Client) -> None:
        stream_id = client.open(fields()[:4])
        sent = 0
        while stream_id not in client.answers:
            client.data(stream_id, b"x" * 8192)
            sent += 8192
        assert sent == MOST_TURNED_AWAY_BYTES + 8192
        assert client.answers[stream_id].blocks == [{":status": "415", "content-type": "text/plain"}]
        assert client.answers[stream_id].data.startswith(b"this is a gRPC port")
        assert client.answers[stream_id].has_ended
        assert client.answers[stream_id].reset == ErrorCode.NO_ERROR
        assert client.is_well

    def test_its_caller_may_leave(self, client: Client) -> None:
        stream_id = client.open(fields()[:4])
        client.reset(stream_id)
        assert client.host.left_ids == []
        assert client.is_well


class TestAnswers:
    def test_a_call_that_fails_is_told_why(self, client: Client) -> None:
        stream_id = client.ask()
        client.connection.fail(stream_id, Failure(FailureCode.UNAVAILABLE, "100% schön\n"))
        client.settle()
        assert client.answers[stream_id].blocks == [
            {
                ":status": "200",
                "content-type": "application/grpc",
                "grpc-status": "14",
                "grpc-message": "100%25 sch%C3%B6n%0A",
            }
        ]
        assert client.answers[stream_id].has_ended
        assert not client.connection.waits(stream_id)

    @pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 40_000])
    def test_messages_of_any_size(self, client: Client, size: int) -> None:
        message = bytes(size % 251 for size in range(size))
        assert client.answer(client.ask(), message).message == message


class TestRelayedCalls:
    def test_an_answer_of_several_messages(self, client: Client) -> None:
        stream_id = client.ask(b"1", fields(RELAYED))
        call = client.host.relayed[stream_id]
        assert (call.taken, call.has_ended) == (prefixed(b"1"), True)
        client.hand_on(stream_id, 6)
        client.connection.begin(stream_id)
        assert client.connection.send(stream_id, b"a")
        assert client.connection.send(stream_id, b"b")
        client.connection.end(stream_id, 0, "", ())
        client.settle()
        answer = client.answers[stream_id]
        assert answer.blocks == [{":status": "200", "content-type": "application/grpc"}, {"grpc-status": "0"}]
        assert answer.data == prefixed(b"a") + prefixed(b"b")
        assert (answer.has_ended, answer.reset) == (True, None)
        assert not client.of_kind(WINDOW_UPDATE)
        assert client.connection._held_bytes == 0

    def test_one_that_ends_before_its_request(self, client: Client) -> None:
        stream_id = client.open(fields(RELAYED))
        client.data(stream_id, b"12345")
        client.connection.end(stream_id, 5, "no such thing", (("a", "1"), ("b-bin", b"\0")))
        client.settle()
        answer = client.answers[stream_id]
        head = {":status": "200", "content-type": "application/grpc"}
        assert answer.blocks == [
            head | {"grpc-status": "5", "grpc-message": "no such thing", "a": "1", "b-bin": "AA=="}
        ]
        assert (answer.has_ended, answer.reset) == (True, ErrorCode.NO_ERROR)
        assert client.connection._held_bytes == 0
        client.data(stream_id, b"12345", END_STREAM)
        assert client.is_well

    def test_what_was_handed_on_may_be_sent_again(self, client: Client) -> None:
        stream_id = client.open(fields(RELAYED))
        client.data(stream_id, b"12345")
        client.hand_on(stream_id, 5)
        assert client.of_kind(WINDOW_UPDATE) == [(WINDOW_UPDATE, 0, stream_id, b"\0\0\0\5")]
        assert client.connection._held_bytes == 0

    def test_a_message_may_take_more_here_than_on_the_wire(self, client: Client) -> None:
        stream_id = client.open(fields(RELAYED))
        client.host.relayed[stream_id].held_bytes = client.connection._held_bytes = 1000
        client.hand_on(stream_id, 5, held_bytes=990)
        assert client.of_kind(WINDOW_UPDATE) == [(WINDOW_UPDATE, 0, stream_id, b"\0\0\0\5")]
        assert client.connection._held_bytes == 10

    def test_one_that_cannot_be_taken_is_cancelled(self, client: Client) -> None:
        stream_id = client.open(fields(RELAYED))
        call = client.host.relayed[stream_id]
        call.failure = Failure(FailureCode.INTERNAL, "no")
        client.data(stream_id, b"12345")
        assert call.is_cancelled
        assert client.answers[stream_id].status == (FailureCode.INTERNAL, "no")
        assert client.connection._held_bytes == 0

    def test_one_that_cannot_end_so_is_cancelled(self, client: Client) -> None:
        stream_id = client.open(fields(RELAYED))
        call = client.host.relayed[stream_id]
        call.failure_at_end = Failure(FailureCode.INTERNAL, "no")
        client.data(stream_id, b"12345", END_STREAM)
        assert call.is_cancelled
        assert client.answers[stream_id].status == (FailureCode.INTERNAL, "no")
        assert client.answers[stream_id].reset is None
        assert client.connection._held_bytes == 0

    @pytest.mark.parametrize("when", ["failure", "failure_at_end"])
    def test_one_that_fails_within_its_answer_has_one_head(self, client: Client, when: str) -> None:
        stream_id = client.open(fields(RELAYED))
        client.connection.begin(stream_id)
        client.connection.send(stream_id, b"a")
        setattr(client.host.relayed[stream_id], when, Failure(FailureCode.INTERNAL, "no"))
        client.data(stream_id, b"12345", END_STREAM)
        assert client.answers[stream_id].blocks[1:] == [{"grpc-status": "13", "grpc-message": "no"}]

    def test_it_is_told_when_there_is_room_again(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 7})
        stream_id = client.ask(b"1", fields(RELAYED))
        call = client.host.relayed[stream_id]
        client.connection.begin(stream_id)
        assert client.connection.send(stream_id, b"a")
        assert not client.connection.send(stream_id, b"b")
        client.window(stream_id, 4)
        assert call.rooms == 0
        client.window(stream_id, 4)
        assert call.rooms == 1
        assert client.connection.waits(stream_id)
        client.settle()
        assert client.answers[stream_id].data == prefixed(b"a") + prefixed(b"b")


def test_data_and_the_head_of_many_calls_in_one_piece(client: Client) -> None:
    block = client.plain_block(fields())
    sent = b"".join(
        frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, prefixed(b"%d" % stream_id))
        for stream_id in (1, 3, 5, 7)
    )
    client.give(sent)
    assert client.asked == [b"1", b"3", b"5", b"7"]
    assert client.host.gathered_times == 1


class TestCallsThatAreGivenUp:
    def test_they_take_places_until_they_are_decided(self, client: Client) -> None:
        """Else who opens calls and gives them up again would have the store decide without end."""
        asked = [client.ask() for _ in range(MOST_STREAMS)]
        for stream_id in asked:
            client.reset(stream_id)
        assert client.host.left_ids == asked
        client.answers.clear()

        assert client.answers[client.ask()].reset is ErrorCode.REFUSED_STREAM
        client.connection.answer(asked[0], b"late")
        client.connection.fail(asked[1], Failure(FailureCode.UNAVAILABLE, "late"))
        client.connection.let_go()
        more = [client.ask() for _ in range(4)]
        assert [client.connection.waits(stream_id) for stream_id in more] == [True, True, True, False]
        assert set(client.answers) == {MOST_STREAMS * 2 + 1, more[-1]}

    def test_one_whose_answer_was_held_is_over_at_once(self, client: Client) -> None:
        client.host.holds_all = True
        for stream_id in [client.ask() for _ in range(MOST_STREAMS)]:
            client.reset(stream_id)
        assert client.connection.waits(client.ask())

    def test_many_in_one_piece_do_not_get_past_that(self, client: Client) -> None:
        block = client.plain_block(fields())
        client.give(b"".join(_given_up(block, stream_id) for stream_id in range(1, 20 * MOST_STREAMS, 2)))
        assert len(client.host.gathering) == MOST_STREAMS


def _given_up(block: bytes, stream_id: int) -> bytes:
    """A whole call, and that its caller does not wait for it."""
    call = frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, prefixed(b"x"))
    return call + frames.reset(stream_id, ErrorCode.CANCEL)
