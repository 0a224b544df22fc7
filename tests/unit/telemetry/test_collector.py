"""Collection of series from the counters: their labels, and bounds on their number."""

from __future__ import annotations

from collections import Counter

import pytest

from ratelimit_rls.core.decision import allow_without_store, decision_of, deny_without_store
from ratelimit_rls.core.model import (
    Descriptor,
    Entry,
    LimitOverride,
    OnStoreFailure,
    Plan,
    PlanTemplate,
    Purpose,
    Reading,
    Request,
    StoreResult,
    Unit,
)
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.telemetry import instruments, metrics
from ratelimit_rls.telemetry.collector import MAX_UNKNOWN_DOMAINS, collect, series
from ratelimit_rls.telemetry.instruments import BY_NAME, DURATIONS_S, INSTRUMENTS, InstrumentKind
from ratelimit_rls.telemetry.metrics import OTHER, CallTimes, Metrics
from ratelimit_rls.telemetry.rule_labels import OVERRIDE
from ratelimit_rls.telemetry.series import (
    Collected,
    Distribution,
    Durations,
    Series,
    from_json,
    merge,
    quantile,
    to_json,
    without_gauges,
)

RULES = b"""
domain: my.edge
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 10, name: each}
  - key: path
    detailed_metric: true
    rate_limit: {unit: minute, requests_per_unit: 10}
  - key: trial
    shadow_mode: true
    rate_limit: {unit: minute, requests_per_unit: 10}
  - key: staff
    rate_limit: {unlimited: true}
  - key: vip
    rate_limit: {unit: minute, requests_per_unit: 99, replaces: [{name: each}]}
  - key: a
    descriptors:
      - key: b
        value: "1.2.3.4"
        descriptors:
          - key: c
            rate_limit: {unit: minute, requests_per_unit: 10}
"""
PASSES, DENIED = Reading(9, 0, 1), Reading(-1, 5, 1)


class Setup:
    def __init__(self, policy: Policy | None = None) -> None:
        self.metrics = Metrics()
        self._planner = Planner(compile_documents({"f.yaml": RULES}).tree, policy or Policy())

    def plan(
        self,
        *entries: dict[str, str],
        domain: str = "my.edge",
        limit: LimitOverride | None = None,
        purpose: Purpose = Purpose.DECIDE,
    ) -> Plan:
        descriptors = tuple(Descriptor(tuple(Entry(*pair) for pair in one.items()), limit) for one in entries)
        return self._planner.plan(Request(domain, descriptors, purpose=purpose))

    def decide(
        self,
        *entries: dict[str, str],
        reading: Reading = PASSES,
        domain: str = "my.edge",
        limit: LimitOverride | None = None,
        remembered: bool = False,
        without_store: bool = False,
    ) -> PlanTemplate:
        template = self.plan(*entries, domain=domain, limit=limit).template
        answer = None
        if template.steps:
            denied = reading is DENIED and not all(step.shadow_mode for step in template.steps)
            answer = StoreResult.of(denied, 0, (reading,) * len(template.steps), remembered=remembered)
        decision = decision_of(template, answer)
        if without_store:
            decision = decision._replace(without_store=OnStoreFailure.LOCAL)
        self.metrics.record(decision, self.metrics.metric_counters(template))
        return template

    def decisions(self) -> dict[tuple[str, ...], float]:
        return {
            one.attributes: value
            for one, value in collect(self.metrics).items()
            if one.instrument == instruments.DECISIONS.name and not isinstance(value, Distribution) and value
        }


def test_a_decision_is_counted_by_rule_outcome_and_source() -> None:
    setup = Setup()
    setup.decide({"user": "a"})
    setup.decide({"user": "b"}, reading=DENIED)
    setup.decide({"user": "b"}, reading=DENIED, remembered=True)
    setup.decide({"user": "b"}, reading=DENIED, without_store=True)
    setup.decide({"trial": "x"}, reading=DENIED)
    setup.decide({"staff": "x"}, {"nobody": "x"})
    setup.decide({"user": "a"}, {"vip": "a"})
    setup.decide({"user": "a"}, domain="elsewhere")
    setup.decide({"user": "a"}, limit=LimitOverride(5, Unit.HOUR))
    assert setup.decisions() == {
        ("my.edge", "my.edge.user", "ok", "store"): 1,
        ("my.edge", "my.edge.user", "over_limit", "store"): 1,
        ("my.edge", "my.edge.user", "over_limit", "cache"): 1,
        ("my.edge", "my.edge.user", "over_limit", "fallback"): 1,
        ("my.edge", "my.edge.trial", "shadowed", "store"): 1,
        ("my.edge", "my.edge.staff", "unlimited", "rules"): 1,
        ("my.edge", "", "no_rule", "rules"): 1,
        ("my.edge", "my.edge.user", "replaced", "rules"): 1,
        ("my.edge", "my.edge.vip", "ok", "store"): 1,
        (OTHER, "", "no_rule", "rules"): 1,
        ("my.edge", OVERRIDE, "ok", "store"): 1,
    }


