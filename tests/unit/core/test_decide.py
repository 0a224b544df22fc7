from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.core.decide import UNLIMITED_REMAINING, allowed, decide, denied
from ratelimit_rls.core.model import (
    Answer,
    Code,
    Decision,
    Descriptor,
    Entry,
    OnStoreFailure,
    Purpose,
    Reading,
    Request,
    State,
)
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.rules.compile import compile_documents

RULES = """
domain: d
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: shadow
    shadow_mode: true
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: free
    rate_limit: {unlimited: true}
  - key: exempt
"""
TREE = compile_documents({"f.yaml": RULES.encode()}).tree
ALLOWED = Reading(left=3, retry_us=0, reset_us=41_000_001)
REFUSED = Reading(left=0, retry_us=12_000_000, reset_us=41_000_000)


def _decide(keys: list[str], *readings: Reading, refused: bool = False, policy: Policy | None = None) -> Decision:
    asked = Request("d", tuple(Descriptor((Entry(key, "v"),)) for key in keys))
    answer = Answer(refused, 1_000, tuple(readings)) if readings else None
    return decide(Planner(TREE, policy or Policy()).plan(asked).outline, answer)


def test_what_the_store_was_not_asked_about_is_ok() -> None:
    decision = _decide(["exempt", "free"])

    assert decision.code is Code.OK
    exempt, free = decision.statuses
    assert (exempt.code, exempt.step, exempt.remaining, exempt.reset_s) == (Code.OK, None, 0, 0)
    assert (free.code, free.step, free.remaining, free.reset_s) == (Code.OK, None, UNLIMITED_REMAINING, 0)


def test_statuses_stand_in_the_order_of_the_descriptors() -> None:
    decision = _decide(["exempt", "user", "free", "shadow"], ALLOWED, REFUSED)

    assert [status.reading for status in decision.statuses] == [None, ALLOWED, None, REFUSED]


def test_an_allowed_descriptor_tells_what_is_left_and_when_it_is_whole_again() -> None:
    (status,) = _decide(["user"], ALLOWED).statuses

    assert status.step is not None
    assert (status.code, status.step.limit.requests_per_unit, status.remaining) == (Code.OK, 5, 3)
    assert status.reset_s == 42  # rounded up: earlier would be too early


def test_what_is_left_is_never_below_nothing_nor_beyond_uint32() -> None:
    assert _decide(["user"], ALLOWED._replace(left=-7)).statuses[0].remaining == 0
    assert _decide(["user"], ALLOWED._replace(left=2**40)).statuses[0].remaining == UNLIMITED_REMAINING


def test_a_refused_descriptor_tells_when_to_come_back() -> None:
    decision = _decide(["user"], REFUSED, refused=True)

    assert decision.code is Code.OVER_LIMIT
    assert (decision.statuses[0].code, decision.statuses[0].remaining) == (Code.OVER_LIMIT, 0)
    assert decision.statuses[0].reset_s == 12


def test_what_can_never_be_admitted_tells_when_the_limit_is_whole_again() -> None:
    (status,) = _decide(["user"], REFUSED._replace(retry_us=-1), refused=True).statuses

    assert (status.code, status.reset_s) == (Code.OVER_LIMIT, 41)


def test_a_shadow_limit_that_is_over_is_ok_with_nothing_left() -> None:
    decision = _decide(["shadow"], REFUSED)

    (status,) = decision.statuses
    assert (decision.code, status.code, status.remaining) == (Code.OK, Code.OK, 0)
    assert status.step is not None


def test_the_verdict_is_the_store_s() -> None:
    assert _decide(["user", "shadow"], REFUSED, ALLOWED, refused=False).code is Code.OK
    assert _decide(["user", "shadow"], REFUSED, ALLOWED, refused=True).code is Code.OVER_LIMIT


def test_the_global_shadow_mode_turns_the_verdict_and_leaves_the_statuses() -> None:
    decision = _decide(["user"], REFUSED, refused=True, policy=Policy(shadow_mode=True))

    assert (decision.code, decision.shadowed) == (Code.OK, True)
    assert decision.statuses[0].code is Code.OVER_LIMIT
    assert not _decide(["user"], ALLOWED, policy=Policy(shadow_mode=True)).shadowed


WATCHED = """
domain: d
descriptors:
  - key: client
    penalty: {within: 1h, after: 2, multipliers: [1, 3]}
    warn_at: 0.8
    rate_limit: {unit: second, requests_per_unit: 2, algorithm: gcra}
  - key: queue
    action: throttle
    limits:
      - {unit: second, requests_per_unit: 10, algorithm: leaky_bucket}
      - {unit: minute, requests_per_unit: 10, algorithm: gcra}
"""
WATCHED_TREE = compile_documents({"f.yaml": WATCHED.encode()}).tree


def _decide_watched(key: str, *readings: Reading, refused: bool = False, purpose: Purpose = Purpose.DECIDE) -> Decision:
    asked = Request("d", (Descriptor((Entry(key, "v"),)),), purpose=purpose)
    return decide(Planner(WATCHED_TREE, Policy()).plan(asked).outline, Answer(refused, 1_000, readings))


def test_what_watchers_say_is_told_beside_the_limits() -> None:
    decision = _decide_watched("client", Reading(1, 0, 500_000), Reading(2, 0, 9_000_000), Reading(1, 0, 0))
    (status,) = decision.statuses
    assert (status.code, status.remaining, status.violations, status.state) == (Code.OK, 1, 2, State.WARNING)
    assert status.readings == (Reading(1, 0, 500_000),)
    assert status.cooldown is None


