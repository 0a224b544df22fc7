"""A connection of the native transport, told bytes: how it begins, which frames it takes, and how it ends."""

from __future__ import annotations

import logging
from itertools import count
from math import inf

import pytest

from ratelimit_rls.transport.grpc import connection as module
from ratelimit_rls.transport.grpc.connection import LAST_PING, LINGER_S, MOST_CUT, PREFACE_S, TURN_S, WINDOW_BYTES
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.http2 import blocks, frames
from ratelimit_rls.transport.http2.blocks import MOST_BLOCK_BYTES, MOST_KNOWN, MOST_KNOWN_BYTES, MOST_LIST_BYTES
from ratelimit_rls.transport.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    LARGEST_STREAM_ID,
    MOST_FRAME_BYTES,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    ErrorCode,
    Setting,
    frame,
)
from tests.unit.transport.http2_client import MOST_STREAMS, RELAYED, Client, Host, fields, prefixed, split

OPENING = PREFACE + frames.settings({})


@pytest.fixture
def client() -> Client:
    return Client()


class TestTheBeginning:
    def test_a_server_speaks_first(self) -> None:
        client = Client(greets=False)
        client.settle()
        settings, window = client.others
        assert settings.kind == SETTINGS
        assert frames.read_settings(settings.payload) == {
            Setting.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
            Setting.INITIAL_WINDOW_SIZE: module.STREAM_WINDOW_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: MOST_LIST_BYTES,
        }
        assert (window.kind, frames.read_window_update(window.payload)) == (WINDOW_UPDATE, WINDOW_BYTES - 65_535)
        assert client.host.connections == [client.connection]

    @pytest.mark.parametrize("at", range(len(OPENING) + 1))
    def test_a_preface_may_be_cut_anywhere(self, at: int) -> None:
        client = Client(greets=False)
        client.give(OPENING[:at])
        client.give(OPENING[at:])
        assert client.acknowledged == 1
        assert client.answer(client.ask()).message == b"world"

    @pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", PREFACE[:10] + b"?", b"\0" * 50])
    def test_what_is_not_http2_is_told_so(self, data: bytes) -> None:
        client = Client(greets=False)
        client.give(data)
        assert client.fault == ErrorCode.PROTOCOL_ERROR
        assert b"this is a gRPC port" in client.of_kind(GOAWAY)[0].payload

    @pytest.mark.parametrize(
        "first", [frame(PING, 0, 0, b"12345678"), frame(SETTINGS, ACK, 0), frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1")]
    )
    def test_settings_come_first(self, first: bytes) -> None:
        client = Client(greets=False)
        client.give(PREFACE + first)
        assert client.fault == ErrorCode.PROTOCOL_ERROR

    @pytest.mark.parametrize("said", [b"", PREFACE[:-1], PREFACE])
    def test_a_client_that_does_not_begin_is_not_waited_for(self, said: bytes) -> None:
        client = Client(greets=False)
        client.give(said)
        client.loop.wait(PREFACE_S - 0.001)
        assert not client.socket.is_closed
        client.loop.wait(0.001)
        client.settle()
        assert client.fault == ErrorCode.SETTINGS_TIMEOUT

    def test_one_that_has_begun_may_be_quiet(self, client: Client) -> None:
        client.loop.wait(10 * PREFACE_S)
        assert client.is_well

    def test_what_ended_a_connection_is_logged_without_what_was_sent(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        Client(greets=False).give(b"secret")
        assert "PROTOCOL_ERROR" in caplog.text
        assert "secret" not in caplog.text


class TestFrames:
    def test_frames_that_nobody_knows_are_passed_over(self, client: Client) -> None:
        client.give(frame(0x42, 0xFF, 77, b"whatever") + frame(0xFF, 0, 0))
        assert client.is_well

    @pytest.mark.parametrize("kind", [DATA, HEADERS, SETTINGS, 0x42])
    def test_one_that_is_too_large_ends_the_connection_before_it_is_there(self, client: Client, kind: int) -> None:
        client.give(frame(kind, 0, 1, b"\0" * (MOST_FRAME_BYTES + 1))[:9])
        assert client.fault == ErrorCode.FRAME_SIZE_ERROR

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
            (frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
            (frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"\0\0\0\1\0"), ErrorCode.PROTOCOL_ERROR),
            (frame(HEADERS, END_HEADERS, 1, b"\x80"), ErrorCode.COMPRESSION_ERROR),
            (frame(CONTINUATION, END_HEADERS, 1), ErrorCode.PROTOCOL_ERROR),
        ],
    )
    def test_what_must_not_be_ends_the_connection(self, client: Client, faulty: bytes, code: ErrorCode) -> None:
        client.give(faulty)
        assert client.fault == code
        assert client.went_away[0][0] in (0, 1)

    def test_nothing_is_read_after_that(self, client: Client) -> None:
        client.give(frame(PING, 0, 0, b"") + frame(PING, 0, 0, b"12345678"))
        client.give(frame(PING, 0, 0, b"12345678"))
        client.ask()
        assert not client.of_kind(PING)
        assert client.asked == []
        client.lose()
        assert client.host.connections == []

    def test_calls_before_that_are_counted_all_the_same(self, client: Client) -> None:
        """They are decided: it is their callers that do not hear of it."""
        first = frame(HEADERS, END_HEADERS, 1, client.block(fields())) + frame(DATA, END_STREAM, 1, prefixed(b"1"))
        client.give(first + frame(PING, 0, 0))
        assert (client.asked, client.went_away) == ([b"1"], [(1, ErrorCode.FRAME_SIZE_ERROR)])
        assert client.host.gathered_times > 0
        client.lose()
        assert client.host.left_ids == [1]

    def test_a_ping_is_answered_and_an_answer_is_not(self, client: Client) -> None:
        client.give(frame(PING, 0, 0, b"abcdefgh") + frame(PING, ACK, 0, b"whatever"))
        assert client.of_kind(PING) == [(PING, ACK, 0, b"abcdefgh")]
        assert client.is_well

    def test_settings_that_nobody_knows_are_acknowledged(self, client: Client) -> None:
        client.give(frame(SETTINGS, 0, 0, b"\xab\xcd\0\0\0\1"))
        client.give(frame(SETTINGS, ACK, 0))
        assert client.acknowledged == 1
        assert client.is_well

    def test_a_priority_means_nothing(self, client: Client) -> None:
        client.give(frame(PRIORITY, 0, 9, b"\0\0\0\1\0"))
        assert client.is_well

    def test_one_of_another_size_is_an_error_of_its_stream(self, client: Client) -> None:
        stream_id = client.open()
        client.give(frame(PRIORITY, 0, stream_id, b"1234"))
        assert client.answers[stream_id].reset == ErrorCode.FRAME_SIZE_ERROR
        assert client.is_well

    def test_the_first_bit_of_a_stream_id_means_nothing(self, client: Client) -> None:
        request = frame(HEADERS, END_HEADERS, 1, client.block(fields())) + frame(DATA, END_STREAM, 1, prefixed(b"1"))
        marked = bytearray(request)
        marked[5] |= 0x80
        marked[request.index(prefixed(b"1")) - 4] |= 0x80
        client.give(bytes(marked))
        assert client.answer(1).message == b"world"

    def test_a_client_that_says_goodbye_still_has_its_answers(self, client: Client) -> None:
        stream_id = client.ask()
        client.give(frames.go_away(0, ErrorCode.NO_ERROR))
        assert client.answer(stream_id).message == b"world"


