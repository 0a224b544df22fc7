"""The waiting room on a clock of the test's own: who is answered when, and what becomes of slots nobody waits for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from ratelimit_rls.transport.grpc.door import Held
from ratelimit_rls.transport.grpc.waiting import MOST_RETURNED_AT_ONCE, WaitingRoom

MARGIN_S = 0.003


@dataclass
class Timer:
    due_s: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class House:
    """A room, its clock, and what its callers see."""

    most: int = 100
    now_s: float = 1000.0
    timers: list[Timer] = field(default_factory=list)
    answered: list[tuple[float, str]] = field(default_factory=list)  # after so many milliseconds: who
    given_back: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room = WaitingRoom(self.most, MARGIN_S, clock=lambda: self.now_s, call_later=self._call_later)

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now_s + delay_s, callback)
        self.timers.append(timer)
        return timer

    @property
    def live(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.is_cancelled]

    def held(self, caller: str, wait_ms: float, queue: str = "q", latest_ms: float = math.inf) -> Held:
        give_back = partial(self._give_back, caller)
        return Held(caller.encode(), wait_ms / 1000, queue, give_back, latest_ms / 1000)

    def hold(self, caller: str, wait_ms: float, queue: str = "q", latest_ms: float = math.inf) -> None:
        self.room.hold(caller, self.held(caller, wait_ms, queue, latest_ms), self._send)

    def _send(self, token: str, answer: bytes) -> None:
        assert answer == token.encode()
        self.answered.append((round((self.now_s - 1000) * 1000, 3), token))

    async def _give_back(self, caller: str) -> None:
        self.given_back.append(caller)

    def at(self, ms: float) -> None:
        """Let time pass until so many milliseconds after the start, ringing every timer on its way."""
        until_s = 1000 + ms / 1000
        while due := [timer for timer in self.live if timer.due_s <= until_s]:
            first = min(due, key=lambda timer: timer.due_s)
            self.timers.remove(first)
            self.now_s = max(self.now_s, first.due_s)
            first.callback()
        self.now_s = until_s


@pytest.fixture
def house() -> House:
    return House()


async def settled() -> None:
    """Until what was given back has arrived."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_answers_come_at_their_slots(house: House) -> None:
    for number in range(3):
        house.hold(f"c{number}", 10 * (number + 1))
    house.at(9.9)
    assert house.answered == []
    house.at(100)
    assert house.answered == [(10, "c0"), (20, "c1"), (30, "c2")]
    assert (house.room.held, house.live, house.given_back) == (0, [], [])


async def test_one_timer_serves_everybody(house: House) -> None:
    for number in range(50):
        house.hold(f"c{number}", 500 - number, queue=f"q{number}")
        assert len(house.live) == 1
    house.at(1000)
    assert [who for _, who in house.answered] == [f"c{number}" for number in reversed(range(50))]


async def test_a_timer_that_rings_early_answers_nobody(house: House) -> None:
    house.hold("a", 10)
    (timer,) = house.live
    house.timers.clear()
    house.now_s += 0.0095
    timer.callback()
    assert house.answered == []
    assert len(house.live) == 1
    house.at(100)
    assert [who for _, who in house.answered] == ["a"]


async def test_calls_due_at_one_moment_keep_their_order(house: House) -> None:
    for caller in "dbca":
        house.hold(caller, 10)
    house.at(10)
    assert [who for _, who in house.answered] == ["d", "b", "c", "a"]


async def test_a_later_call_whose_answer_came_sooner_does_not_overtake(house: House) -> None:
    house.hold("a", 20)  # its slot was at 15, but the batch it came with took 5 ms to be answered
    house.hold("b", 16)
    house.at(100)
    assert house.answered == [(16, "a"), (20, "b")]


async def test_slots_that_became_free_before_those_of_others_are_used_one_by_one(house: House) -> None:
    """Somebody who took several at once has left: newcomers are given its slots, and everybody moves up."""
    house.hold("a", 10)
    house.hold("b", 50)
    for caller, wait_ms in (("c", 20), ("d", 30), ("e", 5)):
        house.hold(caller, wait_ms)
    house.at(100)
    assert house.answered == [(5, "a"), (10, "b"), (20, "c"), (30, "d"), (50, "e")]


async def test_earlier_and_earlier_slots_do_not_pile_up(house: House) -> None:
    house.hold("last", 60_000)
    for number in range(5_000):
        house.hold("x", 50_000 - number)
        house.room.leave("x")
    assert len(house.room._firsts) <= 2 * MOST_RETURNED_AT_ONCE
    house.at(70_000)
    assert [caller for _, caller in house.answered] == ["last"]


async def test_order_is_not_worth_a_deadline(house: House) -> None:
    house.hold("a", 20)
    house.hold("hasty", 16, latest_ms=17)
    house.hold("b", 30)
    house.at(100)
    assert house.answered == [(16, "hasty"), (20, "a"), (30, "b")]


async def test_who_leaves_lets_everybody_behind_move_up(house: House) -> None:
    for number in range(5):
        house.hold(f"c{number}", 10 * (number + 1))
    assert house.room.leave("c1")
    house.at(100)
    await settled()
    assert house.answered == [(10, "c0"), (20, "c2"), (30, "c3"), (40, "c4")]
    assert house.given_back == ["c1"]
    assert not house.room.leave("c1")


