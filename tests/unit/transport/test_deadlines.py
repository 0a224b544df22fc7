"""The shared timer of all batches, with a manual clock."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.pipeline.deadlines import TIMER_EARLY_S, Deadlines


class Batch:
    """Fake batch with one call per deadline."""

    def __init__(self, *due_s: float) -> None:
        self._left = dict(enumerate(due_s))
        self.due_s = min(due_s)

    def expire(self, now_s: float) -> list[int]:
        numbers = [number for number, due_s in self._left.items() if due_s <= now_s]
        self._left = {number: due_s for number, due_s in self._left.items() if number not in numbers}
        self.due_s = min(self._left.values(), default=inf)
        return numbers


class Clock:
    """Fake event loop timers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: dict[Timer, float] = {}
        self.set = 0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        assert delay_s >= 0
        timer = Timer(self, callback)
        self.timers[timer] = self.now_s + delay_s
        self.set += 1
        return timer

    def turn(self, to_s: float) -> None:
        while self.timers and min(self.timers.values()) <= to_s:
            timer = min(self.timers, key=self.timers.__getitem__)
            self.now_s = self.timers.pop(timer)
            timer.callback()
        self.now_s = to_s


class Timer:
    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self.callback = callback

    def cancel(self) -> None:
        self._clock.timers.pop(self, None)


class Harness:
    def __init__(self) -> None:
        self.clock = Clock()
        self.settled: list[tuple[float, Batch, int]] = []
        self.deadlines = Deadlines(clock=lambda: self.clock.now_s, call_later=self.clock.call_later)

    def _expire(self, batch: Batch, now_s: float) -> None:
        self.settled += [(self.clock.now_s, batch, number) for number in batch.expire(now_s)]

    def watch(self, *batches: Batch) -> None:
        for batch in batches:
            self.deadlines.watch(batch, self._expire)


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_calls_are_settled_when_due_with_one_timer(harness: Harness) -> None:
    first, second = Batch(0.017, 0.017, 0.5), Batch(0.1)
    harness.watch(first, second)
    assert len(harness.clock.timers) == 1
    harness.clock.turn(1.0)
    assert harness.settled == [(0.017, first, 0), (0.017, first, 1), (0.1, second, 0), (0.5, first, 2)]
    assert not harness.clock.timers


def test_earlier_deadline_reschedules_the_timer(harness: Harness) -> None:
    patient, hasty = Batch(10.0), Batch(0.017)
    harness.watch(patient, hasty)
    assert list(harness.clock.timers.values()) == [0.017]
    harness.clock.turn(1.0)
    assert harness.settled == [(0.017, hasty, 0)]
    assert list(harness.clock.timers.values()) == [10.0]


def test_finished_batches_leave_no_timer(harness: Harness) -> None:
    for number in range(160):
        batch = Batch(harness.clock.now_s + 0.016)
        harness.watch(batch)
        harness.deadlines.forget(batch)
        harness.clock.turn((number + 1) / 1000)
    assert harness.settled == []
    assert harness.clock.set <= 11
    harness.clock.turn(1.0)
    assert not harness.clock.timers
    assert not harness.deadlines._pending


def test_call_that_is_already_due_is_settled_in_the_next_iteration(harness: Harness) -> None:
    harness.clock.now_s = 1.0
    batch = Batch(inf, 0.5)
    harness.watch(batch, Batch(inf))
    assert list(harness.clock.timers.values()) == [1.0]
    harness.clock.turn(1.0)
    assert harness.settled == [(1.0, batch, 1)]


def test_calls_due_within_a_tick_are_settled_together(harness: Harness) -> None:
    batch = Batch(0.017, 0.017 + TIMER_EARLY_S / 2, 0.017 + TIMER_EARLY_S * 2)
    harness.watch(batch)
    harness.clock.turn(0.0171)
    assert [number for _, _, number in harness.settled] == [0, 1]


def test_error_of_one_batch_does_not_stop_the_timer(harness: Harness) -> None:
    broken, fine, later = Batch(0.5), Batch(0.5), Batch(0.7)
    harness.deadlines.watch(broken, lambda *_: 1 / 0)  # type: ignore[arg-type]
    harness.watch(fine, later)
    with capture_logs() as lines:
        harness.clock.turn(1.0)
    assert [batch for _, batch, _ in harness.settled] == [fine, later]
    assert [line["event"] for line in lines] == ["deadline_failed"]


def test_no_timer_fires_after_close(harness: Harness) -> None:
    harness.watch(Batch(0.5))
    harness.deadlines.close()
    harness.clock.turn(1.0)
    assert harness.settled == []