def test_a_cooldown_is_a_refusal_by_its_limit_for_as_long_as_it_lasts() -> None:
    decision = _decide_watched(
        "client", Reading(2, 0, 0), Reading(2, 2_500_000, 9_000_000), Reading(2, 0, 0), refused=True
    )
    (status,) = decision.statuses
    assert decision.code is Code.OVER_LIMIT
    assert (status.code, status.remaining, status.reset_s, status.state) == (Code.OVER_LIMIT, 0, 3, State.THROTTLED)
    assert status.step is decision.outline.steps[0]
    assert status.reading == status.cooldown == Reading(0, 2_500_000, 9_000_000)


def test_a_call_is_held_until_the_last_of_its_slots() -> None:
    decision = _decide_watched("queue", Reading(-1, -1 - 100_000, 200_000), Reading(-1, -1 - 6_000_000, 12_000_000))
    assert (decision.code, decision.wait_us, decision.held_by) == (Code.OK, 6_000_000, 1)
    assert [(status.code, status.remaining) for status in decision.statuses] == [(Code.OK, 0)]


def test_a_call_that_is_refused_or_has_its_slots_now_is_not_held() -> None:
    free = Reading(0, 0, 100_000)
    assert _decide_watched("queue", free, free).held_by == -1
    assert _decide_watched("queue", Reading(0, 5, 5), free, refused=True).wait_us == 0


def test_a_report_is_never_refused() -> None:
    over = Reading(-3, 1_000_000, 2_000_000)
    decision = _decide_watched("client", over, Reading(2, 0, 0), refused=True, purpose=Purpose.REPORT)
    assert decision.code is Code.OK
    assert decision.statuses[0].code is Code.OVER_LIMIT


def _denied(keys: list[str], rules: str = RULES, policy: Policy | None = None, **request: Any) -> Decision:
    tree = compile_documents({"f.yaml": rules.encode()}).tree
    descriptors = tuple(Descriptor((Entry(key, "v"),), is_refund=key == "refund") for key in keys)
    return denied(Planner(tree, policy or Policy()).plan(Request("d", descriptors, **request)).outline, 1_000)


def test_without_a_store_nothing_is_claimed_of_what_is_let_through() -> None:
    decision = allowed(_decide(["user", "shadow", "free"], ALLOWED, ALLOWED).outline)

    assert (decision.code, decision.without_store) == (Code.OK, OnStoreFailure.ALLOW)
    assert [(status.code, status.step, status.reading) for status in decision.statuses] == [(Code.OK, None, None)] * 3


def test_without_a_store_every_limit_that_holds_refuses() -> None:
    decision = _denied(["exempt", "user", "shadow", "free"])

    assert (decision.code, decision.without_store, decision.now_us) == (Code.OVER_LIMIT, OnStoreFailure.DENY, 1_000)
    assert [status.code.name for status in decision.statuses] == ["OK", "OVER_LIMIT", "OK", "OK"]
    user = decision.statuses[1]
    assert user.step is decision.outline.steps[0]
    assert (user.remaining, user.reset_s, len(user.readings)) == (0, 1, 1)


def test_several_limits_of_a_descriptor_refuse_together_and_the_first_is_spoken_of() -> None:
    limits = "[{unit: minute, requests_per_unit: 5}, {unit: day, requests_per_unit: 9}]"
    rules = f"domain: d\ndescriptors: [{{key: user, limits: {limits}}}]"
    (status,) = _denied(["user"], rules).statuses

    assert status.step is status.slot.steps[0]
    assert [reading.retry_us for reading in status.readings] == [1_000_000] * 2


@pytest.mark.parametrize(
    ("keys", "policy", "asked", "code"),
    [
        (["shadow"], Policy(), {}, Code.OK),
        (["free", "exempt"], Policy(), {}, Code.OK),
        (["user"], Policy(), {"purpose": Purpose.REPORT}, Code.OK),  # it has happened
        (["user"], Policy(), {"purpose": Purpose.LOOK}, Code.OVER_LIMIT),
        (["user"], Policy(shadow_mode=True), {}, Code.OK),
        (["user"], Policy(quota_mode=True), {}, Code.OVER_LIMIT),
        (["user", "exempt"], Policy(quota_mode=True), {}, Code.OK),  # a quota that passes
        (["user", "shadow"], Policy(quota_mode=True), {}, Code.OK),
        (["user", "free"], Policy(quota_mode=True), {}, Code.OVER_LIMIT),
    ],
)
def test_without_a_store_is_refused_what_a_store_could_refuse(
    keys: list[str], policy: Policy, asked: dict[str, Any], code: Code
) -> None:
    decision = _denied(keys, policy=policy, **asked)

    assert decision.code is code
    assert decision.shadowed is policy.shadow_mode


def test_what_is_given_back_is_never_refused() -> None:
    rules = "domain: d\ndescriptors: [{key: refund, rate_limit: {unit: minute, requests_per_unit: 5}}]"

    assert _denied(["refund"], rules).code is Code.OK


def test_a_refusal_that_was_remembered_says_so() -> None:
    outline = _decide(["user"], REFUSED).outline

    assert decide(outline, Answer(True, 1_000, (REFUSED,), remembered=True)).remembered
    assert not decide(outline, Answer(True, 1_000, (REFUSED,))).remembered