class TestHeaderBlocks:
    def test_the_same_block_again_is_not_read_again(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        for _ in range(2):  # the first fills the table
            client.ask(b"1")
        monkeypatch.setattr(blocks.Decoder, "decode", None)
        client.ask(b"2")
        assert client.asked == [b"1", b"1", b"2"]
        assert client.host.gathering[1][4] is client.host.gathering[2][4]

    def test_a_change_of_the_table_is_heeded(self, client: Client) -> None:
        """What was last added has index 62, so one block means two things."""
        newest = client.plain_block(fields()) + b"\xbe"
        for name in (b"a", b"b"):
            added = b"\x40\x01" + name + b"\x01x"
            for block in (added, newest, newest):
                stream_id = client.next_id
                client.next_id += 2
                client.give(
                    frame(HEADERS, END_HEADERS, stream_id, client.plain_block(fields()) + added)
                    + frame(RST_STREAM, 0, stream_id, b"\0\0\0\0")
                    if block is added
                    else frame(HEADERS, END_HEADERS, stream_id, block)
                    + frame(DATA, END_STREAM, stream_id, prefixed(name))
                )
        names = [head.metadata[-1][0] for *_, head in client.host.gathering]
        assert names == ["a", "a", "b", "b"]

    def test_a_block_that_changes_the_table_is_read_each_time(self, client: Client) -> None:
        plain = client.plain_block(fields())
        for added in (b"\x40\x01a\x01x", b"\x40\x01a\x01x", b"\xbf"):  # what was added before the last
            client.give(frame(HEADERS, END_HEADERS, client.next_id, plain + added))
            client.data(client.next_id, prefixed(b"1"), END_STREAM)
            client.next_id += 2
        assert [head.metadata for *_, head in client.host.gathering] == [(("a", "x"),)] * 3

    def test_no_more_than_so_many_are_remembered(self, client: Client) -> None:
        for number in range(MOST_KNOWN + 1):
            stream_id = client.next_id
            client.next_id += 2
            block = client.plain_block(fields(number=f"{number}"))
            client.give(frame(HEADERS, END_HEADERS, stream_id, block))
            client.reset(stream_id)
            assert block in client.connection._blocks.known
        assert len(client.connection._blocks.known) <= MOST_KNOWN

    def test_nor_more_than_so_much_of_them(self, client: Client) -> None:
        """Of what they say as of how it is written: a few bytes may point to a large field of the table."""
        added = b"\x40\x01a\x7f\xd9\x1e" + b"x" * 4056
        plain = client.plain_block(fields())
        client.give(frame(HEADERS, END_HEADERS, 1, plain + added))
        for number in range(50):
            client.next_id = 3 + 2 * number
            block = client.plain_block(fields(number=f"{number}")) + b"\xbe" * 7
            client.give(frame(HEADERS, END_HEADERS, client.next_id, block))
            client.reset(client.next_id)
            known = client.connection._blocks.known
            assert block in known
            assert len(known) * 7 * 4056 <= MOST_KNOWN_BYTES
        assert len(known) > 1

    @pytest.mark.parametrize("flags", [PADDED, WITH_PRIORITY, PADDED | WITH_PRIORITY])
    def test_padding_and_priority_stand_around_a_block(self, client: Client, flags: int) -> None:
        block = client.block(fields())
        payload = b"\7" * bool(flags & PADDED) + b"\0\0\0\0\x10" * bool(flags & WITH_PRIORITY) + block
        payload += b"\0" * 7 * bool(flags & PADDED)
        client.give(frame(HEADERS, END_HEADERS | flags, 1, payload) + frame(DATA, END_STREAM, 1, prefixed(b"1")))
        assert client.answer(1).message == b"world"

    def test_padding_may_be_all_there_is(self, client: Client) -> None:
        """Then the block is empty, which no request is."""
        client.give(frame(HEADERS, END_HEADERS | PADDED, 1, b"\2\0\0"))
        assert client.answers[1].reset == ErrorCode.PROTOCOL_ERROR
        assert client.is_well

    @pytest.mark.parametrize("cut", [0, 1, 20])
    def test_a_block_may_be_continued(self, client: Client, cut: int) -> None:
        block = client.block(fields())
        client.give(frame(HEADERS, 0, 1, block[:cut]))
        client.give(frame(CONTINUATION, 0, 1, block[cut:-3]) + frame(CONTINUATION, END_HEADERS, 1, block[-3:]))
        client.data(1, prefixed(b"1"), END_STREAM)
        assert client.answer(1).message == b"world"

    def test_where_it_ends_a_stream_is_said_first(self, client: Client) -> None:
        block = client.block(fields(RELAYED))
        client.give(frame(HEADERS, END_STREAM, 1, block) + frame(CONTINUATION, END_HEADERS, 1))
        assert client.host.relayed[1].has_ended

    @pytest.mark.parametrize(
        "between",
        [frame(PING, 0, 0, b"12345678"), frame(CONTINUATION, END_HEADERS, 3), frame(DATA, 0, 1), frame(0x42, 0, 0)],
    )
    def test_nothing_may_stand_between(self, client: Client, between: bytes) -> None:
        client.give(frame(HEADERS, 0, 1, client.block(fields())) + between)
        assert client.fault == ErrorCode.PROTOCOL_ERROR

    def test_not_even_an_ordinary_call(self, client: Client) -> None:
        block = client.plain_block(fields())
        for between in (frame(DATA, END_STREAM, 1, prefixed(b"1")), frame(HEADERS, END_HEADERS, 5, block)):
            client = Client()
            client.give(frame(HEADERS, END_HEADERS, 1, block))  # known from here on
            client.give(frame(HEADERS, 0, 3, block) + between)
            assert client.fault == ErrorCode.PROTOCOL_ERROR
            assert client.asked == []

    @pytest.mark.parametrize("size", [0, 1, MOST_FRAME_BYTES])
    def test_a_block_that_does_not_end_ends_the_connection(self, client: Client, size: int) -> None:
        client.give(frame(HEADERS, 0, 1))
        sent = 0
        while not client.socket.is_closed:
            client.give(frame(CONTINUATION, 0, 1, b"\x82" * size))
            sent += 9 + size
            assert sent <= MOST_BLOCK_BYTES + 9 + size
        assert client.fault == ErrorCode.ENHANCE_YOUR_CALM

    def test_one_that_says_too_much_is_turned_away_and_the_next_is_read(self, client: Client) -> None:
        large = {f"name-{number}": "x" * 1000 for number in range(33)}
        block = client.block(fields(**large))
        client.give(
            frame(HEADERS, 0, 1, block[:MOST_FRAME_BYTES])
            + frame(CONTINUATION, 0, 1, block[MOST_FRAME_BYTES : 2 * MOST_FRAME_BYTES])
            + frame(CONTINUATION, END_HEADERS, 1, block[2 * MOST_FRAME_BYTES :])
        )
        client.data(1, prefixed(b"1"), END_STREAM)
        assert client.answers[1].blocks == [{":status": "431", "content-type": "text/plain"}]
        assert client.answers[1].data == b"the headers are too large; at most 32768 bytes are read\n"
        assert client.answers[1].has_ended
        client.next_id = 3
        assert client.answer(client.ask()).message == b"world"

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
    def test_a_request_that_is_malformed_is_an_error_of_its_stream(
        self, client: Client, headers: list[tuple[str, str]]
    ) -> None:
        client.give(frame(HEADERS, END_HEADERS, 1, client.block(headers)))
        assert client.answers[1].reset == ErrorCode.PROTOCOL_ERROR
        client.data(1, prefixed(b"1"), END_STREAM)
        assert client.asked == []
        assert client.is_well


class TestStreams:
    def test_no_more_than_so_many_are_open(self, client: Client) -> None:
        for _ in range(MOST_STREAMS):
            client.ask()
        for refused in (client.ask(), client.ask()):
            assert client.answers[refused].reset == ErrorCode.REFUSED_STREAM
        assert len(client.asked) == MOST_STREAMS
        assert client.answer(1).message == b"world"
        assert client.answer(client.ask()).message == b"world"

    def test_ids_may_be_left_out_and_are_then_gone(self, client: Client) -> None:
        client.next_id = 7
        client.ask()
        client.next_id = 5
        client.open()
        assert client.fault == ErrorCode.STREAM_CLOSED

    def test_one_that_was_answered_is_not_opened_again(self, client: Client) -> None:
        client.answer(client.ask())
        client.next_id = 1
        client.open()
        assert client.fault == ErrorCode.STREAM_CLOSED

    def test_a_client_that_is_done_sends_no_more(self, client: Client) -> None:
        stream_id = client.ask()
        client.data(stream_id, b"x")
        assert client.answers[stream_id].reset == ErrorCode.STREAM_CLOSED
        assert client.host.left_ids == [stream_id]
        client.answer(stream_id)
        assert client.answers[stream_id].blocks == []
        assert client.is_well

    def test_data_after_the_answer_is_refused_once(self, client: Client) -> None:
        stream_id = client.ask()
        client.answer(stream_id)
        client.data(stream_id, b"x")
        client.data(stream_id, b"x")
        assert client.answers[stream_id].reset == ErrorCode.STREAM_CLOSED

    @pytest.mark.parametrize("path", ["/a.Service/Method", RELAYED])
    def test_headers_after_the_end_are_an_error_of_the_stream(self, client: Client, path: str) -> None:
        stream_id = client.ask(b"1", fields(path))
        client.give(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, client.block([("a", "b")])))
        assert client.answers[stream_id].reset == ErrorCode.STREAM_CLOSED

    def test_trailers_end_a_request(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(b"1"))
        client.give(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, client.block([("a", "b")])))
        assert client.asked == [b"1"]

    @pytest.mark.parametrize(
        ("flags", "trailers"), [(0, [("a", "b")]), (END_STREAM, [(":path", "/")]), (END_STREAM, [("te", "x")])]
    )
    def test_trailers_that_do_not_or_are_none(
        self, client: Client, flags: int, trailers: list[tuple[str, str]]
    ) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(b"1"))
        client.give(frame(HEADERS, END_HEADERS | flags, stream_id, client.block(trailers)))
        assert client.answers[stream_id].reset == ErrorCode.PROTOCOL_ERROR
        assert client.connection._held_bytes == 0
        assert client.is_well

    def test_what_was_on_its_way_to_a_stream_that_we_ended_is_passed_over(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, b"\0\xff\xff\xff\xff")
        assert client.answers[stream_id].reset == ErrorCode.NO_ERROR
        client.data(stream_id, b"more")
        client.window(stream_id, 1)
        client.give(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, client.block([("a", "b")])))
        assert client.is_well

    def test_for_the_latest_so_many(self, client: Client) -> None:
        for _ in range(MOST_CUT + 1):
            last = client.open(fields(te="x"))
        assert len(client.connection._cut) == MOST_CUT
        client.data(last, b"x")
        assert client.is_well


