"""asyncio protocol of a connection: timers, back pressure, slow input, draining and closing."""

from __future__ import annotations

from itertools import count
from math import inf

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.config import Timeouts
from ratelimit_rls.h2.frame_handlers import DRAIN_PING
from ratelimit_rls.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_STREAM_ID,
    PING,
    PREFACE,
    ErrorCode,
    frame,
)
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.transport.grpc import protocol as module
from ratelimit_rls.transport.grpc import slow_lane as lane_module
from ratelimit_rls.transport.grpc.protocol import LINGER_S, SLOW_SLICE_S
from ratelimit_rls.transport.grpc.slow_lane import SlowLane
from tests.unit.h2.client import MAX_STREAMS, fields, prefixed
from tests.unit.transport.http2_client import Client, FakeServer

OPENING = PREFACE + frames.settings({})


@pytest.fixture
def client() -> Client:
    return Client()


class TestConnectionStart:
    @pytest.mark.parametrize("received", [b"", PREFACE[:-1], PREFACE])
    def test_missing_preface_times_out(self, received: bytes) -> None:
        client = Client(sends_preface=False)
        client.send(received)
        client.loop.wait(Timeouts().preface_s - 0.001)
        assert not client.socket.is_closed
        client.loop.wait(0.001)
        client.settle()
        assert client.error == ErrorCode.SETTINGS_TIMEOUT

    def test_idle_client_stays_connected_after_preface(self, client: Client) -> None:
        client.loop.wait(10 * Timeouts().preface_s)
        assert client.is_alive

    def test_connection_error_is_logged_without_the_input(self) -> None:
        with capture_logs() as lines:
            Client(sends_preface=False).send(b"secret")
        assert [(line["code"], line["log_level"]) for line in lines] == [("PROTOCOL_ERROR", "debug")]
        assert "secret" not in str(lines)


class TestBackPressure:
    def test_client_that_does_not_read_is_not_read_from(self, client: Client) -> None:
        client.connection.pause_writing()
        assert not client.socket.reads
        client.connection.resume_writing()
        client.settle()
        assert client.socket.reads

    def test_responses_of_one_iteration_are_one_write(self, client: Client) -> None:
        stream_ids = [client.call() for _ in range(5)]
        writes = len(client.socket.writes)
        for stream_id in stream_ids:
            client.connection.respond(stream_id, b"x")
        client.connection.fail(client.queued_ids[0], RpcError(StatusCode.INTERNAL, "answered already"))
        assert len(client.socket.writes) == writes
        client.settle()
        assert len(client.socket.writes) == writes + 1
        assert [client.responses[stream_id].message for stream_id in stream_ids] == [b"x"] * 5


