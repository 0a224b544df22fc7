"""A call that passes is answered and counted as its decision would be, although no decision is made for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.api.rls.encode import RlsEncoder
from ratelimit_rls.core.decision import decision_of, passes
from ratelimit_rls.core.model import (
    Algorithm,
    Charge,
    Descriptor,
    DescriptorPlan,
    Entry,
    Limit,
    PlanTemplate,
    Reading,
    Request,
    Rule,
    Step,
    StoreResult,
    Unit,
)
from ratelimit_rls.core.response_policy import HeaderFamily, ResponsePolicy
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.usage_recorder import UsageRecorder

REQUEST = Request("edge", (Descriptor((Entry("user", "alice"),)),))

numbers = st.integers(0, 12) | st.integers(0, 2**32 - 1)
limits = st.builds(
    Limit,
    numbers,
    st.sampled_from([unit for unit in Unit if unit]),
    st.sampled_from(Algorithm),
    burst=st.sampled_from([0, 0, 5, 2**32 - 1]),
    name=st.text(max_size=5),
    unit_multiplier=st.integers(1, 3),
)
steps = st.builds(
    Step,
    limits,
    st.integers(0, 3) | numbers,
    st.sampled_from(Charge),
    shadow_mode=st.booleans(),
    quota_mode=st.booleans(),
)
styles = st.just(ResponsePolicy(None)) | st.builds(
    ResponsePolicy, st.none() | st.lists(st.sampled_from(HeaderFamily), max_size=2).map(tuple)
)
readings = st.builds(
    Reading,
    st.integers(-1, 2) | st.integers(-5, 12) | st.integers(0, 2**40),
    st.just(0),
    st.integers(0, 10_000_000) | st.integers(0, 2**50),
)
options = st.just(ResponseOptions()) | st.builds(
    ResponseOptions, headers_enabled=st.booleans(), dynamic_metadata=st.booleans()
)


@st.composite
def descriptor_plans(draw: st.DrawFn) -> DescriptorPlan:
    own = tuple(draw(st.lists(steps, max_size=3)))
    if not own:
        return DescriptorPlan(draw(st.sampled_from([None, Rule("edge.any", ())])), (), 1, unlimited=draw(st.booleans()))
    rule = Rule("edge.user", tuple(step.limit for step in own), response_policy=draw(styles))
    return DescriptorPlan(rule, own, 1, "edge.user")


def _has_limits(plans: list[DescriptorPlan]) -> bool:
    return any(plan.steps for plan in plans)


@st.composite
def passing_calls(draw: st.DrawFn) -> tuple[PlanTemplate, StoreResult]:
    """Calls with at least one limit: without one the store is not needed."""
    plans = tuple(draw(st.lists(descriptor_plans(), min_size=1, max_size=4).filter(_has_limits)))
    own = tuple(step for plan in plans for step in plan.steps)
    template = PlanTemplate("edge", True, own, plans, is_plain=True)
    return template, StoreResult.of(False, 1_000_000, [draw(readings) for _ in own])


@given(passing_calls(), options)
def test_response_is_that_of_the_decision(
    call: tuple[PlanTemplate, StoreResult], response_options: ResponseOptions
) -> None:
    template, result = call
    assert passes(template, result)
    encoder = RlsEncoder(response_options, draw=lambda _: 0)
    response_template = encoder.response_template(REQUEST, template)

    by_decision = encoder.encode(decision_of(template, result), response_template)
    assert encoder.encode_pass(template, result, response_template) == by_decision


@given(passing_calls(), st.sampled_from([0.8, 0.0, 1.0]))
def test_metrics_are_those_of_the_decision(call: tuple[PlanTemplate, StoreResult], near_limit_ratio: float) -> None:
    template, result = call
    by_decision, by_result = Metrics(near_limit_ratio), Metrics(near_limit_ratio)
    by_decision.record(decision_of(template, result), by_decision.metric_counters(template))
    by_result.record_pass(template, result, by_result.metric_counters(template))
    assert by_result.names() == by_decision.names()
    assert by_result.passes == by_decision.passes
    outcomes = [[counters.outcomes for counters in metrics.limits.values()] for metrics in (by_result, by_decision)]
    assert outcomes[0] == outcomes[1]


@given(passing_calls())
def test_usage_is_that_of_the_decision(call: tuple[PlanTemplate, StoreResult]) -> None:
    template, result = call
    recorded = []
    for outcome in (result, decision_of(template, result)):
        recorder = UsageRecorder(sample=1, max_waiting=10, clock=lambda: 1_000.0, draw=lambda: 0.5)
        entry = recorder.usage_entry(REQUEST, template)
        recorder.note([entry, entry], [outcome, outcome], 0.001)
        decisions = [one._replace(log_id=0) for one in recorder.take_decisions(10)]
        recorded.append((decisions, entry._codes))
    assert recorded[0] == recorded[1]


@given(passing_calls(), st.integers(-2, 5).filter(bool), st.data())
def test_call_that_a_limit_denies_or_delays_does_not_pass(
    call: tuple[PlanTemplate, StoreResult], retry_us: int, data: st.DataObject
) -> None:
    template, result = call
    changed = list(result.readings)
    number = data.draw(st.integers(0, len(changed) - 1))
    changed[number] = changed[number]._replace(retry_us=retry_us)
    assert not passes(template, StoreResult.of(False, result.now_us, changed))
    assert not passes(template, StoreResult.of(False, result.now_us, result.readings, replayed=True))
    assert not passes(template, StoreResult.of(False, result.now_us, result.readings, remembered=True))
