"""Back-off: growth, bounds, jitter."""

from __future__ import annotations

import pytest

from ratelimit_rls.common.backoff import HALF, Backoff


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(0.5, [10, 20, 40, 60, 60]), (1, [10, 20, 40, 60, 60]), (0, [10, 20, 40, 60, 60]), (3, [10, 30, 60, 60, 60])],
)
def test_delays_grow_up_to_the_maximum(factor: float, expected: list[float]) -> None:
    backoff = Backoff(10, 60, factor)
    assert [backoff.next_s() for _ in expected] == expected


def test_delays_restart_after_a_success() -> None:
    backoff = Backoff(1, 60)
    assert [backoff.next_s(), backoff.next_s()] == [1, 2]
    backoff.reset()
    assert backoff.next_s() == 1


@pytest.mark.parametrize(("chance", "expected"), [(0, [10, 20]), (0.5, [7.5, 15]), (1, [5, 10])])
def test_jitter_removes_up_to_half(chance: float, expected: list[float]) -> None:
    backoff = Backoff(10, 60, jitter=HALF, chance=lambda: chance)
    assert [backoff.next_s(), backoff.next_s()] == expected
    assert backoff.delay_s == 40


def test_delay_is_never_shorter_than_the_minimum() -> None:
    backoff = Backoff(0, 0.3, min_s=0.1)
    assert [backoff.next_s() for _ in range(4)] == [0.1, 0.2, 0.3, 0.3]
    assert Backoff(1, 60, min_s=0.8, jitter=HALF, chance=lambda: 1).next_s() == 0.8


def test_first_delay_is_capped_at_the_maximum() -> None:
    assert Backoff(90, 60).next_s() == 60


def test_temporary_cap_does_not_stop_the_growth() -> None:
    backoff = Backoff(10, 60)
    assert [backoff.next_s(3), backoff.next_s(3), backoff.next_s()] == [3, 3, 40]