def test_denials_in_global_shadow_mode_are_counted_as_shadowed() -> None:
    setup = Setup(Policy(shadow_mode=True))
    setup.decide({"user": "a"}, reading=DENIED)
    assert list(setup.decisions()) == [("my.edge", "my.edge.user", "shadowed", "store")]
    assert collect(setup.metrics)[series(instruments.GLOBAL_SHADOW)] == 1


def test_fallback_decisions_are_counted_by_outcome() -> None:
    setup = Setup()
    template = setup.plan({"user": "a"}, {"staff": "x"}).template
    counters = setup.metrics.metric_counters(template)
    setup.metrics.record(allow_without_store(template), counters)
    setup.metrics.record(deny_without_store(template, 0), counters)
    assert setup.decisions() == {
        ("my.edge", "my.edge.user", "ok", "fallback"): 1,
        ("my.edge", "my.edge.user", "over_limit", "fallback"): 1,
        ("my.edge", "my.edge.staff", "unlimited", "rules"): 2,
    }


def test_a_look_is_counted_as_a_decision_and_a_report_is_not() -> None:
    setup = Setup()
    for purpose in (Purpose.REPORT, Purpose.LOOK):
        template = setup.plan({"user": "a"}, purpose=purpose).template
        decision = decision_of(template, StoreResult.of(True, 0, (DENIED,)))
        setup.metrics.record(decision, setup.metrics.metric_counters(template))
    assert setup.decisions() == {("my.edge", "my.edge.user", "over_limit", "store"): 1}


def test_rules_and_domains_of_many_reloads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_RULES", 10)
    counted = Metrics()
    for number in range(40):
        rules = RULES.replace(b"my.edge", b"edge-%d" % number)
        plan = Planner(compile_documents({"f.yaml": rules}).tree, Policy()).plan(
            Request(f"edge-{number}", (Descriptor((Entry("user", "a"),)),))
        )
        counted.record(
            decision_of(plan.template, StoreResult.of(False, 0, (PASSES,))), counted.metric_counters(plan.template)
        )
    labels = {one.attributes[:2] for one in collect(counted) if one.instrument == instruments.DECISIONS.name}
    assert len(labels) == 6
    assert (OTHER, OTHER) in labels


def test_compatible_labels_have_the_domain_and_two_key_levels() -> None:
    setup = Setup()
    setup.decide({"user": "a"})
    setup.decide({"path": "/x"})
    setup.decide({"a": "1", "b": "1.2.3.4", "c": "z"})
    hits = instruments.REFERENCE_LIMITS["total_hits"]
    collected = collect(setup.metrics)
    assert [one.attributes for one in collected if one.instrument == hits.name] == [
        ("my.edge", "user", ""),
        ("my.edge", "path_/x", ""),
        ("my.edge", "a", "b_1_2_3_4"),
    ]


def test_hits_are_counted_by_outcome() -> None:
    setup = Setup()
    setup.decide({"user": "a"})
    setup.decide({"user": "a"}, reading=DENIED)
    setup.decide({"trial": "a"}, reading=DENIED)
    collected = collect(setup.metrics)
    hits = {one.attributes[1:]: value for one, value in collected.items() if one.instrument == "ratelimit.hits"}
    assert hits == {
        ("my.edge.user", "ok"): 1,
        ("my.edge.user", "over_limit"): 1,
        ("my.edge.trial", "ok"): 0,
        ("my.edge.trial", "over_limit"): 0,
        ("my.edge.trial", "shadowed"): 1,
    }


def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_PATHS", 200)
    setup = Setup()
    for number in range(500):
        setup.decide({"path": f"/{number}"}, {"user": str(number)})
        setup.decide({"user": "a"}, domain=f"domain {number}")
        setup.decide({"user": str(number)}, limit=LimitOverride(number + 1, Unit.HOUR))
    collected = collect(setup.metrics)
    kinds = Counter(one.instrument for one in collected)
    assert kinds[instruments.UNKNOWN_DOMAINS.name] == MAX_UNKNOWN_DOMAINS + 1
    assert kinds[instruments.REFERENCE_LIMITS["total_hits"].name] <= 202
    assert kinds[instruments.DECISIONS.name] < 20  # by rule, and there are few
    decisions = setup.decisions()
    assert decisions["my.edge", "my.edge.path", "ok", "store"] == 500  # none is lost
    assert decisions["my.edge", OVERRIDE, "ok", "store"] == 500


