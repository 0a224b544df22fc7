"""asyncio protocol of a connection: timeouts, rejected connections, the backlog, and cleanup."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.config import Timeouts
from ratelimit_rls.h2.flood_budgets import ALLOWANCES
from ratelimit_rls.h2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    ErrorCode,
    frame,
)
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.transport.grpc import protocol as module
from ratelimit_rls.transport.grpc import slow_lane
from ratelimit_rls.transport.grpc.slow_lane import SlowLane
from ratelimit_rls.transport.peers import DISCONNECTED
from tests.unit.h2.client import fields, prefixed
from tests.unit.transport.http2_client import Client, FakeServer

TIMEOUTS = Timeouts()
UNKNOWN_KIND = 0x55


class Clock:
    """Clock that moves only when a test moves it."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


@pytest.fixture
def client(clock: Clock) -> Client:
    return Client()


class TestTimeouts:
    def check(self, client: Client, clock: Clock, seconds: float) -> None:
        """Check timeouts once a second, as the server does."""
        for _ in range(int(seconds)):
            clock.now_s += 1
            client.connection.check_timeouts(clock.now_s)
        client.settle()

    def test_client_that_never_reads_is_disconnected(self, client: Client, clock: Clock) -> None:
        client.connection.pause_writing()
        self.check(client, clock, TIMEOUTS.write_s)
        assert not client.socket.is_aborted
        self.check(client, clock, 1)
        assert client.socket.is_aborted
        assert client.server.abuse.count(Abuse.WRITE_TIMEOUT) == 1

    def test_idle_client_that_ignores_a_ping_is_disconnected(self, client: Client, clock: Clock) -> None:
        self.check(client, clock, TIMEOUTS.keepalive_s + TIMEOUTS.keepalive_timeout_s)
        assert not client.socket.is_aborted
        self.check(client, clock, 1)
        assert client.socket.is_aborted
        assert client.server.abuse.count(Abuse.KEEPALIVE_TIMEOUT) == 1

    def test_missing_preface_is_recorded_as_abuse(self) -> None:
        client = Client(sends_preface=False)
        client.loop.wait(TIMEOUTS.preface_s)
        assert client.socket.is_closed
        assert client.server.abuse.count(Abuse.IDLE_TIMEOUT) == 1


class TestRejectedConnections:
    def test_rejected_connection_gets_goaway(self) -> None:
        server = FakeServer()
        server.rejection = Abuse.TOO_MANY_CONNECTIONS
        client = Client(server, sends_preface=False)
        client.send(PREFACE + frames.settings({}))
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        client.disconnect()
        assert server.connections == []
        assert server.abuse.count(Abuse.TOO_MANY_CONNECTIONS) == 1


