from __future__ import annotations

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Answer, Descriptor, Entry, Reading, Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.refund import refund
from ratelimit_rls.rules.compile import compile_documents

RULES = """
domain: d
descriptors:
  - key: queue
    action: throttle
    warn_at: 0.5
    rate_limit: {unit: second, requests_per_unit: 10}
  - key: always
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: shadow
    shadow_mode: true
    charge: admitted
    rate_limit: {unit: minute, requests_per_unit: 5}
"""
TREE = compile_documents({"f.yaml": RULES.encode()}).tree
HELD = Reading(-1, -1 - 100_000, 200_000)
NORMAL = Reading(0, 0, 0)
ALLOWED = Reading(4, 0, 60_000_000)
REFUSED = Reading(0, 60_000_000, 60_000_000)


def _owed(descriptors: tuple[Descriptor, ...], *readings: Reading) -> dict[int, int]:
    """What is given back, by the number of the key it belongs to."""
    outline = Planner(TREE, Policy()).plan(Request("d", descriptors)).outline
    owed = refund(decide(outline, Answer(False, 1_000, readings)))
    if owed is None:
        return {}
    assert set(owed.charged_at_us) == {1_000}
    assert len(owed.charged_at_us) == len(owed.numbers)
    return {number: step.cost for number, step in zip(owed.numbers, owed.outline.steps, strict=True)}


def _of(*keys: str) -> tuple[Descriptor, ...]:
    return tuple(Descriptor((Entry(key, "v"),)) for key in keys)


def test_what_was_charged_to_the_admitted_is_given_back_and_nothing_else() -> None:
    assert _owed(_of("queue", "always", "shadow"), HELD, NORMAL, ALLOWED, ALLOWED) == {0: -1, 3: -1}


def test_a_limit_that_refused_in_shadow_was_not_charged() -> None:
    assert _owed(_of("queue", "shadow"), HELD, NORMAL, REFUSED) == {0: -1}


def test_looks_and_refunds_took_nothing() -> None:
    look = Descriptor((Entry("shadow", "v"),), hits=0)
    back = Descriptor((Entry("queue", "v"),), hits=3, is_refund=True)
    assert _owed((look, back), ALLOWED, ALLOWED, NORMAL) == {}


def test_each_is_given_back_as_of_the_moment_at_which_it_was_charged() -> None:
    outline = Planner(TREE, Policy()).plan(Request("d", _of("queue"))).outline
    answer = Answer(False, 1_000, (HELD, NORMAL), moments_us=(900, 1_000))
    owed = refund(decide(outline, answer))

    assert owed is not None
    assert owed.charged_at_us == (900,)


def test_only_what_was_charged_as_debt_says_so() -> None:
    """What was not may have been unused since, and is given back with more care."""
    outline = Planner(TREE, Policy()).plan(Request("d", _of("queue"))).outline
    at_once, held = (
        refund(decide(outline, Answer(False, 0, (reading, NORMAL)))) for reading in (HELD._replace(retry_us=0), HELD)
    )

    assert at_once is not None
    assert held is not None
    assert at_once.outline.steps[0].max_delay_us == 0
    assert held.outline.steps[0].max_delay_us > 0