def test_call_durations_are_by_status_and_merged_for_compatibility() -> None:
    counted = Metrics()
    times = counted.calls.setdefault("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", CallTimes())
    times.answered(0.0004, 3)
    times.failed(2.0, "UNAVAILABLE")
    collected = collect(counted)
    method = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
    ok = collected[series(instruments.CALL_DURATION, "grpc", method, "OK")]
    assert isinstance(ok, Distribution)
    assert dict(zip(DURATIONS_S, ok.counts, strict=False))[0.0005] == sum(ok.counts) == 3
    assert ok.sum_s == pytest.approx(0.0012)
    whole = collected[series(instruments.REFERENCE_TIMES, "ShouldRateLimit")]
    assert isinstance(whole, Distribution)
    assert (sum(whole.counts), whole.counts[-1]) == (4, 1)
    assert collected[series(instruments.REFERENCE_REQUESTS, "ShouldRateLimit")] == 4


def test_a_value_equal_to_a_bound_is_in_the_bucket_below() -> None:
    durations = Durations()
    durations.observe(0.001)
    durations.observe(0.0011)
    collected = dict(zip(DURATIONS_S, durations.value.counts, strict=False))
    assert (collected[0.001], collected[0.0025]) == (1, 1)


def test_external_values_are_collected() -> None:
    counted = Metrics()
    counted.export_values(lambda: [("ratelimit.throttle.queue_length", 2), ("ratelimit.throttle.delayed", 7)])
    counted.export_series(lambda: [(series(instruments.STORE_AVAILABLE), 1)])
    collected = collect(counted)
    assert collected[series(BY_NAME["ratelimit.throttle.queue_length"])] == 2
    assert collected[series(BY_NAME["ratelimit.throttle.delayed"])] == 7
    assert collected[series(instruments.STORE_AVAILABLE)] == 1


def process(requests: int, available: int, denied: int, seconds: float) -> Collected:
    durations = Durations()
    durations.observe(seconds)
    return {
        series(instruments.REFERENCE_REQUESTS, "ShouldRateLimit"): requests,
        series(instruments.STORE_AVAILABLE): available,
        series(instruments.RULES_REJECTED_UPDATES): denied,
        series(instruments.STORE_DURATION, "redis", ""): durations.value,
    }


def test_series_are_merged_by_rule_and_survive_json() -> None:
    parts = [process(1, 1, 0, 0.002), process(20, 0, 3, 0.2), {}]
    whole = merge(from_json(to_json(part)) for part in parts)
    durations = whole.pop(series(instruments.STORE_DURATION, "redis", ""))
    assert isinstance(durations, Distribution)
    assert (sum(durations.counts), durations.sum_s) == (2, pytest.approx(0.202))
    assert list(whole.values()) == [21, 0, 3]


def test_gauges_do_not_outlive_a_process() -> None:
    assert {one.instrument for one in without_gauges(process(1, 1, 1, 0.1))} == {
        instruments.REFERENCE_REQUESTS.name,
        instruments.STORE_DURATION.name,
    }


def test_instrument_names_are_unique_and_include_the_unit() -> None:
    assert len({one.name for one in INSTRUMENTS}) == len({one.prometheus for one in INSTRUMENTS}) == len(INSTRUMENTS)
    for one in INSTRUMENTS:
        assert not one.name.endswith("_total")
        if not one.reference:
            assert one.prometheus.endswith("_total") == (one.kind is InstrumentKind.COUNTER)
        if one.unit in ("s", "By") and not one.reference:
            assert {"s": "_seconds", "By": "_bytes"}[one.unit] in one.prometheus


def test_stats_and_statsd_use_the_names_of_the_instruments() -> None:
    assert {name for name, one in instruments.EXTERNAL_INSTRUMENTS.items() if name != one.name} == set()


def test_counters_of_other_servers_end_with_the_worker_and_are_not_added() -> None:
    """Each worker reports the same commands of Redis, which begin at 0 again when Redis is restarted."""
    node = "10.0.0.7", "6379"
    commands, duration = (Series(one.name, node) for one in (instruments.REDIS_COMMANDS, instruments.REDIS_DURATION))
    own = Durations()
    own.observe(0.002)
    part: Collected = {commands: 70, duration: own.value}

    assert merge([part, {commands: 75, duration: own.value}])[commands] == 75
    assert without_gauges(part) == {duration: own.value}


@pytest.mark.parametrize(
    ("seconds", "p95_s"),
    [([], None), ([0.004] * 4, 0.0049), ([0.0001], 0.000095), ([5.0] * 9, 1.0), ([0.004] * 95 + [0.4] * 5, 0.005)],
)
def test_quantile_is_interpolated_within_a_bucket(seconds: list[float], p95_s: float | None) -> None:
    durations = Durations()
    for one in seconds:
        durations.observe(one)
    found = quantile(0.95, durations.value.counts)
    assert found == (None if p95_s is None else pytest.approx(p95_s, abs=5e-5))
