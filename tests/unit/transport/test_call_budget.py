"""Call budget per process and per peer."""

from __future__ import annotations

from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.transport.call_budget import MAX_PEERS, CallBudget
from ratelimit_rls.transport.peers import UNIX


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def spend(budget: CallBudget, address: str, times: int) -> int:
    """Return how many of these calls are admitted."""
    return sum(budget.spend(address) is None for _ in range(times))


def test_no_limit_by_default() -> None:
    assert not CallBudget(0, 0).is_limited
    assert spend(CallBudget(0, 0), "192.0.2.1", 1000) == 1000


def test_process_budget_is_one_second_of_calls() -> None:
    clock = Clock()
    budget = CallBudget(100, 0, clock)
    assert budget.is_limited
    assert spend(budget, "192.0.2.1", 150) == 100
    assert budget.spend("192.0.2.2") is Abuse.CALL_BUDGET
    clock.now_s += 0.5
    assert spend(budget, "192.0.2.2", 150) == 50


def test_each_peer_has_its_own_budget() -> None:
    budget = CallBudget(0, 10, Clock())
    assert spend(budget, "192.0.2.1", 100) == 10
    assert budget.spend("192.0.2.1") is Abuse.CALL_BUDGET_OF_PEER
    assert spend(budget, "192.0.2.2", 100) == 10
    assert spend(budget, UNIX, 100) == 100


def test_call_rejected_by_peer_budget_does_not_use_process_budget() -> None:
    budget = CallBudget(20, 10, Clock())
    assert spend(budget, "192.0.2.1", 100) == 10
    assert spend(budget, "192.0.2.2", 100) == 10


def test_call_rejected_by_process_budget_does_not_use_peer_budget() -> None:
    clock = Clock()
    budget = CallBudget(1, 10, clock)
    spend(budget, "192.0.2.1", 100)
    clock.now_s += 0.1
    assert budget._peers["192.0.2.1"].tokens == 9


def test_number_of_peer_buckets_is_limited() -> None:
    budget = CallBudget(0, 10, Clock())
    for number in range(MAX_PEERS + 100):
        budget.spend(f"peer {number}")
    assert len(budget._peers) == MAX_PEERS
