"""A connection of the native transport sends no more than its client has room for, and all of it once there is."""

from __future__ import annotations

import pytest
from hpack.exceptions import InvalidTableSizeError

from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.http2 import frames
from ratelimit_rls.transport.http2.frames import (
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LARGEST_WINDOW_BYTES,
    MOST_FRAME_BYTES,
    ErrorCode,
    Setting,
    frame,
)
from tests.unit.transport.http2_client import RELAYED, Client, fields, prefixed

MESSAGE = bytes(range(250)) * 200
WHOLE = 5 + len(MESSAGE)


@pytest.fixture
def client() -> Client:
    return Client()


class TestWindowsOfStreams:
    def test_a_byte_at_a_time(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.ask()
        client.answer(stream_id, b"abc")
        answer = client.answers[stream_id]
        for number in range(8):
            assert (answer.frames_of_data, answer.has_ended) == ([1] * number, False)
            assert client.connection.waits(stream_id)
            client.window(stream_id, 1)
        assert answer.message == b"abc"
        assert not client.connection.waits(stream_id)
        assert client.connection._sending.given == {}

    def test_an_empty_message_has_its_prefix(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 4})
        stream_id = client.ask()
        client.answer(stream_id, b"")
        assert not client.answers[stream_id].has_ended
        client.window(stream_id, 1)
        assert client.answers[stream_id].message == b""

    def test_room_may_be_given_before_there_is_an_answer(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.open()
        client.window(stream_id, 6)
        client.give(frame(frames.DATA, END_STREAM, stream_id, b"\0\0\0\0\0"))
        client.window(stream_id, 4)
        assert client.answer(stream_id).message == b"world"
        assert client.connection._sending.given == {}

    def test_room_that_was_not_needed_is_forgotten(self, client: Client) -> None:
        stream_id = client.ask()
        client.window(stream_id, 6)
        assert client.answer(stream_id).message == b"world"
        assert client.connection._sending.given == {}

    def test_also_where_the_call_fails(self, client: Client) -> None:
        stream_id = client.ask()
        client.window(stream_id, 6)
        client.connection.fail(stream_id, Failure(FailureCode.INTERNAL, "no"))
        assert client.connection._sending.given == {}

    def test_the_first_bit_of_what_it_grows_by_means_nothing(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        client.answer(client.ask())
        client.window(1, 2**31 + 3)
        assert client.answers[1].frames_of_data == [3]

    def test_messages_wait_in_their_order(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 2})
        stream_id = client.ask(b"1", fields(RELAYED))
        client.connection.begin(stream_id)
        assert not client.connection.send(stream_id, b"a")
        assert not client.connection.send(stream_id, b"b")
        client.window(stream_id, 100)
        assert client.answers[stream_id].data == prefixed(b"a") + prefixed(b"b")

    def test_other_streams_do_not_wait_for_one_without(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        first = client.ask()
        client.answer(first)
        client.settings({Setting.INITIAL_WINDOW_SIZE: 10})
        assert client.answers[first].message == b"world"

    def test_settings_may_take_room_away(self, client: Client) -> None:
        """What was sent stays sent: the window is below zero then."""
        stream_id = client.ask()
        client.settings({Setting.INITIAL_WINDOW_SIZE: 20_000})
        client.answer(stream_id, MESSAGE)
        answer = client.answers[stream_id]
        assert len(answer.data) == 20_000
        client.settings({Setting.INITIAL_WINDOW_SIZE: 10})
        client.window(stream_id, 19_990)
        assert len(answer.data) == 20_000
        client.window(stream_id, 1)
        assert len(answer.data) == 20_001
        client.settings({Setting.INITIAL_WINDOW_SIZE: 100_000})
        assert answer.message == MESSAGE

    def test_a_window_that_does_not_grow_is_an_error_of_its_stream(self, client: Client) -> None:
        stream_id = client.ask()
        client.window(stream_id, 0)
        assert client.answers[stream_id].reset == ErrorCode.PROTOCOL_ERROR
        assert client.host.left_ids == [stream_id]

    def test_nor_may_it_grow_too_large(self, client: Client) -> None:
        stream_id = client.ask()
        client.window(stream_id, LARGEST_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        assert stream_id not in client.answers
        client.window(stream_id, 1)
        assert client.answers[stream_id].reset == ErrorCode.FLOW_CONTROL_ERROR
        assert client.is_well

    def test_also_by_settings(self, client: Client) -> None:
        client.window(client.ask(), LARGEST_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        client.settings({Setting.INITIAL_WINDOW_SIZE: DEFAULT_WINDOW_BYTES})
        assert client.fault is None
        client.settings({Setting.INITIAL_WINDOW_SIZE: DEFAULT_WINDOW_BYTES + 1})
        assert client.fault == ErrorCode.FLOW_CONTROL_ERROR

    def test_of_a_stream_that_is_over_nothing_is_kept(self, client: Client) -> None:
        stream_id = client.ask()
        client.answer(stream_id)
        client.window(stream_id, 0)
        client.window(stream_id, 5)
        assert client.connection._sending.given == {}
        assert client.is_well


class TestTheWindowOfTheConnection:
    def test_all_streams_share_it(self, client: Client) -> None:
        asked = [client.ask() for _ in range(3)]
        for stream_id in asked:
            client.answer(stream_id, MESSAGE)
        sent = [len(client.answers[stream_id].data) for stream_id in asked]
        assert sent == [WHOLE, DEFAULT_WINDOW_BYTES - WHOLE, 0]
        client.answer(client.ask(), b"short")
        assert [client.connection.waits(stream_id) for stream_id in (*asked, 7)] == [False, True, True, True]
        client.window(0, 100)
        assert len(client.answers[3].data) == DEFAULT_WINDOW_BYTES - WHOLE + 100
        client.window(0, 2 * WHOLE)
        assert [client.answers[stream_id].message for stream_id in asked] == [MESSAGE] * 3
        assert client.answers[7].message == b"short"
        assert not any(map(client.connection.waits, (1, 3, 5, 7)))

    def test_answers_in_a_hurry_are_taken_off_it(self, client: Client) -> None:
        size = DEFAULT_WINDOW_BYTES // 13 - 5
        for _ in range(13):
            assert client.answer(client.ask(), b"x" * size).message == b"x" * size
        assert client.connection._sending.window == 2
        client.answer(client.ask(), b"")
        assert client.answers[27].data == b"\0\0"

    def test_one_that_was_reset_takes_nothing_of_it(self, client: Client) -> None:
        first, second = client.ask(), client.ask()
        client.answer(first, MESSAGE + MESSAGE)
        client.answer(second, b"short")
        client.reset(first)
        client.window(0, 10)
        assert client.answers[second].message == b"short"

    def test_nor_may_it_grow_too_large(self, client: Client) -> None:
        client.window(0, LARGEST_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        assert client.is_well
        client.window(0, 1)
        assert client.fault == ErrorCode.FLOW_CONTROL_ERROR


class TestFrames:
    def test_are_as_large_as_the_client_takes(self, client: Client) -> None:
        client.answer(client.ask(), MESSAGE)
        assert client.answers[1].frames_of_data == [MOST_FRAME_BYTES] * 3 + [WHOLE - 3 * MOST_FRAME_BYTES]
        client.window(0, WHOLE)
        client.settings({Setting.MAX_FRAME_SIZE: 40_000})
        client.answer(client.ask(), MESSAGE)
        assert client.answers[3].frames_of_data == [40_000, WHOLE - 40_000]
        client.window(0, WHOLE)
        client.settings({Setting.MAX_FRAME_SIZE: 2**24 - 1})
        client.answer(client.ask(), MESSAGE)
        assert client.answers[5].frames_of_data == [WHOLE]


class TestTheClientsTable:
    @pytest.mark.parametrize("size", [0, 1, 4095])
    def test_one_that_shrinks_is_told_that_we_know(self, client: Client, size: int) -> None:
        client.decoder.max_allowed_table_size = size
        client.settings({Setting.HEADER_TABLE_SIZE: size})
        for _ in range(2):
            assert client.answer(client.ask()).message == b"world"
        assert client.decoder.header_table_size == 0

    def test_it_is_said_once(self, client: Client) -> None:
        client.settings({Setting.HEADER_TABLE_SIZE: 0})
        client.answer(client.ask())
        writes = len(client.socket.writes)
        client.answer(client.ask())
        assert frames.NO_TABLE + b"\x88" not in b"".join(client.socket.writes[writes:])

    def test_one_that_does_not_shrink_is_told_nothing(self, client: Client) -> None:
        client.settings({Setting.HEADER_TABLE_SIZE: 4096})
        client.settings({Setting.HEADER_TABLE_SIZE: 65_536})
        assert client.answer(client.ask()).message == b"world"
        assert client.decoder.header_table_size == 4096

    @pytest.mark.parametrize("kind", ["failure", "relayed", "http"])
    def test_whatever_the_next_block_belongs_to(self, client: Client, kind: str) -> None:
        client.decoder.max_allowed_table_size = 0
        client.settings({Setting.HEADER_TABLE_SIZE: 0})
        if kind == "failure":
            client.open(flags=END_STREAM)
        elif kind == "http":
            client.open(fields()[:4], flags=END_STREAM)
        else:
            client.ask(b"1", fields(RELAYED))
            client.connection.begin(1)
            client.settle()
        assert client.decoder.header_table_size == 0

    def test_also_where_an_answer_waits_for_its_end(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        client.answer(client.ask())
        client.decoder.max_allowed_table_size = 0
        client.settings({Setting.HEADER_TABLE_SIZE: 0, Setting.INITIAL_WINDOW_SIZE: 100})
        assert client.answers[1].message == b"world"
        assert client.answer(client.ask()).message == b"world"

    def test_the_other_implementation_would_notice(self, client: Client) -> None:
        client.decoder.max_allowed_table_size = 0
        client.ask()
        with pytest.raises(InvalidTableSizeError):
            client.answer(1)


def test_the_head_of_a_large_answer_comes_first(client: Client) -> None:
    client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
    client.answer(client.ask())
    assert client.answers[1].blocks == [{":status": "200", "content-type": "application/grpc"}]
    client.give(frame(HEADERS, END_HEADERS | END_STREAM, 1, client.block([("a", "b")])))
    assert client.answers[1].reset == ErrorCode.STREAM_CLOSED