class TestCallersThatLeave:
    def test_before_a_message(self, client: Client) -> None:
        stream_id = client.open()
        client.reset(stream_id)
        assert not client.connection.waits(stream_id)
        assert client.host.left_ids == []

    def test_within_a_message(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(b"123456")[:-1])
        assert client.connection._held_bytes == 10
        client.reset(stream_id)
        assert client.connection._held_bytes == 0
        assert (client.asked, client.host.left_ids) == ([], [])

    def test_before_the_answer(self, client: Client) -> None:
        stream_id = client.ask()
        assert client.connection.waits(stream_id)
        client.reset(stream_id)
        assert not client.connection.waits(stream_id)
        client.reset(stream_id)
        assert client.host.left_ids == [stream_id]
        writes = len(client.socket.writes)
        client.answer(stream_id)
        client.connection.fail(stream_id, Failure(FailureCode.INTERNAL, "too late"))
        client.settle()
        assert len(client.socket.writes) == writes
        client.lose()
        assert client.host.left_ids == [stream_id]

    def test_within_the_answer(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 3})
        stream_id = client.ask()
        client.answer(stream_id)
        assert client.answers[stream_id].data == b"\0\0\0"
        client.reset(stream_id)
        client.window(0, 10)
        client.settings({Setting.INITIAL_WINDOW_SIZE: 100})
        assert client.answers[stream_id].data == b"\0\0\0"
        assert client.host.left_ids == []
        assert client.connection._sending.given == {}

    def test_after_the_answer(self, client: Client) -> None:
        stream_id = client.ask()
        client.answer(stream_id)
        client.reset(stream_id)
        assert client.host.left_ids == []
        assert client.is_well

    def test_of_a_call_that_is_served_elsewhere(self, client: Client) -> None:
        stream_id = client.open(fields(RELAYED))
        client.data(stream_id, b"12345")
        client.reset(stream_id)
        assert client.host.relayed[stream_id].is_cancelled
        assert client.connection._held_bytes == 0
        client.connection.consumed(stream_id, 5, 5)  # what was handed on before anybody knew
        assert client.connection._held_bytes == 0

    def test_all_at_once(self, client: Client) -> None:
        asked = [client.ask(), client.ask()]
        arriving = client.open()
        client.data(arriving, b"\0\0")
        client.open()
        relayed = client.open(fields(RELAYED))
        client.data(relayed, b"12345")
        client.lose()
        assert client.host.left_ids == asked
        assert client.host.relayed[relayed].is_cancelled
        assert client.host.connections == []
        assert client.connection._held_bytes == 0
        assert client.loop.timers == []
        for stream_id in asked:
            client.answer(stream_id)
        assert client.host.left_ids == asked


