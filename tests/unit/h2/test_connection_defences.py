"""Defences of a connection against floods, stalls and memory use; well-behaved clients are not affected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.config import Timeouts
from ratelimit_rls.h2.connection import ANNOUNCED_S, KEEPALIVE_PING
from ratelimit_rls.h2.flood_budgets import ALLOWANCES
from ratelimit_rls.h2.frame_handlers import DRAIN_PING
from ratelimit_rls.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    ErrorCode,
    Setting,
    frame,
)
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.h2.status import RpcError, StatusCode
from tests.unit.h2.client import Client, FakeApplication, fields, prefixed

TIMEOUTS = Timeouts()
UNKNOWN_KIND = 0x55


@pytest.fixture
def client() -> Client:
    return Client()


def flood(reason: Reason) -> int:
    """Return one frame more than the budget allows."""
    return int(ALLOWANCES[reason].burst) + 1


class TestFloods:
    @pytest.fixture(
        params=[
            (Reason.PING_FLOOD, lambda _: frame(PING, 0, 0, b"12345678")),
            (Reason.PING_FLOOD, lambda _: frame(PING, ACK, 0, b"12345678")),
            (Reason.SETTINGS_FLOOD, lambda _: frames.settings({})),
            (Reason.SETTINGS_FLOOD, lambda _: frame(frames.SETTINGS, ACK, 0)),
            (Reason.PRIORITY_FLOOD, lambda _: frame(PRIORITY, 0, 9, bytes(5))),
            (Reason.WINDOW_UPDATE_FLOOD, lambda _: frames.window_update(0, 1)),
            (Reason.WINDOW_UPDATE_FLOOD, lambda stream_id: frames.window_update(stream_id, 1)),
            (Reason.EMPTY_DATA_FLOOD, lambda stream_id: frame(DATA, 0, stream_id)),
            (Reason.EMPTY_DATA_FLOOD, lambda stream_id: frame(DATA, frames.PADDED, stream_id, b"\x01\0")),
            (Reason.UNKNOWN_FRAME_FLOOD, lambda _: frame(UNKNOWN_KIND, 0, 0, b"grease")),
            (Reason.UNKNOWN_FRAME_FLOOD, lambda _: frame(frames.GOAWAY, 0, 0, bytes(8))),
        ],
        ids=lambda case: case[0].value,
    )
    def case(self, request: pytest.FixtureRequest) -> tuple[Reason, Callable[[int], bytes]]:
        case: tuple[Reason, Callable[[int], bytes]] = request.param
        return case

    def test_burst_is_allowed_and_more_closes_connection(
        self, client: Client, case: tuple[Reason, Callable[[int], bytes]]
    ) -> None:
        reason, make = case
        stream_id = client.open()
        earned = int(ALLOWANCES[reason].per_call)  # earned by that call
        spent = 1 if reason is Reason.SETTINGS_FLOOD else 0  # the client's initial SETTINGS
        client.send(make(stream_id) * (flood(reason) - 1 + earned - spent))
        assert client.error is None
        assert client.server.abuse[reason] == 0
        client.send(make(stream_id))
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        assert client.server.abuse[reason] == 1

    def test_budget_recovers_with_time(self, client: Client) -> None:
        client.send(frame(PING, 0, 0, b"12345678") * (flood(Reason.PING_FLOOD) - 1))
        client.now_s += 60
        client.send(frame(PING, 0, 0, b"12345678") * (flood(Reason.PING_FLOOD) - 1))
        assert client.error is None

    def test_budget_recovers_with_calls(self, client: Client) -> None:
        for _ in range(3 * flood(Reason.PING_FLOOD)):
            client.respond(client.call())
            client.send(frame(PING, 0, 0, b"12345678"))
        assert client.error is None

    def test_earlier_calls_add_to_the_budget_up_to_a_limit(self, client: Client) -> None:
        """A client may update the windows of all its streams at once after their responses."""
        for _ in range(3000):
            client.respond(client.call())
        client.send(frames.window_update(0, 1) * 4 * 1024)
        assert client.error is None
        client.send(frames.window_update(0, 1) * 4 * 2048)
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_skipped_stream_ids_add_nothing_to_the_budget(self, client: Client) -> None:
        for _ in range(10):
            client.next_id += 10_000
            client.respond(client.call())
        client.send(frame(PING, 0, 0, b"12345678") * (flood(Reason.PING_FLOOD) + 10))
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_unsolicited_ping_acknowledgement_is_ignored(self, client: Client) -> None:
        client.send(frame(PING, ACK, 0, DRAIN_PING))
        assert client.goaways == []
        assert client.respond(client.call()).message == b"world"

    def test_frames_of_calls_after_goaway_are_budgeted(self, client: Client) -> None:
        client.call()
        client.connection.drain()
        client.send(frame(PING, ACK, 0, DRAIN_PING))
        assert not client.is_closed
        client.connection_frames.clear()
        client.send(frame(DATA, 0, 99, bytes(100)) * (flood(Reason.UNKNOWN_FRAME_FLOOD) + 1))
        assert client.is_closed
        assert client.server.abuse[Reason.UNKNOWN_FRAME_FLOOD] == 1

    def test_flood_of_new_header_blocks_closes_connection(self, client: Client) -> None:
        many = client.plain_block([(f"x-{number}", "v") for number in range(90)])
        while client.error is None:
            client.send(frame(HEADERS, END_HEADERS | END_STREAM, client.next_id, many))
            client.next_id += 2
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        assert client.next_id < 10_000


class TestResets:
    def reset_calls(self, client: Client, count: int) -> None:
        for _ in range(count):
            stream_id = client.open()
            client.send(
                frame(DATA, END_STREAM, stream_id, prefixed(b"hello")) + frames.rst_stream(stream_id, ErrorCode.CANCEL)
            )
            if client.error is not None:
                return
            client.server.queue.clear()
            client.connection.discard()

    def test_rapid_reset_with_skipped_ids_closes_connection(self, client: Client) -> None:
        for _ in range(flood(Reason.RAPID_RESET)):
            client.next_id += 2
            self.reset_calls(client, 1)
            if client.error is not None:
                break
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_rapid_reset_closes_connection(self, client: Client) -> None:
        self.reset_calls(client, flood(Reason.RAPID_RESET))
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        assert client.server.abuse[Reason.RAPID_RESET] == 1

    def test_timed_out_calls_are_not_rapid_resets(self, client: Client) -> None:
        """During an outage of thirty seconds, every call is cancelled after the client's timeout."""
        for _ in range(2 * flood(Reason.RAPID_RESET)):
            stream_id = client.call()
            client.now_s += 0.02
            client.reset(stream_id)
            client.connection.discard()
        assert client.error is None
        assert client.server.abuse[Reason.RAPID_RESET] == 0

    def test_many_concurrent_timeouts_are_not_rapid_resets(self, client: Client) -> None:
        """Reads follow each other closely, and each call is cancelled after 20 ms."""
        client.server.config.max_streams = 1000
        waiting: list[tuple[float, int]] = []
        for _ in range(2 * flood(Reason.RAPID_RESET)):
            waiting.append((client.now_s, client.call()))
            client.now_s += 0.0002
            while waiting and client.now_s - waiting[0][0] >= 0.02:
                client.reset(waiting.pop(0)[1])
                client.connection.discard()
        assert client.error is None
        assert client.server.abuse[Reason.RAPID_RESET] == 0

    def test_two_thousand_resets_at_once_are_allowed(self, client: Client) -> None:
        self.reset_calls(client, 2000)
        assert client.error is None

    def test_resets_are_allowed_for_each_answered_call(self, client: Client) -> None:
        for _ in range(2 * flood(Reason.RAPID_RESET)):
            client.respond(client.call())
            self.reset_calls(client, 1)
        assert client.error is None

    def test_too_many_provoked_resets_close_connection(self, client: Client) -> None:
        malformed = client.plain_block([(":method", "POST"), (":path", "/")])
        for _ in range(flood(Reason.RESETS_PROVOKED)):
            client.send(frame(HEADERS, END_HEADERS | END_STREAM, client.next_id, malformed))
            client.next_id += 2
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        assert client.server.abuse[Reason.RESETS_PROVOKED] == 1

    def test_unused_streams_that_are_reset_late_end_the_connection(self, client: Client) -> None:
        """Nothing was to be decided, so it did not time out because of the server."""
        for _ in range(flood(Reason.RAPID_RESET)):
            stream_id = client.open()
            client.now_s += 0.02
            client.reset(stream_id)
            client.now_s -= 0.02
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_data_on_streams_that_were_reset_is_budgeted(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, b"\xff" * 5, END_STREAM)
        client.send(frame(DATA, 0, stream_id, b"x"))
        assert client.error is None
        client.send(frame(DATA, 0, stream_id) * 2 * flood(Reason.EMPTY_DATA_FLOOD))
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_continuation_frames_are_budgeted(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, b"\xff" * 5, END_STREAM)
        client.send(frame(DATA, 0, stream_id, b"x"))
        block = frame(HEADERS, 0, stream_id) + frame(CONTINUATION, 0, stream_id) * 60
        block += frame(CONTINUATION, END_HEADERS, stream_id)
        client.send(block * (flood(Reason.HPACK_FLOOD) // 60 + 10))
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_calls_beyond_the_backlog_end_the_connection(self, client: Client) -> None:
        full = RpcError(StatusCode.RESOURCE_EXHAUSTED, "full")
        for _ in range(flood(Reason.RESETS_PROVOKED)):
            assert client.error is None
            stream_id = client.call()
            client.connection.reject(stream_id, full, client.now_s)
            client.settle()
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        client.connection.reject(stream_id, full, client.now_s)  # its other calls are rejected, too

    def test_client_may_exceed_a_stream_limit_that_it_does_not_know_yet(self, client: Client) -> None:
        before = client.server.config.max_streams
        client.server.config.max_streams = 2
        client.connection.announce_streams(before, client.now_s)
        client.settle()
        announced = client.frames_of_type(frames.SETTINGS)[-1]
        assert announced.payload == frames.settings({Setting.MAX_CONCURRENT_STREAMS: 2})[9:]
        client.open(), client.open()

        def rejected() -> ErrorCode | None:
            stream_id = client.open()
            return client.responses[stream_id].reset if client.error is None else None

        for _ in range(flood(Reason.RESETS_PROVOKED)):
            assert rejected() == ErrorCode.REFUSED_STREAM
        client.now_s += ANNOUNCED_S
        for _ in range(flood(Reason.RESETS_PROVOKED)):
            rejected()
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_resets_of_answered_streams_are_limited(self, client: Client) -> None:
        stream_id = client.call()
        client.respond(stream_id)
        client.send(frames.rst_stream(stream_id, ErrorCode.CANCEL) * flood(Reason.RAPID_RESET))
        assert client.error is None
        client.send(frames.rst_stream(stream_id, ErrorCode.CANCEL))
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM


class TestTimeouts:
    def test_incomplete_frame_times_out(self, client: Client) -> None:
        client.send(frame(PING, 0, 0, b"12345678")[:-1])
        client.check_progress(TIMEOUTS.frame_s)
        assert client.error is None
        client.check_progress(1)
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        assert client.server.abuse[Reason.IDLE_TIMEOUT] == 1

    def test_dripping_frame_times_out(self, client: Client) -> None:
        for byte in frame(DATA, 0, 1, bytes(100)):
            client.send(bytes([byte]))
            client.check_progress(1)
            if client.error is not None:
                break
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_incomplete_header_block_times_out(self, client: Client) -> None:
        client.send(frame(HEADERS, 0, 1, b"\x83"))
        for _ in range(int(TIMEOUTS.frame_s) + 1):
            client.send(frame(CONTINUATION, 0, 1, b"\x86"))
            client.check_progress(1)
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM

    def test_incomplete_message_times_out(self, client: Client) -> None:
        headers_only, partial, answered = client.open(), client.open(), client.call()
        client.data(partial, prefixed(bytes(1000))[:100])
        client.check_progress(TIMEOUTS.message_s)
        assert client.responses == {}
        client.check_progress(TIMEOUTS.message_s + 2)
        assert client.responses[headers_only].reset == client.responses[partial].reset == ErrorCode.CANCEL
        assert client.respond(answered).message == b"world"
        assert client.server.abuse[Reason.IDLE_TIMEOUT] == 2
        assert client.is_alive

    def test_unread_response_times_out(self, client: Client) -> None:
        client.settings({Setting.INITIAL_WINDOW_SIZE: 0})
        stream_id = client.call()
        client.respond(stream_id)
        assert client.server.buffered_bytes > 0
        client.check_progress(2 * TIMEOUTS.message_s + 2)
        assert client.responses[stream_id].reset == ErrorCode.CANCEL
        assert client.server.buffered_bytes == 0

    def test_idle_client_that_acknowledges_a_ping_stays(self, client: Client) -> None:
        for _ in range(3):
            client.connection_frames.clear()
            assert client.check_progress(TIMEOUTS.keepalive_s)
            assert [one.payload for one in client.frames_of_type(PING)] == [KEEPALIVE_PING]
            client.send(frame(PING, ACK, 0, KEEPALIVE_PING))

    def test_idle_client_that_ignores_a_ping_cannot_be_reached(self, client: Client) -> None:
        assert client.check_progress(TIMEOUTS.keepalive_s + TIMEOUTS.keepalive_timeout_s)
        assert not client.check_progress(1)
        assert client.server.abuse[Reason.KEEPALIVE_TIMEOUT] == 1

    def test_keepalive_can_be_disabled(self) -> None:
        server = FakeApplication()
        server.config.timeouts = TIMEOUTS._replace(keepalive_s=0)
        client = Client(server)
        client.check_progress(1000)
        assert client.frames_of_type(PING) == []


class TestBufferedBytes:
    def test_unfinished_input_is_reported_to_the_server(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(bytes(10_000))[:5000])
        assert client.server.buffered_bytes == 5000
        client.send(frame(PING, 0, 0, b"12345678")[:10])
        assert client.server.buffered_bytes == 5010
        client.send(b"12345678"[-7:])
        client.reset(stream_id)
        assert client.server.buffered_bytes == 0
        client.send(frame(HEADERS, 0, client.next_id, bytes(700)))
        assert client.server.buffered_bytes == 700

    def test_disconnected_client_buffers_nothing(self, client: Client) -> None:
        stream_id = client.open()
        client.data(stream_id, prefixed(bytes(10_000))[:5000])
        client.connection.disconnect(Reason.MESSAGE_TOO_LARGE, "too much")
        client.settle()
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        assert client.server.buffered_bytes == 0
        client.disconnect()
        assert client.server.buffered_bytes == 0

    def test_cached_header_blocks_count_as_buffered(self, client: Client) -> None:
        client.respond(client.call())
        for _ in range(3):
            stream_id = client.next_id
            client.next_id += 2
            client.send(frame(HEADERS, END_HEADERS, stream_id, client.plain_block(fields(x_id=str(stream_id)))))
            client.data(stream_id, prefixed(b"hello"), END_STREAM)
            client.respond(stream_id)
        assert client.server.buffered_bytes > 1000
        client.connection.clear_header_cache()
        assert client.server.buffered_bytes == 0
        assert client.respond(client.call()).message == b"world"
