"""Slow lane: fair sharing of CPU time between connections."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.transport.grpc import slow_lane as module
from ratelimit_rls.transport.grpc.slow_lane import (
    BLOCKED_INTERVAL_S,
    INLINE_BURST_S,
    INLINE_SHARE,
    LANE_SLICE_S,
    MAX_DEBT_S,
    SlowLane,
)


class Loop:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.soon: list[Callable[[], None]] = []

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


class Reader:
    """Fake connection with a number of slices left to read."""

    def __init__(self, loop: Loop, lane: SlowLane, slices: int, slice_s: float = 1.01 * LANE_SLICE_S) -> None:
        self.slow_s = 0.0
        self.left = slices
        self._loop, self._lane, self._slice_s = loop, lane, slice_s
        lane.enqueue(self)

    def continue_reading(self) -> None:
        self._loop.now_s += self._slice_s
        self.slow_s += self._slice_s
        self.left -= 1
        if self.left:
            self._lane.enqueue(self)

    def abort(self) -> None:
        self.left = 0


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(module, "monotonic", lambda: loop.now_s)
    return loop


@pytest.fixture
def lane(loop: Loop) -> SlowLane:
    return SlowLane(lambda callback: loop.soon.append(callback))


def test_iteration_time_does_not_depend_on_queue_length(loop: Loop, lane: SlowLane) -> None:
    readers = [Reader(loop, lane, 10) for _ in range(50)]
    loop.turn()
    assert sum(reader.left for reader in readers) == 499


def test_error_of_one_connection_closes_it_and_not_the_lane(loop: Loop, lane: SlowLane) -> None:
    broken, fine = Reader(loop, lane, 3), Reader(loop, lane, 1)
    broken.continue_reading = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    with capture_logs() as lines:
        for _ in range(3):
            loop.turn()
    assert (broken.left, fine.left, len(lane)) == (0, 0, 0)
    assert [line["event"] for line in lines] == ["slow_input_failed"]


def test_queue_is_drained_and_then_nothing_is_scheduled(loop: Loop, lane: SlowLane) -> None:
    readers = [Reader(loop, lane, 3) for _ in range(5)]
    while loop.soon:
        loop.turn()
    assert not any(reader.left for reader in readers)
    assert len(lane) == 0


def test_connections_have_equal_shares(loop: Loop, lane: SlowLane) -> None:
    readers = [Reader(loop, lane, 100) for _ in range(4)]
    for _ in range(40):
        loop.turn()
    assert [reader.left for reader in readers] == [90] * 4


def test_new_connection_is_next(loop: Loop, lane: SlowLane) -> None:
    for _ in range(50):
        Reader(loop, lane, 1000)
    for _ in range(500):
        loop.turn()
    newcomer = Reader(loop, lane, 1)
    loop.turn()
    loop.turn()
    assert newcomer.left == 0


def test_idle_time_earns_no_credit(loop: Loop, lane: SlowLane) -> None:
    """An idle connection gets an equal share afterwards, and does not catch up."""
    busy = Reader(loop, lane, 1000)
    for _ in range(100):
        loop.turn()
    idle = Reader(loop, lane, 1000)
    for _ in range(20):
        loop.turn()
    assert 9 <= 1000 - idle.left <= 11
    assert 109 <= 1000 - busy.left <= 111


def test_short_slices_share_an_iteration(loop: Loop, lane: SlowLane) -> None:
    readers = [Reader(loop, lane, 1, LANE_SLICE_S / 10) for _ in range(8)]
    loop.turn()
    assert not any(reader.left for reader in readers)


def test_some_slow_input_is_read_inline(loop: Loop, lane: SlowLane) -> None:
    assert lane.has_inline_time(loop.now_s)
    lane.charge_inline(INLINE_BURST_S)
    assert not lane.has_inline_time(loop.now_s)
    loop.now_s += INLINE_BURST_S
    assert lane.has_inline_time(loop.now_s)
    lane.charge_inline(1.01 * INLINE_BURST_S * INLINE_SHARE)
    assert not lane.has_inline_time(loop.now_s)


def test_blocked_lane_reads_one_connection_at_a_time(loop: Loop) -> None:
    blocked = True
    lane = SlowLane(lambda callback: loop.soon.append(callback), lambda: blocked)
    readers = [Reader(loop, lane, 1, 0.0) for _ in range(5)]
    loop.turn()
    assert sum(reader.left for reader in readers) == 4
    for _ in range(100):
        loop.turn()
    assert sum(reader.left for reader in readers) == 4
    loop.now_s += 1.01 * BLOCKED_INTERVAL_S
    loop.turn()
    assert sum(reader.left for reader in readers) == 3
    blocked = False
    loop.turn()
    assert not any(reader.left for reader in readers)
    assert not loop.soon


def test_long_pause_is_not_owed_for_long(loop: Loop, lane: SlowLane) -> None:
    lane.charge_inline(60.0)
    loop.now_s += 1.01 * INLINE_BURST_S / INLINE_SHARE
    assert lane.has_inline_time(loop.now_s)


def test_cpu_time_of_the_past_delays_a_connection_only_so_long(loop: Loop, lane: SlowLane) -> None:
    fresh = [Reader(loop, lane, 100) for _ in range(20)]
    loop.turn()
    old = Reader.__new__(Reader)
    old.__dict__ |= {**fresh[0].__dict__, "slow_s": 5.0, "left": 2}
    lane.enqueue(old)
    assert old.slow_s <= fresh[0].slow_s + MAX_DEBT_S
    for _ in range(20 * 10):
        loop.turn()
    assert old.left == 0
