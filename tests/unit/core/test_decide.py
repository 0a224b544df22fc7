from __future__ import annotations

from ratelimit_rls.core.decide import UNLIMITED_REMAINING, decide
from ratelimit_rls.core.model import Answer, Code, Decision, Descriptor, Entry, Reading, Request
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