class TestBackPressure:
    def test_who_does_not_read_is_not_read_from(self, client: Client) -> None:
        client.connection.pause_writing()
        assert not client.socket.reads
        client.connection.resume_writing()
        client.settle()
        assert client.socket.reads

    def test_all_answers_of_a_turn_are_one_write(self, client: Client) -> None:
        asked = [client.ask() for _ in range(5)]
        writes = len(client.socket.writes)
        for stream_id in asked:
            client.connection.answer(stream_id, b"x")
        client.connection.fail(client.asked_ids[0], Failure(FailureCode.INTERNAL, "answered already"))
        assert len(client.socket.writes) == writes
        client.settle()
        assert len(client.socket.writes) == writes + 1
        assert [client.answers[stream_id].message for stream_id in asked] == [b"x"] * 5


class TestTurns:
    """Others have theirs while one client sends what takes long to read."""

    @pytest.fixture(autouse=True)
    def _a_frame_takes_long(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = count()
        monkeypatch.setattr(module, "monotonic", lambda: next(ticks) * TURN_S / 4)

    def test_what_is_left_is_read_in_the_next(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 20 + PREFACE[:3])
        turns = 0
        while not client.socket.reads:
            client.loop.turn()
            client._read()
            turns += 1
            assert len(client.of_kind(PING)) <= 5 * turns
        assert len(client.of_kind(PING)) == 20
        assert turns == 4

    def test_more_may_come_before_that(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.settle()
        assert len(client.of_kind(PING)) == 20
        assert client.socket.reads

    def test_it_has_one_at_a_time(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 20)
        for _ in range(3):
            client.connection.pause_writing()
            client.connection.resume_writing()
        client.loop.turn()
        client.loop.turn()
        client._read()
        assert len(client.of_kind(PING)) <= 10

    def test_but_not_before_the_client_reads(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.connection.pause_writing()
        client.settle()
        assert len(client.of_kind(PING)) == 5
        assert not client.socket.reads
        client.connection.resume_writing()
        client.settle()
        assert len(client.of_kind(PING)) == 10
        assert client.socket.reads

    def test_nor_when_it_is_gone(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.lose()
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.settle()
        assert len(client.of_kind(PING)) == 5
        assert not client.socket.reads

    def test_a_fault_in_a_later_one_ends_the_connection(self, client: Client) -> None:
        client.give(frame(PING, 0, 0, b"12345678") * 10 + frame(PING, 0, 0, b""))
        assert client.fault == ErrorCode.FRAME_SIZE_ERROR
        assert not client.socket.reads

    def test_ordinary_calls_are_read_in_one(self, client: Client) -> None:
        block = client.plain_block(fields())
        client.reset(client.open())  # the first of its kind is no ordinary one
        for number in range(2):
            stream_ids = range(3 + 20 * number, 3 + 2 * MOST_STREAMS + 20 * number, 2)
            client.connection.data_received(
                b"".join(
                    frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, prefixed(b"1"))
                    for stream_id in stream_ids
                )
            )
            assert len(client.asked) == MOST_STREAMS * (number + 1)
            for stream_id in stream_ids:
                client.answer(stream_id)


class TestLeaving:
    def test_it_takes_calls_until_its_client_knows(self, client: Client) -> None:
        first = client.ask(b"1")
        client.connection.leave()
        client.settle()
        assert client.went_away == [(LARGEST_STREAM_ID, ErrorCode.NO_ERROR)]
        assert client.of_kind(PING) == [(PING, 0, 0, LAST_PING)]
        second = client.ask(b"2")
        client.give(frame(PING, ACK, 0, LAST_PING))
        assert client.went_away[1:] == [(second, ErrorCode.NO_ERROR)]
        late = client.ask(b"3")
        client.window(late, 1)
        client.reset(late)
        late = client.open()
        client.data(late, b"\0\0")
        client.give(frame(HEADERS, END_STREAM, late, b""))
        client.give(frame(CONTINUATION, END_HEADERS, late, b""))
        assert client.asked == [b"1", b"2"]
        assert not client.answers.get(late)
        assert client.answer(first).message == b"world"
        client.loop.wait(1)
        assert not client.socket.is_closed
        assert client.answer(second).message == b"world"
        client.loop.wait(1)
        assert client.socket.is_closed
        assert len(client.went_away) == 2

    def test_a_request_under_way_may_still_end(self, client: Client) -> None:
        stream_id = client.open()
        client.connection.leave()
        client.give(frame(PING, ACK, 0, LAST_PING))
        client.data(stream_id, prefixed(b"1"), END_STREAM)
        assert client.answer(stream_id).message == b"world"
        client.loop.wait(1)
        assert client.socket.is_closed

    def test_without_calls_it_is_closed_at_once(self, client: Client) -> None:
        client.connection.leave()
        client.give(frame(PING, ACK, 0, LAST_PING))
        assert client.socket.is_closed

    def test_leaving_twice_is_leaving(self, client: Client) -> None:
        stream_id = client.ask()
        client.connection.leave()
        client.connection.leave()
        client.give(frame(PING, ACK, 0, LAST_PING) * 2)
        client.connection.leave()
        client.settle()
        assert client.went_away[2:] == [(stream_id, ErrorCode.NO_ERROR)]

    def test_calls_that_came_with_the_last_word_and_left_are_decided(self, client: Client) -> None:
        """Otherwise they would wait with their door for the next call of anybody."""
        client.connection.leave()
        request = frame(HEADERS, END_HEADERS, 1, client.block(fields())) + frame(DATA, END_STREAM, 1, prefixed(b"1"))
        client.give(request + frames.reset(1, ErrorCode.CANCEL) + frame(PING, ACK, 0, LAST_PING))
        assert client.socket.is_closed
        assert (client.asked, client.host.left_ids) == ([b"1"], [1])
        assert client.host.gathered_times == 1

    def test_closing_does_not_wait(self, client: Client) -> None:
        stream_id = client.ask()
        client.connection.close()
        client.connection.close()
        client.settle()
        assert client.went_away == [(stream_id, ErrorCode.NO_ERROR)]
        assert client.socket.is_closed
        client.connection.leave()
        client.connection.answer(stream_id, b"too late")
        client.settle()
        client.lose()
        assert client.host.left_ids == []

    def test_a_client_that_does_not_read_its_end_is_cut_off(self, client: Client) -> None:
        client.connection.close()
        client.loop.wait(LINGER_S - 0.001)
        assert not client.socket.is_aborted
        client.loop.wait(0.001)
        assert client.socket.is_aborted

    def test_aborting_says_nothing(self, client: Client) -> None:
        client.connection.abort()
        client.settle()
        assert (client.socket.is_aborted, client.went_away) == (True, [])

    @pytest.mark.parametrize("grace_s", [30.0, inf])
    def test_one_that_is_old_leaves(self, grace_s: float) -> None:
        host = Host()
        host.max_age_s, host.max_age_grace_s = 100.0, grace_s
        client = Client(host)
        client.ask()
        client.loop.wait(89)
        client.settle()
        assert client.went_away == []
        client.loop.wait(22)
        client.settle()
        assert client.went_away == [(LARGEST_STREAM_ID, ErrorCode.NO_ERROR)]
        client.give(frame(PING, ACK, 0, LAST_PING))
        client.loop.wait(30)
        client.settle()
        assert client.socket.is_closed == (grace_s < inf)

    @pytest.mark.parametrize("waited_s", [0, 111])
    def test_nothing_rings_for_one_that_is_gone(self, waited_s: float) -> None:
        host = Host()
        host.max_age_s, host.max_age_grace_s = 100.0, 1000.0
        client = Client(host, greets=waited_s > 0)
        client.loop.wait(waited_s)
        assert client.loop.timers
        client.lose()
        assert client.loop.timers == []

    def test_not_all_of_them_at_once(self) -> None:
        host = Host()
        host.max_age_s = 100.0
        ages_s = {timer.due_s for _ in range(20) for timer in Client(host).loop.timers}
        assert len(ages_s) > 1
        assert all(90 <= age_s <= 110 for age_s in ages_s)


def test_frames_are_read_as_they_are_written() -> None:
    """The client of these tests, at least, agrees with itself."""
    assert [*split(frame(PING, ACK, 0, b"12345678") + frame(DATA, 0, 5))] == [
        (PING, ACK, 0, b"12345678"),
        (DATA, 0, 5, b""),
    ]
