"""The one timer of all batches, on a clock that is turned by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import pytest

from ratelimit_rls.transport.grpc.deadlines import EARLY_S, Deadlines, deadline_s
from ratelimit_rls.transport.grpc.door import Answered, Failure


class Batch:
    """As many calls as deadlines."""

    def __init__(self, *due_s: float, at_once: Sequence[int] = ()) -> None:
        self._left = dict(enumerate(due_s))
        self._at_once = list(at_once)
        self.due_s = -1.0 if at_once else min(due_s)

    def due(self, now_s: float) -> list[tuple[int, bytes | Failure]]:
        numbers = [*self._at_once, *(number for number, due_s in self._left.items() if due_s <= now_s)]
        self._at_once = []
        self._left = {number: due_s for number, due_s in self._left.items() if number not in numbers}
        self.due_s = min(self._left.values(), default=inf)
        return [(number, b"") for number in numbers]

    async def answers(self) -> list[Answered | None]:
        raise AssertionError("a timer settles what is due, and awaits nothing")


class Clock:
    """A loop's timers."""

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


class House:
    def __init__(self) -> None:
        self.clock = Clock()
        self.settled: list[tuple[float, Batch, int]] = []
        self.deadlines: Deadlines[Batch] = Deadlines(
            self._settle, clock=lambda: self.clock.now_s, call_later=self.clock.call_later
        )

    def _settle(self, batch: Batch, number: int, answer: bytes | Failure) -> None:
        self.settled.append((self.clock.now_s, batch, number))

    def watch(self, *batches: Batch) -> None:
        for batch in batches:
            self.deadlines.watch(batch, batch)


@pytest.fixture
def house() -> House:
    return House()


def test_each_call_is_settled_when_it_is_due_and_one_timer_is_enough(house: House) -> None:
    first, second = Batch(0.017, 0.017, 0.5), Batch(0.1)
    house.watch(first, second)
    assert len(house.clock.timers) == 1
    house.clock.turn(1.0)
    assert house.settled == [(0.017, first, 0), (0.017, first, 1), (0.1, second, 0), (0.5, first, 2)]
    assert not house.clock.timers


def test_an_earlier_deadline_takes_the_timer(house: House) -> None:
    patient, hasty = Batch(10.0), Batch(0.017)
    house.watch(patient, hasty)
    assert list(house.clock.timers.values()) == [0.017]
    house.clock.turn(1.0)
    assert house.settled == [(0.017, hasty, 0)]
    assert list(house.clock.timers.values()) == [10.0]


def test_batches_that_end_in_time_share_a_timer_and_leave_nothing_behind(house: House) -> None:
    for number in range(160):
        batch = Batch(house.clock.now_s + 0.016)
        house.watch(batch)
        house.deadlines.forget(batch)
        house.clock.turn((number + 1) / 1000)
    assert house.settled == []
    assert house.clock.set <= 11
    house.clock.turn(1.0)
    assert not house.clock.timers
    assert not house.deadlines._under_way


def test_what_is_due_at_once_waits_for_no_timer(house: House) -> None:
    batch = Batch(inf, 0.5, at_once=[0])
    house.watch(batch)
    assert house.settled == [(0.0, batch, 0)]
    house.watch(Batch(inf), Batch(inf, at_once=[0]))
    assert list(house.clock.timers.values()) == [0.5]


def test_who_is_due_within_a_tick_of_the_timer_is_settled_with_it(house: House) -> None:
    batch = Batch(0.017, 0.017 + EARLY_S / 2, 0.017 + EARLY_S * 2)
    house.watch(batch)
    house.clock.turn(0.0171)
    assert [number for _, _, number in house.settled] == [0, 1]


def test_after_the_end_nothing_rings(house: House) -> None:
    house.watch(Batch(0.5))
    house.deadlines.close()
    house.clock.turn(1.0)
    assert house.settled == []


def test_what_clients_round_up_is_not_waited_for() -> None:
    """Of 1.5 s they tell 1.51, of 20 s 20.1."""
    assert deadline_s(100, None) == inf
    assert deadline_s(100, 0.02) == 100.02
    assert deadline_s(100, 1.51) <= 101.5
    assert deadline_s(100, 20.1) <= 120
    assert deadline_s(100, 20.1) > 119.8
