"""ThrottleQueue with a manual clock: when responses are sent, and how unused slots are refunded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.pipeline.batch import DelayedResponse
from ratelimit_rls.pipeline.throttle_queue import MAX_REFUNDS_AT_ONCE, ThrottleQueue

MARGIN_S = 0.003


@dataclass
class Timer:
    due_s: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Harness:
    """A queue, its clock, and the responses that were sent."""

    most: int = 100
    now_s: float = 1000.0
    timers: list[Timer] = field(default_factory=list)
    answered: list[tuple[float, str]] = field(default_factory=list)  # (milliseconds, call)
    given_back: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.throttle_queue = ThrottleQueue(self.most, MARGIN_S, clock=lambda: self.now_s, call_later=self._call_later)

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now_s + delay_s, callback)
        self.timers.append(timer)
        return timer

    @property
    def live(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.is_cancelled]

    def delayed(self, caller: str, wait_ms: float, queue: str = "q", latest_ms: float = math.inf) -> DelayedResponse:
        give_back = partial(self._give_back, caller)
        return DelayedResponse(caller.encode(), wait_ms / 1000, queue, give_back, latest_ms / 1000)

    def hold(self, caller: str, wait_ms: float, queue: str = "q", latest_ms: float = math.inf) -> None:
        self.throttle_queue.hold(caller, self.delayed(caller, wait_ms, queue, latest_ms), self._send)

    def _send(self, token: str, answer: bytes) -> None:
        assert answer == token.encode()
        self.answered.append((round((self.now_s - 1000) * 1000, 3), token))

    async def _give_back(self, caller: str) -> None:
        self.given_back.append(caller)

    def at(self, ms: float) -> None:
        """Advance the clock to this many milliseconds after the start, firing all timers."""
        until_s = 1000 + ms / 1000
        while due := [timer for timer in self.live if timer.due_s <= until_s]:
            first = min(due, key=lambda timer: timer.due_s)
            self.timers.remove(first)
            self.now_s = max(self.now_s, first.due_s)
            first.callback()
        self.now_s = until_s


@pytest.fixture
def harness() -> Harness:
    return Harness()


async def settled() -> None:
    """Wait until refunds have completed."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_responses_are_sent_at_their_slots(harness: Harness) -> None:
    for number in range(3):
        harness.hold(f"c{number}", 10 * (number + 1))
    harness.at(9.9)
    assert harness.answered == []
    harness.at(100)
    assert harness.answered == [(10, "c0"), (20, "c1"), (30, "c2")]
    assert (harness.throttle_queue.delayed, harness.live, harness.given_back) == (0, [], [])


async def test_one_timer_serves_all_calls(harness: Harness) -> None:
    for number in range(50):
        harness.hold(f"c{number}", 500 - number, queue=f"q{number}")
        assert len(harness.live) == 1
    harness.at(1000)
    assert [who for _, who in harness.answered] == [f"c{number}" for number in reversed(range(50))]


async def test_early_timer_sends_no_response(harness: Harness) -> None:
    harness.hold("a", 10)
    (timer,) = harness.live
    harness.timers.clear()
    harness.now_s += 0.0095
    timer.callback()
    assert harness.answered == []
    assert len(harness.live) == 1
    harness.at(100)
    assert [who for _, who in harness.answered] == ["a"]


async def test_calls_due_together_keep_their_order(harness: Harness) -> None:
    for caller in "dbca":
        harness.hold(caller, 10)
    harness.at(10)
    assert [who for _, who in harness.answered] == ["d", "b", "c", "a"]


async def test_later_call_does_not_overtake(harness: Harness) -> None:
    harness.hold("a", 20)  # its slot was at 15, but its batch took 5 ms
    harness.hold("b", 16)
    harness.at(100)
    assert harness.answered == [(16, "a"), (20, "b")]


async def test_earlier_free_slots_are_used_in_order(harness: Harness) -> None:
    """A call with several slots was cancelled: new calls get its slots, and all others move up."""
    harness.hold("a", 10)
    harness.hold("b", 50)
    for caller, wait_ms in (("c", 20), ("d", 30), ("e", 5)):
        harness.hold(caller, wait_ms)
    harness.at(100)
    assert harness.answered == [(5, "a"), (10, "b"), (20, "c"), (30, "d"), (50, "e")]


async def test_stale_timer_entries_do_not_accumulate(harness: Harness) -> None:
    harness.hold("last", 60_000)
    for number in range(5_000):
        harness.hold("x", 50_000 - number)
        harness.throttle_queue.leave("x")
    assert len(harness.throttle_queue._firsts) <= 2 * MAX_REFUNDS_AT_ONCE
    harness.at(70_000)
    assert [caller for _, caller in harness.answered] == ["last"]


async def test_deadline_takes_precedence_over_order(harness: Harness) -> None:
    harness.hold("a", 20)
    harness.hold("hasty", 16, latest_ms=17)
    harness.hold("b", 30)
    harness.at(100)
    assert harness.answered == [(16, "hasty"), (20, "a"), (30, "b")]


async def test_cancelled_call_lets_later_calls_move_up(harness: Harness) -> None:
    for number in range(5):
        harness.hold(f"c{number}", 10 * (number + 1))
    assert harness.throttle_queue.leave("c1")
    harness.at(100)
    await settled()
    assert harness.answered == [(10, "c0"), (20, "c2"), (30, "c3"), (40, "c4")]
    assert harness.given_back == ["c1"]
    assert not harness.throttle_queue.leave("c1")


async def test_first_and_last_call_can_be_cancelled(harness: Harness) -> None:
    for number in range(4):
        harness.hold(f"c{number}", 10 * (number + 1))
    harness.throttle_queue.leave("c0")
    harness.throttle_queue.leave("c3")
    harness.at(100)
    assert harness.answered == [(10, "c1"), (20, "c2")]
    await settled()
    assert harness.given_back == ["c0", "c3"]