class TestSlowInput:
    """Other connections are read while one client sends slow input."""

    @pytest.fixture(autouse=True)
    def _slow_frames(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = count()
        monkeypatch.setattr(module, "monotonic", lambda: next(ticks) * SLOW_SLICE_S / 4)
        monkeypatch.setattr(lane_module, "monotonic", lambda: next(ticks) * SLOW_SLICE_S / 4)
        client.server.slow_lane = SlowLane(client.loop.call_soon)

    def test_remaining_input_is_read_in_the_next_iteration(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 20 + PREFACE[:3])
        turns = 0
        while not client.socket.reads:
            client.loop.turn()
            client._read()
            turns += 1
            assert len(client.frames_of_type(PING)) <= 5 * turns
        client.settle()
        assert len(client.frames_of_type(PING)) == 20
        assert turns == 4

    def test_input_that_arrives_meanwhile_is_kept(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.settle()
        assert len(client.frames_of_type(PING)) == 20
        assert client.socket.reads

    def test_connection_is_in_the_slow_lane_once(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 20)
        for _ in range(3):
            client.connection.pause_writing()
            client.connection.resume_writing()
        client.loop.turn()
        client.loop.turn()
        client._read()
        assert len(client.frames_of_type(PING)) <= 10

    def test_paused_writing_keeps_reading_deferred(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.connection.pause_writing()
        client.settle()
        assert len(client.frames_of_type(PING)) == 5
        assert not client.socket.reads
        client.connection.resume_writing()
        client.settle()
        assert len(client.frames_of_type(PING)) == 10
        assert client.socket.reads

    def test_lost_connection_is_not_read_from_the_lane(self, client: Client) -> None:
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.disconnect()
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 10)
        client.settle()
        assert len(client.frames_of_type(PING)) == 5
        assert not client.socket.reads

    def test_error_in_deferred_input_closes_connection(self, client: Client) -> None:
        client.send(frame(PING, 0, 0, b"12345678") * 10 + frame(PING, 0, 0, b""))
        assert client.error == ErrorCode.FRAME_SIZE_ERROR
        assert not client.socket.reads

    def test_ordinary_calls_are_not_deferred(self, client: Client) -> None:
        block = client.plain_block(fields())
        client.reset(client.open())  # the first call is not cached yet
        for number in range(2):
            stream_ids = range(3 + 20 * number, 3 + 2 * MAX_STREAMS + 20 * number, 2)
            client.connection.data_received(
                b"".join(
                    frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, prefixed(b"1"))
                    for stream_id in stream_ids
                )
            )
            assert len(client.queued) == MAX_STREAMS * (number + 1)
            for stream_id in stream_ids:
                client.respond(stream_id)


class TestDrain:
    def test_drain_accepts_calls_until_the_ping_is_acknowledged(self, client: Client) -> None:
        first = client.call(b"1")
        client.connection.drain()
        client.settle()
        assert client.goaways == [(MAX_STREAM_ID, ErrorCode.NO_ERROR)]
        assert client.frames_of_type(PING) == [(PING, 0, 0, DRAIN_PING)]
        second = client.call(b"2")
        client.send(frame(PING, ACK, 0, DRAIN_PING))
        assert client.goaways[1:] == [(second, ErrorCode.NO_ERROR)]
        late = client.call(b"3")
        client.window(late, 1)
        client.reset(late)
        late = client.open()
        client.data(late, b"\0\0")
        client.send(frame(HEADERS, END_STREAM, late, b""))
        client.send(frame(CONTINUATION, END_HEADERS, late, b""))
        assert client.queued == [b"1", b"2"]
        assert not client.responses.get(late)
        assert client.respond(first).message == b"world"
        client.loop.wait(1)
        assert not client.socket.is_closed
        assert client.respond(second).message == b"world"
        client.loop.wait(1)
        assert client.socket.is_closed
        assert len(client.goaways) == 2

    def test_drain_lets_started_requests_finish(self, client: Client) -> None:
        stream_id = client.open()
        client.connection.drain()
        client.send(frame(PING, ACK, 0, DRAIN_PING))
        client.data(stream_id, prefixed(b"1"), END_STREAM)
        assert client.respond(stream_id).message == b"world"
        client.loop.wait(1)
        assert client.socket.is_closed

    def test_drain_without_calls_closes_at_once(self, client: Client) -> None:
        client.connection.drain()
        client.send(frame(PING, ACK, 0, DRAIN_PING))
        assert client.socket.is_closed

    def test_goaway_is_sent_once(self, client: Client) -> None:
        stream_id = client.call()
        client.connection.drain()
        client.connection.drain()
        client.send(frame(PING, ACK, 0, DRAIN_PING) * 2)
        client.connection.drain()
        client.settle()
        assert client.goaways[2:] == [(stream_id, ErrorCode.NO_ERROR)]

    def test_calls_that_arrive_with_the_last_ping_are_dispatched(self, client: Client) -> None:
        """Otherwise they would stay queued until the next call of any client."""
        client.connection.drain()
        request = frame(HEADERS, END_HEADERS, 1, client.block(fields())) + frame(DATA, END_STREAM, 1, prefixed(b"1"))
        client.send(request + frames.rst_stream(1, ErrorCode.CANCEL) + frame(PING, ACK, 0, DRAIN_PING))
        assert client.socket.is_closed
        assert (client.queued, client.server.cancelled_ids) == ([b"1"], [1])
        assert client.server.queue_notifications == 1

    def test_close_does_not_wait_for_calls(self, client: Client) -> None:
        stream_id = client.call()
        client.connection.close()
        client.connection.close()
        client.settle()
        assert client.goaways == [(stream_id, ErrorCode.NO_ERROR)]
        assert client.socket.is_closed
        client.connection.drain()
        client.connection.respond(stream_id, b"too late")
        client.settle()
        client.disconnect()
        assert client.server.cancelled_ids == []

    def test_client_that_does_not_read_goaway_is_aborted(self, client: Client) -> None:
        client.connection.close()
        client.loop.wait(LINGER_S - 0.001)
        assert not client.socket.is_aborted
        client.loop.wait(0.001)
        assert client.socket.is_aborted

    def test_abort_sends_nothing(self, client: Client) -> None:
        client.connection.abort()
        client.settle()
        assert (client.socket.is_aborted, client.goaways) == (True, [])

    @pytest.mark.parametrize("grace_s", [30.0, inf])
    def test_connection_drains_at_its_maximum_age(self, grace_s: float) -> None:
        server = FakeServer()
        server.max_age_s, server.max_age_grace_s = 100.0, grace_s
        client = Client(server)
        client.call()
        client.loop.wait(89)
        client.settle()
        assert client.goaways == []
        client.loop.wait(22)
        client.settle()
        assert client.goaways == [(MAX_STREAM_ID, ErrorCode.NO_ERROR)]
        client.send(frame(PING, ACK, 0, DRAIN_PING))
        client.loop.wait(30)
        client.settle()
        assert client.socket.is_closed == (grace_s < inf)

    @pytest.mark.parametrize("waited_s", [0, 111])
    def test_timers_are_cancelled_when_the_connection_is_lost(self, waited_s: float) -> None:
        server = FakeServer()
        server.max_age_s, server.max_age_grace_s = 100.0, 1000.0
        client = Client(server, sends_preface=waited_s > 0)
        client.loop.wait(waited_s)
        assert client.loop.timers
        client.disconnect()
        assert client.loop.timers == []

    def test_maximum_age_varies_between_connections(self) -> None:
        server = FakeServer()
        server.max_age_s = 100.0
        ages_s = {timer.due_s for _ in range(20) for timer in Client(server).loop.timers}
        assert len(ages_s) > 1
        assert all(90 <= age_s <= 110 for age_s in ages_s)
