from __future__ import annotations

import pytest

from ratelimit_rls.transport.grpc.ads_pauses import SHORTEST_S, Pauses


@pytest.mark.parametrize(
    ("growth", "expected"),
    [(0.5, [10, 20, 40, 60, 60]), (1, [10, 20, 40, 60, 60]), (0, [10, 20, 40, 60, 60]), (3, [10, 30, 60, 60, 60])],
)
def test_they_grow_whatever_the_factor_and_stop_at_the_longest(growth: float, expected: list[float]) -> None:
    pauses = Pauses(10, 60, growth, jitter=False)
    assert [pauses.next_s() for _ in expected] == expected


def test_they_begin_anew_after_something_was_delivered() -> None:
    pauses = Pauses(1, 60, jitter=False)
    assert [pauses.next_s(), pauses.next_s()] == [1, 2]
    pauses.reset()
    assert pauses.next_s() == 1


@pytest.mark.parametrize(("chance", "expected"), [(0, [10, 20]), (0.5, [7.5, 15]), (1, [5, 10])])
def test_chance_takes_up_to_a_half(chance: float, expected: list[float]) -> None:
    pauses = Pauses(10, 60, chance=lambda: chance)
    assert [pauses.next_s(), pauses.next_s()] == expected


def test_there_is_always_some_pause() -> None:
    pauses = Pauses(0, 0.3, jitter=False)
    assert [pauses.next_s() for _ in range(4)] == [SHORTEST_S, 0.2, 0.3, 0.3]


def test_a_first_pause_above_the_longest_is_the_longest() -> None:
    assert Pauses(90, 60, jitter=False).next_s() == 60


def test_a_bound_for_now_is_kept_and_does_not_stop_the_growth() -> None:
    pauses = Pauses(10, 60, jitter=False)
    assert [pauses.next_s(3), pauses.next_s(3), pauses.next_s()] == [3, 3, 40]
