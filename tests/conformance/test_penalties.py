"""Progressive penalties: what is a violation, how long its cooldown lasts, and what is forgotten."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Answer, Charge, Penalty, Plan, Unit
from tests.stores import StoreUnderTest, Watched, step, watched_call

SECOND_US = 1_000_000
AT_ONCE = Penalty(within_us=3600 * SECOND_US, after=1, multipliers=(1, 2, 4, 8))
AFTER_THREE = Penalty(within_us=3600 * SECOND_US, after=3, multipliers=(1, 2, 4, 8))


def one_a_second(penalty: Penalty, key: str = "client", cost: int = 1, charge: Charge = Charge.ADMITTED) -> Plan:
    limit = step(key, 1, unit=Unit.SECOND, algorithm=Algorithm.GCRA, cost=cost, charge=charge)
    return watched_call(Watched((limit,), (penalty,)))


def told(answer: Answer) -> tuple[bool, int, int]:
    """Whether the call was refused, how many violations there are, and the cooldown."""
    violations, cooldown_us, _ = answer.readings[-1]
    return answer.refused, violations, cooldown_us


def offend(store: StoreUnderTest, plan: Plan) -> int:
    """Come twice at once, then wait as long as told; returns how long that was."""
    (admitted,) = store.spend(plan)
    assert not admitted.refused
    (refused,) = store.spend(plan)
    assert refused.refused
    waited_us = max(reading.retry_us for reading in refused.readings)
    store.now_us += waited_us
    return waited_us


@pytest.mark.parametrize("charge", list(Charge))
def test_a_penalised_client_waits_one_two_four_eight_cooldowns_and_eight_from_then_on(
    store: StoreUnderTest, charge: Charge
) -> None:
    plan = one_a_second(AT_ONCE, charge=charge)
    unit = SECOND_US if charge is Charge.ADMITTED else 2 * SECOND_US  # who pays for refusals waits for two

    waited = [offend(store, plan) for _ in range(7)]

    assert waited == [unit * multiplier for multiplier in (1, 2, 4, 8, 8, 8, 8)]


def test_the_first_multiplier_counts_from_so_many_violations_on(store: StoreUnderTest) -> None:
    plan = one_a_second(AFTER_THREE)
    waited = [offend(store, plan) // SECOND_US for _ in range(8)]
    assert waited == [1, 1, 1, 2, 4, 8, 8, 8]


def test_a_client_that_keeps_to_its_limit_is_never_touched_and_has_no_state(store: StoreUnderTest) -> None:
    plan = one_a_second(AT_ONCE)
    for _ in range(50):
        (answer,) = store.spend(plan)
        assert told(answer) == (False, 0, 0)
        store.now_us += SECOND_US


def test_refusals_during_a_cooldown_count_for_nothing(store: StoreUnderTest) -> None:
    plan = one_a_second(AT_ONCE)
    store.spend(plan)
    store.spend(plan)
    for _ in range(9):
        store.now_us += SECOND_US // 10
        (answer,) = store.spend(plan)
        assert told(answer)[:2] == (True, 1)
    store.now_us += SECOND_US // 10
    assert told(store.spend(plan)[0]) == (False, 1, 0)


def test_a_cooldown_that_holds_refuses_what_the_limit_would_admit_up_to_its_last_microsecond(
    store: StoreUnderTest,
) -> None:
    plan = one_a_second(AT_ONCE)
    offend(store, plan)
    store.spend(plan)
    assert told(store.spend(plan)[0]) == (True, 2, 2 * SECOND_US)

    store.now_us += 2 * SECOND_US - 1
    (answer,) = store.spend(plan)
    assert answer.readings[0].allowed
    assert told(answer) == (True, 2, 1)

    store.now_us += 1
    assert told(store.spend(plan)[0]) == (False, 2, 0)


def test_below_the_threshold_a_smaller_request_may_pass_and_the_next_refusal_counts_again(
    store: StoreUnderTest,
) -> None:
    def plan(cost: int) -> Plan:
        limit = step("client", 10, algorithm=Algorithm.TOKEN_BUCKET, cost=cost)
        return watched_call(Watched((limit,), (AFTER_THREE,)))

    store.spend(plan(8))
    assert told(store.spend(plan(5))[0])[:2] == (True, 1)
    assert told(store.spend(plan(5))[0])[:2] == (True, 1)
    assert told(store.spend(plan(1))[0]) == (False, 1, 0)
    assert told(store.spend(plan(5))[0])[:2] == (True, 2)


def test_a_refusal_without_an_admission_counts_again_once_its_cooldown_is_over(store: StoreUnderTest) -> None:
    plan = one_a_second(AFTER_THREE)
    store.spend(plan)
    assert told(store.spend(plan)[0])[1] == 1
    store.now_us += SECOND_US
    somebody_else = step("client", 1, unit=Unit.SECOND, algorithm=Algorithm.GCRA)
    store.ask(somebody_else)
    assert told(store.spend(plan)[0])[1] == 2


@pytest.mark.parametrize("late_us", [0, 1])
def test_a_violation_is_forgotten_when_the_period_has_passed(store: StoreUnderTest, late_us: int) -> None:
    plan = one_a_second(Penalty(within_us=60 * SECOND_US, after=1, multipliers=(1, 2)))
    began_us = store.now_us
    offend(store, plan)
    store.now_us = began_us + 60 * SECOND_US - 1 + late_us
    store.spend(plan)
    (refused,) = store.spend(plan)
    assert told(refused) == (True, 1 if late_us else 2, SECOND_US if late_us else 2 * SECOND_US)


def test_a_request_that_can_never_pass_is_no_violation(store: StoreUnderTest) -> None:
    (answer,) = store.spend(one_a_second(AT_ONCE, cost=2))
    assert answer.readings[0].retry_us == -1
    assert told(answer) == (True, 0, 0)


def test_a_look_sees_the_cooldown_and_is_no_violation_itself(store: StoreUnderTest) -> None:
    plan, look = one_a_second(AT_ONCE), one_a_second(AT_ONCE, cost=0)
    store.spend(plan)
    assert told(store.spend(look)[0]) == (True, 0, 0)
    store.spend(plan)
    assert told(store.spend(look)[0]) == (True, 1, SECOND_US)


def test_a_refund_is_taken_during_a_cooldown(store: StoreUnderTest) -> None:
    plan = one_a_second(AT_ONCE)
    store.spend(plan)
    store.spend(plan)
    assert not store.spend(one_a_second(AT_ONCE, cost=-1))[0].refused


def test_who_is_refused_by_somebody_elses_limit_has_violated_nothing(store: StoreUnderTest) -> None:
    mine = step("mine", 5, unit=Unit.SECOND)
    full = step("theirs", 1, unit=Unit.SECOND)
    plan = watched_call(Watched((mine,), (AT_ONCE,)), Watched((full,)))
    store.spend(plan)
    (answer,) = store.spend(plan)
    assert answer.refused
    assert answer.readings[1] == (0, 0, 0)


def test_calls_of_one_batch_see_each_others_violations(store: StoreUnderTest) -> None:
    plan = one_a_second(AT_ONCE)
    answers = store.spend(plan, plan, plan)
    assert [told(answer) for answer in answers] == [(False, 0, 0), (True, 1, SECOND_US), (True, 1, SECOND_US)]


def test_a_cooldown_of_centuries_ends_within_the_bounds_of_a_double(store: StoreUnderTest) -> None:
    yearly = step("client", 1, unit=Unit.YEAR)
    plan = watched_call(Watched((yearly,), (Penalty(3600 * SECOND_US, 1, (10_000,)),)))
    store.spend(plan)
    assert told(store.spend(plan)[0]) == (True, 1, 2**51)