async def test_the_first_and_the_last_may_leave(house: House) -> None:
    for number in range(4):
        house.hold(f"c{number}", 10 * (number + 1))
    house.room.leave("c0")
    house.room.leave("c3")
    house.at(100)
    assert house.answered == [(10, "c1"), (20, "c2")]
    await settled()
    assert house.given_back == ["c0", "c3"]


async def test_another_queue_does_not_move(house: House) -> None:
    house.hold("a1", 10, "a")
    house.hold("b1", 20, "b")
    house.hold("a2", 30, "a")
    house.room.leave("a1")
    house.at(100)
    assert house.answered == [(10, "a2"), (20, "b1")]


async def test_a_queue_that_ran_empty_starts_afresh(house: House) -> None:
    house.hold("a", 50)
    house.room.leave("a")
    house.hold("b", 20)
    house.at(20)
    assert house.answered == [(20, "b")]
    house.hold("c", 10)
    house.at(100)
    assert house.answered == [(20, "b"), (30, "c")]


async def test_leaving_after_the_answer_or_without_a_call_is_nothing(house: House) -> None:
    house.hold("a", 10)
    house.at(10)
    assert not house.room.leave("a")
    assert not house.room.leave("nobody")
    await settled()
    assert house.given_back == []
    assert dict(house.room.gauges())["ratelimit.throttle.left_total"] == 0


async def test_a_caller_gone_before_its_answer_gives_its_slot_back(house: House) -> None:
    house.room.decline(house.held("a", 10))
    await settled()
    assert (house.given_back, house.room.held) == (["a"], 0)


async def test_the_room_is_bounded_and_counts_those_that_may_come(house: House) -> None:
    house = House(most=3)
    house.hold("a", 10)
    assert [house.room.reserve(None) for _ in range(4)] == [None, None, 0, 0]
    house.room.release(2)
    assert house.room.reserve(None) is None
    house.room.release(1)
    house.at(10)
    assert [house.room.reserve(1.0) for _ in range(4)] == [997_000] * 3 + [0]
    gauges = dict(house.room.gauges())
    assert gauges["ratelimit.throttle.room_full_total"] == 3
    assert gauges["ratelimit.throttle.held_total"] == 1


async def test_who_has_no_time_to_wait_takes_no_place() -> None:
    house = House(most=1)
    assert [house.room.reserve(left_s) for left_s in (0.0, 0.001, MARGIN_S, -1.0)] == [0] * 4
    assert house.room.reserve(0.020) == 17_000
    assert dict(house.room.gauges())["ratelimit.throttle.room_full_total"] == 0


async def test_a_room_of_none_holds_nobody() -> None:
    assert House(most=0).room.reserve(None) == 0


async def test_an_answer_that_cannot_be_sent_harms_no_other(house: House, caplog: pytest.LogCaptureFixture) -> None:
    def broken(token: str, answer: bytes) -> None:
        raise ZeroDivisionError

    house.room.hold("a", house.held("a", 10), broken)
    house.hold("b", 10)
    house.at(10)
    assert house.answered == [(10, "b")]
    assert "ZeroDivisionError" in caplog.text


async def test_a_slot_the_store_does_not_take_back_is_told_and_forgotten(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ConnectionError("no store")

    house.room.hold("a", house.held("a", 10)._replace(give_back=fail), house._send)
    house.hold("b", 20)
    house.room.leave("a")
    house.room.leave("b")
    await settled()
    assert house.given_back == ["b"]
    assert "1 slot(s) of callers that left were not given back: no store" in caplog.text


async def test_closing_gives_back_what_is_still_held(house: House) -> None:
    for number in range(5):
        house.hold(f"c{number}", 10 * (number + 1), queue=f"q{number % 2}")
    await house.room.close()
    assert sorted(house.given_back) == [f"c{number}" for number in range(5)]
    assert (house.room.held, house.live) == (0, [])
    house.at(1000)
    assert house.answered == []


async def test_thousands_that_come_and_leave_leave_nothing_behind(house: House) -> None:
    house.hold("stays", 1000, "stays")
    for number in range(10 * MOST_RETURNED_AT_ONCE):
        house.hold(f"c{number}", 500, queue=f"q{number}")
        house.room.leave(f"c{number}")
        assert len(house.room._firsts) <= 2 * MOST_RETURNED_AT_ONCE
    await house.room.close()
    assert len(house.given_back) == 10 * MOST_RETURNED_AT_ONCE + 1


@pytest.mark.slow
async def test_ten_thousand_that_leave_one_queue_at_once_are_no_burden() -> None:
    """Quadratic work would take minutes here."""
    house = House(most=20_000)
    for number in range(20_000):
        house.hold(f"c{number}", number)
    for number in range(0, 20_000, 2):
        house.room.leave(f"c{number}")
    house.at(9_999)
    assert [who for _, who in house.answered] == [f"c{number}" for number in range(1, 20_000, 2)]
    await house.room.close()
    assert len(house.given_back) == 10_000


async def test_the_loops_own_timer_serves_where_none_is_given() -> None:
    room = WaitingRoom(10, MARGIN_S)
    answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def give_back() -> None: ...

    room.hold(answered, Held(b"x", 0.001, "q", give_back), asyncio.Future.set_result)
    assert await answered == b"x"
    await room.drain(1)