async def test_other_queues_do_not_move(harness: Harness) -> None:
    harness.hold("a1", 10, "a")
    harness.hold("b1", 20, "b")
    harness.hold("a2", 30, "a")
    harness.throttle_queue.leave("a1")
    harness.at(100)
    assert harness.answered == [(10, "a2"), (20, "b1")]


async def test_emptied_queue_starts_again(harness: Harness) -> None:
    harness.hold("a", 50)
    harness.throttle_queue.leave("a")
    harness.hold("b", 20)
    harness.at(20)
    assert harness.answered == [(20, "b")]
    harness.hold("c", 10)
    harness.at(100)
    assert harness.answered == [(20, "b"), (30, "c")]


async def test_cancel_after_the_response_has_no_effect(harness: Harness) -> None:
    harness.hold("a", 10)
    harness.at(10)
    assert not harness.throttle_queue.leave("a")
    assert not harness.throttle_queue.leave("nobody")
    await settled()
    assert harness.given_back == []
    assert dict(harness.throttle_queue.gauges())["ratelimit.throttle.cancelled"] == 0


async def test_declined_response_refunds_its_slot(harness: Harness) -> None:
    harness.throttle_queue.decline(harness.delayed("a", 10))
    await settled()
    assert (harness.given_back, harness.throttle_queue.delayed) == (["a"], 0)


async def test_capacity_includes_reserved_places(harness: Harness) -> None:
    harness = Harness(most=3)
    harness.hold("a", 10)
    assert [harness.throttle_queue.reserve(None) for _ in range(4)] == [None, None, 0, 0]
    harness.throttle_queue.release(2)
    assert harness.throttle_queue.reserve(None) is None
    harness.throttle_queue.release(1)
    harness.at(10)
    assert [harness.throttle_queue.reserve(1.0) for _ in range(4)] == [997_000] * 3 + [0]
    gauges = dict(harness.throttle_queue.gauges())
    assert gauges["ratelimit.throttle.queue_full"] == 3
    assert gauges["ratelimit.throttle.delayed"] == 1


async def test_call_without_time_to_wait_reserves_no_place() -> None:
    harness = Harness(most=1)
    assert [harness.throttle_queue.reserve(left_s) for left_s in (0.0, 0.001, MARGIN_S, -1.0)] == [0] * 4
    assert harness.throttle_queue.reserve(0.020) == 17_000
    assert dict(harness.throttle_queue.gauges())["ratelimit.throttle.queue_full"] == 0


async def test_capacity_of_zero_delays_nothing() -> None:
    assert Harness(most=0).throttle_queue.reserve(None) == 0


async def test_send_error_affects_only_its_call(harness: Harness) -> None:
    def broken(token: str, answer: bytes) -> None:
        raise ZeroDivisionError

    harness.throttle_queue.hold("a", harness.delayed("a", 10), broken)
    harness.hold("b", 10)
    with capture_logs() as logs:
        harness.at(10)
    assert harness.answered == [(10, "b")]
    assert logs == [{"event": "delayed_response_failed", "exc_info": True, "log_level": "error"}]


async def test_failed_refund_is_logged_and_dropped(harness: Harness) -> None:
    async def fail() -> None:
        raise ConnectionError("no store")

    harness.throttle_queue.hold("a", harness.delayed("a", 10)._replace(give_back=fail), harness._send)
    harness.hold("b", 20)
    harness.throttle_queue.leave("a")
    harness.throttle_queue.leave("b")
    with capture_logs() as logs:
        await settled()
    assert harness.given_back == ["b"]
    assert logs == [{"event": "throttle_refund_failed", "slots": 1, "error": "no store", "log_level": "warning"}]


async def test_close_refunds_delayed_calls(harness: Harness) -> None:
    for number in range(5):
        harness.hold(f"c{number}", 10 * (number + 1), queue=f"q{number % 2}")
    await harness.throttle_queue.close()
    assert sorted(harness.given_back) == [f"c{number}" for number in range(5)]
    assert (harness.throttle_queue.delayed, harness.live) == (0, [])
    harness.at(1000)
    assert harness.answered == []


async def test_thousands_of_cancelled_calls_leave_no_state(harness: Harness) -> None:
    harness.hold("stays", 1000, "stays")
    for number in range(10 * MAX_REFUNDS_AT_ONCE):
        harness.hold(f"c{number}", 500, queue=f"q{number}")
        harness.throttle_queue.leave(f"c{number}")
        assert len(harness.throttle_queue._firsts) <= 2 * MAX_REFUNDS_AT_ONCE
    await harness.throttle_queue.close()
    assert len(harness.given_back) == 10 * MAX_REFUNDS_AT_ONCE + 1


@pytest.mark.slow
async def test_cancelling_ten_thousand_calls_takes_linear_time() -> None:
    """Quadratic work would take minutes."""
    harness = Harness(most=20_000)
    for number in range(20_000):
        harness.hold(f"c{number}", number)
    for number in range(0, 20_000, 2):
        harness.throttle_queue.leave(f"c{number}")
    harness.at(9_999)
    assert [who for _, who in harness.answered] == [f"c{number}" for number in range(1, 20_000, 2)]
    await harness.throttle_queue.close()
    assert len(harness.given_back) == 10_000


async def test_default_timer_is_the_event_loop() -> None:
    queue = ThrottleQueue(10, MARGIN_S)
    answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def give_back() -> None: ...

    queue.hold(answered, DelayedResponse(b"x", 0.001, "q", give_back), asyncio.Future.set_result)
    assert await answered == b"x"
    await queue.drain(1)