class TestCleanup:
    @pytest.fixture
    def _gc_disabled(self) -> Iterator[None]:
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.usefixtures("_gc_disabled")
    @pytest.mark.parametrize("ending", ["lost", "flood", "rejected"])
    async def test_closed_connection_is_freed_without_gc(self, ending: str) -> None:
        """The service nearly disables garbage collection, so a reference cycle is a leak."""
        loop = asyncio.get_running_loop()
        server = FakeServer()
        server.slow_lane = server.bulk_lane = SlowLane(loop.call_soon)
        server.rejection = Abuse.TOO_MANY_CONNECTIONS if ending == "rejected" else None
        made: list[weakref.ref[module.GrpcProtocol]] = []

        def new_connection() -> module.GrpcProtocol:
            connection = module.GrpcProtocol(server)
            made.append(weakref.ref(connection))
            return connection

        listener = await loop.create_server(new_connection, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        call = frame(HEADERS, END_HEADERS, 1, Client().plain_block(fields()))
        writer.write(PREFACE + frames.settings({}) + call)
        if ending == "flood":
            writer.write(frame(PING, 0, 0, b"12345678") * 2 * int(ALLOWANCES[Reason.PING_FLOOD].burst))
        while not made or (ending != "rejected" and not server.connections):
            await asyncio.sleep(0)
        if ending == "lost":
            writer.close()
        else:
            async with asyncio.timeout(10):
                await reader.read()
            writer.close()
        async with asyncio.timeout(10):
            while made[0]() is not None:
                await asyncio.sleep(0.001)
        listener.close()


class TestLargeReads:
    """Much input at once shares the time of slow input; a few calls never wait."""

    MESSAGE = b"x" * 1000

    @pytest.fixture
    def client(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Client:
        monkeypatch.setattr(slow_lane, "monotonic", clock)
        client = Client()
        client.send(self.calls(client, 1, 1))  # its header block is cached from now on
        return client

    def calls(self, client: Client, first_id: int, count: int) -> bytes:
        head = client.plain_block(fields())
        return b"".join(
            frame(HEADERS, END_HEADERS, one, head) + frame(DATA, END_STREAM, one, prefixed(self.MESSAGE))
            for one in range(first_id, first_id + 2 * count, 2)
        )

    def test_many_calls_at_once_wait_when_the_time_is_used_up(self, client: Client) -> None:
        many = self.calls(client, 3, 5)
        buffered_bytes = client.server.buffered_bytes
        client.server.slow_lane.charge_inline(1.0)
        client.connection.data_received(many)
        assert len(client.queued) == 1
        assert not client.socket.reads
        assert client.server.buffered_bytes == buffered_bytes + len(many)
        client.settle()
        assert len(client.queued) == 6
        assert client.socket.reads
        assert client.server.buffered_bytes == buffered_bytes

    def test_many_calls_at_once_wait_while_others_are_queued(self, client: Client, clock: Clock) -> None:
        client.server.blocks_bulk = True
        client.server.bulk_lane._run_s = clock.now_s
        client.server.slow_lane.charge_inline(1.0)
        client.connection.data_received(self.calls(client, 3, 5))
        for _ in range(10):
            client.loop.turn()
        assert len(client.queued) == 1
        client.server.blocks_bulk = False
        client.settle()
        assert len(client.queued) == 6

    def test_slow_input_before_many_calls_does_not_help(self, client: Client, clock: Clock) -> None:
        client.server.blocks_bulk = True
        client.server.bulk_lane._run_s = clock.now_s
        client.server.slow_lane.charge_inline(1.0)
        client.connection.data_received(frame(PING, 0, 0, b"12345678"))  # waits in the slow lane
        client.connection.data_received(self.calls(client, 3, 5))
        for _ in range(10):
            client.loop.turn()
        assert len(client.queued) == 1
        client.server.blocks_bulk = False
        client.settle()
        assert len(client.queued) == 6

    def test_large_input_is_read_while_calls_of_others_stay_queued(self, client: Client, clock: Clock) -> None:
        client.server.blocks_bulk = True
        client.server.slow_lane.charge_inline(1.0)
        client.connection.data_received(self.calls(client, 3, 5))
        for _ in range(3):
            clock.now_s += 1.01 * slow_lane.BLOCKED_INTERVAL_S
            client.loop.turn()
        assert len(client.queued) == 6

    def test_much_input_waits_while_others_are_queued_even_if_there_is_time(self, client: Client, clock: Clock) -> None:
        client.server.blocks_bulk = True
        client.server.bulk_lane._run_s = clock.now_s
        client.connection.data_received(self.calls(client, 3, 5))
        assert len(client.queued) == 1

    def test_deferred_preface_does_not_time_out(self, clock: Clock) -> None:
        client = Client(sends_preface=False)
        client.server.blocks_bulk = True
        client.server.bulk_lane._run_s = 2 * clock.now_s  # so that nothing is read
        client.connection.data_received(PREFACE + frames.settings({}) + bytes(5000))
        client.loop._soon.clear()
        client.loop.wait(10 * TIMEOUTS.preface_s)
        assert not client.is_closed

    @pytest.mark.parametrize("has_closed", [True, False])
    def test_deferred_input_of_a_disconnected_client_is_dropped(
        self, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch, has_closed: bool
    ) -> None:
        monkeypatch.setattr(module, "has_peer_closed", lambda transport: has_closed)
        client.server.blocks_bulk = True
        client.server.bulk_lane._run_s = clock.now_s
        client.server.slow_lane.charge_inline(1.0)
        client.connection.data_received(self.calls(client, 3, 5))
        client.connection.check_timeouts(clock.now_s + 1)
        assert client.socket.is_aborted is has_closed

    def defer_for_ever(self, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have every frame take longer than a turn, so that the input is never read to its end."""
        handle_frame = client.connection._handle_frame

        def take_long(kind: int, flags: int, stream_id: int, payload: bytes) -> None:
            clock.now_s += 2 * module.SLOW_SLICE_S
            handle_frame(kind, flags, stream_id, payload)

        monkeypatch.setattr(client.connection, "_handle_frame", take_long)
        client.server.slow_lane.charge_inline(1.0)
        client.connection.data_received(frame(PING, 0, 0, b"12345678") * 3)

    def test_input_that_is_not_read_to_its_end_in_time_ends_the_connection(
        self, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.defer_for_ever(client, clock, monkeypatch)
        client.loop.turn()
        began_s = clock.now_s
        client.connection.check_timeouts(began_s + TIMEOUTS.frame_s - 0.1)
        assert not client.is_closed
        client.connection.check_timeouts(began_s + TIMEOUTS.frame_s + 0.1)
        client.settle()
        assert client.error == ErrorCode.ENHANCE_YOUR_CALM
        assert client.server.abuse.count(Abuse.SLOW_INPUT_TIMEOUT) == 1

    def test_deferred_input_does_not_time_out(
        self, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.defer_for_ever(client, clock, monkeypatch)
        client.connection.check_timeouts(clock.now_s + 10 * TIMEOUTS.frame_s)
        assert not client.is_closed

    def test_input_that_was_read_to_its_end_is_no_longer_late(
        self, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.defer_for_ever(client, clock, monkeypatch)
        client.settle()
        assert client.socket.reads
        assert client.connection.late_s(clock.now_s + 10 * TIMEOUTS.frame_s) == 0.0
        client.connection.check_timeouts(clock.now_s + 1)
        assert not client.is_closed

    def test_few_calls_do_not_wait(self, client: Client) -> None:
        client.server.slow_lane.charge_inline(1.0)
        client.connection.data_received(self.calls(client, 3, 2))
        assert len(client.queued) == 3

    def test_time_of_large_reads_is_charged(
        self, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        receive_data = client.connection.receive_data

        def take_long(data: bytes, now_s: float) -> None:
            receive_data(data, now_s)
            clock.now_s += 2 * slow_lane.INLINE_BURST_S

        monkeypatch.setattr(client.connection, "receive_data", take_long)
        client.connection.data_received(self.calls(client, 3, 5))
        assert len(client.queued) == 6
        assert client.connection.slow_s == pytest.approx(2 * slow_lane.INLINE_BURST_S)
        assert not client.server.slow_lane.has_inline_time(clock.now_s)


class TestBacklog:
    """A connection with many messages in the backlog is not read."""

    @pytest.fixture
    def paused(self, client: Client) -> Client:
        self.call(client, 1)  # its header block is cached from now on
        assert client.queued == [b"1"]
        client.connection.pause_for_backlog()
        assert not client.socket.reads
        return client

    def call(self, client: Client, stream_id: int) -> None:
        head = frame(HEADERS, END_HEADERS, stream_id, client.plain_block(fields()))
        client.send(head + frame(DATA, END_STREAM, stream_id, prefixed(b"%d" % stream_id)))

    def test_nothing_is_read_until_it_is_resumed(self, paused: Client, clock: Clock) -> None:
        self.call(paused, 3)  # on its way
        assert paused.queued == [b"1"]
        clock.now_s += 10 * TIMEOUTS.frame_s
        paused.connection.check_timeouts(clock.now_s)
        assert paused.error is None
        paused.connection.resume_from_backlog()
        paused.settle()
        assert paused.queued == [b"1", b"3"]
        assert paused.socket.reads

    def test_paused_connection_stays_paused_when_the_client_reads_again(self, paused: Client) -> None:
        self.call(paused, 3)
        paused.connection.pause_writing()
        paused.connection.resume_writing()
        paused.settle()
        assert paused.queued == [b"1"]
        assert not paused.socket.reads
        paused.connection.resume_from_backlog()
        paused.settle()
        assert paused.queued == [b"1", b"3"]
        assert paused.socket.reads

    def test_a_closed_connection_is_not_resumed(self, paused: Client) -> None:
        paused.disconnect()
        paused.connection.resume_from_backlog()
        paused.loop.run()


def test_connection_that_was_reset_before_it_was_accepted_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no address, and would be exempt from the limits of its peer."""
    monkeypatch.setattr(module, "peer_address", lambda transport: DISCONNECTED)
    client = Client(sends_preface=False)
    assert client.socket.is_aborted
    assert not client.server.connections
    client.send(PREFACE + frames.settings({}))
    assert not client.writes
    client.disconnect()


def test_connection_error_is_not_logged_at_info_level() -> None:
    """A client can cause any number of them. Connections that a defence closes are logged a few times a second."""
    client = Client(sends_preface=False)
    with capture_logs() as lines:
        client.send(b"GET / HTTP/1.1\r\n\r\n")
    assert client.socket.is_closed
    assert {line["log_level"] for line in lines} <= {"debug"}


def test_every_reason_of_h2_is_a_value_of_the_metric() -> None:
    assert {*map(str, Reason)} <= {*map(str, Abuse)}
    for reason in Reason:
        client = Client()
        client.connection.on_abuse(reason, 3)
        assert client.server.abuse.count(Abuse(reason.value)) == 3
