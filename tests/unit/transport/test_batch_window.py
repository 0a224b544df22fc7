"""Calls wait for others to share a batch: only while the process is busy, and never close to a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratelimit_rls.pipeline.batch import Batch
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.telemetry.abuse import AbuseLog
from ratelimit_rls.transport.grpc.batch_window import MAX_WAITING_CALLS, BatchWindow
from ratelimit_rls.transport.grpc.http2_server import Http2Server
from ratelimit_rls.transport.grpc.options import GrpcOptions
from ratelimit_rls.transport.health import Health

METHOD = "/service/Method"
WINDOW_S, MARGIN_S = 0.002, 0.003


class Clock:
    """A clock with timers that the test sets off."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        timer = (delay_s, callback)
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: self.timers.remove(timer))


def queued_call(arrived_s: float, deadline_in_s: float = inf) -> Any:
    connection = SimpleNamespace(respond=lambda stream_id, message: None)
    return connection, 1, b"", arrived_s, SimpleNamespace(deadline_in_s=deadline_in_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def window(clock: Clock, ended: list[str]) -> BatchWindow:
    return BatchWindow(
        WINDOW_S, MARGIN_S, lambda: ended.append("end"), clock=lambda: clock.now_s, call_later=clock.call_later
    )


def test_calls_wait_until_the_window_of_the_first_ends(window: BatchWindow, clock: Clock, ended: list[str]) -> None:
    first = queued_call(clock.now_s)
    assert window.holds([first])
    clock.now_s += 0.0015
    assert window.holds([first, queued_call(clock.now_s)])
    ((delay_s, on_timer),) = clock.timers
    assert delay_s == pytest.approx(WINDOW_S)
    assert window.is_open

    clock.now_s += 0.0006
    on_timer()
    assert ended == ["end"]
    assert not window.is_open
    assert not window.holds([first])


def test_timer_that_fires_early_is_set_again(window: BatchWindow, clock: Clock) -> None:
    call = queued_call(clock.now_s)
    assert window.holds([call])
    clock.now_s += 0.0015
    clock.timers.pop()[1]()
    assert window.holds([call])
    assert clock.timers[0][0] == pytest.approx(0.0005)


@pytest.mark.parametrize(("deadline_in_s", "waits"), [(0.0129, False), (0.0131, True), (0.002, False), (-1, False)])
def test_calls_wait_only_if_five_windows_are_left_until_the_margin(
    window: BatchWindow, clock: Clock, deadline_in_s: float, waits: bool
) -> None:
    calls = [queued_call(clock.now_s), queued_call(clock.now_s, deadline_in_s)]
    assert window.holds(calls) is waits


def test_timers_of_whole_milliseconds_count_for_shorter_windows(clock: Clock) -> None:
    window = BatchWindow(0.0001, MARGIN_S, lambda: None, clock=lambda: clock.now_s, call_later=clock.call_later)
    assert not window.holds([queued_call(clock.now_s, 0.0079)])
    assert window.holds([queued_call(clock.now_s, 0.0081)])


def test_many_calls_go_on_at_once(window: BatchWindow, clock: Clock) -> None:
    calls = [queued_call(clock.now_s)] * MAX_WAITING_CALLS
    assert window.holds(calls[:-1])
    assert not window.holds(calls)


class Method:
    """A pipeline whose batches are answered when the test says so."""

    wants_metadata = False
    max_message_bytes = 1000

    def __init__(self) -> None:
        self.batches: list[tuple[int, asyncio.Future[None]]] = []

    async def run(self, batch: Batch) -> None:
        decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.batches.append((len(batch.messages), decided))
        await decided
        batch.respond_all([b""] * len(batch.messages))

    @property
    def sizes(self) -> list[int]:
        return [size for size, _ in self.batches]


@pytest.fixture
def method() -> Method:
    return Method()


async def server_of(method: Method, directory: Path, window_s: float) -> Http2Server:
    options = GrpcOptions("127.0.0.1:0", batch_window_s=window_s)
    pipelines: Any = {METHOD: method}
    queue = ThrottleQueue(1, MARGIN_S)
    return Http2Server(options, pipelines, queue, Health(), abuse=AbuseLog(), directory=directory)


async def receive(server: Http2Server, calls: int) -> None:
    """Let calls arrive, and end the iteration of the event loop."""
    arrived_s = asyncio.get_running_loop().time() + 3600  # the window does not end during a test
    server._methods[METHOD].queue.extend(queued_call(arrived_s) for _ in range(calls))
    server.on_calls_queued()
    await asyncio.sleep(0)


def decide(batch: tuple[int, asyncio.Future[None]]) -> None:
    batch[1].set_result(None)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_busy_process_collects_calls_until_the_others_are_answered(method: Method, tmp_path: Path) -> None:
    server = await server_of(method, tmp_path, WINDOW_S)
    await receive(server, 1)
    assert method.sizes == [1]
    await receive(server, 1)
    await receive(server, 2)
    assert method.sizes == [1]

    decide(method.batches[0])
    await turns()
    assert method.sizes == [1, 3]
    decide(method.batches[1])
    await turns()
    assert server.in_flight == 0
    await receive(server, 1)
    assert method.sizes == [1, 3, 1]


async def test_without_a_window_calls_never_wait(method: Method, tmp_path: Path) -> None:
    server = await server_of(method, tmp_path, 0)
    await receive(server, 1)
    await receive(server, 2)
    assert method.sizes == [1, 2]
