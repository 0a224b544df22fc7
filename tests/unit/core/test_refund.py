from __future__ import annotations

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Descriptor, Entry, Reading, Request, StoreResult
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
DELAYED = Reading(-1, -1 - 100_000, 200_000)
NORMAL = Reading(0, 0, 0)
ALLOWED = Reading(4, 0, 60_000_000)
DENIED = Reading(0, 60_000_000, 60_000_000)


def _refunded_costs(descriptors: tuple[Descriptor, ...], *readings: Reading) -> dict[int, int]:
    """Return the refunded costs by the index of the key."""
    template = Planner(TREE, Policy()).plan(Request("d", descriptors)).template
    refunded = refund(decision_of(template, StoreResult.of(False, 1_000, readings)))
    if refunded is None:
        return {}
    assert set(refunded.charged_at_us) == {1_000}
    assert len(refunded.charged_at_us) == len(refunded.numbers)
    return {number: step.cost for number, step in zip(refunded.numbers, refunded.template.steps, strict=True)}


def _descriptors(*keys: str) -> tuple[Descriptor, ...]:
    return tuple(Descriptor((Entry(key, "v"),)) for key in keys)


def test_only_admitted_charges_are_refunded() -> None:
    assert _refunded_costs(_descriptors("queue", "always", "shadow"), DELAYED, NORMAL, ALLOWED, ALLOWED) == {
        0: -1,
        3: -1,
    }


def test_shadow_denial_is_not_refunded() -> None:
    assert _refunded_costs(_descriptors("queue", "shadow"), DELAYED, NORMAL, DENIED) == {0: -1}


def test_looks_and_refunds_have_no_refund() -> None:
    look = Descriptor((Entry("shadow", "v"),), hits=0)
    back = Descriptor((Entry("queue", "v"),), hits=3, is_refund=True)
    assert _refunded_costs((look, back), ALLOWED, ALLOWED, NORMAL) == {}


def test_refund_has_time_of_each_charge() -> None:
    template = Planner(TREE, Policy()).plan(Request("d", _descriptors("queue"))).template
    answer = StoreResult.of(False, 1_000, (DELAYED, NORMAL), decided_at_us=(900, 1_000))
    refunded = refund(decision_of(template, answer))

    assert refunded is not None
    assert refunded.charged_at_us == (900,)


def test_only_debt_keeps_max_delay() -> None:
    """Other charges may have been unused since, and are refunded conservatively."""
    template = Planner(TREE, Policy()).plan(Request("d", _descriptors("queue"))).template
    at_once, delayed = (
        refund(decision_of(template, StoreResult.of(False, 0, (reading, NORMAL))))
        for reading in (DELAYED._replace(retry_us=0), DELAYED)
    )

    assert at_once is not None
    assert delayed is not None
    assert at_once.template.steps[0].max_delay_us == 0
    assert delayed.template.steps[0].max_delay_us > 0
