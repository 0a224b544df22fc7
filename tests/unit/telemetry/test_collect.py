"""Series of instruments made from the counters: what each is labelled with, and how many there can be."""

from __future__ import annotations

from collections import Counter

import pytest

from ratelimit_rls.core.decide import allowed, decide, denied
from ratelimit_rls.core.model import Answer, Descriptor, Entry, Outline, Override, Plan, Purpose, Reading, Request, Unit
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.telemetry import instruments, metrics
from ratelimit_rls.telemetry.collect import MOST_UNKNOWN_DOMAINS, collect, series
from ratelimit_rls.telemetry.collected import Collected, Distribution, Durations, from_json, lasting, to_json, together
from ratelimit_rls.telemetry.instruments import BY_NAME, DURATIONS_S, INSTRUMENTS, Kind
from ratelimit_rls.telemetry.metrics import OTHER, CallTimes, Metrics
from ratelimit_rls.telemetry.rule_names import OVERRIDE

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
PASSES, REFUSED = Reading(9, 0, 1), Reading(-1, 5, 1)


class House:
    def __init__(self, policy: Policy | None = None) -> None:
        self.metrics = Metrics()
        self._planner = Planner(compile_documents({"f.yaml": RULES}).tree, policy or Policy())

    def plan(
        self,
        *entries: dict[str, str],
        domain: str = "my.edge",
        limit: Override | None = None,
        purpose: Purpose = Purpose.DECIDE,
    ) -> Plan:
        descriptors = tuple(Descriptor(tuple(Entry(*pair) for pair in one.items()), limit) for one in entries)
        return self._planner.plan(Request(domain, descriptors, purpose=purpose))

    def decide(
        self,
        *entries: dict[str, str],
        reading: Reading = PASSES,
        domain: str = "my.edge",
        limit: Override | None = None,
        remembered: bool = False,
        without_store: bool = False,
    ) -> Outline:
        outline = self.plan(*entries, domain=domain, limit=limit).outline
        answer = None
        if outline.steps:
            refused = reading is REFUSED and not all(step.shadow_mode for step in outline.steps)
            answer = Answer(refused, 0, (reading,) * len(outline.steps), remembered=remembered)
        self.metrics.record(decide(outline, answer), self.metrics.counters(outline), without_store=without_store)
        return outline

    def decisions(self) -> dict[tuple[str, ...], float]:
        return {
            one.attributes: value
            for one, value in collect(self.metrics).items()
            if one.instrument == instruments.DECISIONS.name and not isinstance(value, Distribution) and value
        }


def test_a_decision_is_counted_by_rule_outcome_and_source() -> None:
    house = House()
    house.decide({"user": "a"})
    house.decide({"user": "b"}, reading=REFUSED)
    house.decide({"user": "b"}, reading=REFUSED, remembered=True)
    house.decide({"user": "b"}, reading=REFUSED, without_store=True)
    house.decide({"trial": "x"}, reading=REFUSED)
    house.decide({"staff": "x"}, {"nobody": "x"})
    house.decide({"user": "a"}, {"vip": "a"})
    house.decide({"user": "a"}, domain="elsewhere")
    house.decide({"user": "a"}, limit=Override(5, Unit.HOUR))
    assert house.decisions() == {
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


def test_what_the_global_shadow_mode_lets_pass_is_shadowed() -> None:
    house = House(Policy(shadow_mode=True))
    house.decide({"user": "a"}, reading=REFUSED)
    assert list(house.decisions()) == [("my.edge", "my.edge.user", "shadowed", "store")]
    assert collect(house.metrics)[series(instruments.GLOBAL_SHADOW)] == 1


def test_what_is_told_without_the_store_is_counted_as_what_it_was() -> None:
    house = House()
    outline = house.plan({"user": "a"}, {"staff": "x"}).outline
    counters = house.metrics.counters(outline)
    house.metrics.record_policy(allowed(outline), counters)
    house.metrics.record_policy(denied(outline, 0), counters)
    assert house.decisions() == {
        ("my.edge", "my.edge.user", "ok", "fallback"): 1,
        ("my.edge", "my.edge.user", "over_limit", "fallback"): 1,
        ("my.edge", "my.edge.staff", "unlimited", "rules"): 2,
    }


def test_a_report_decides_nothing_and_a_look_does() -> None:
    house = House()
    for purpose in (Purpose.REPORT, Purpose.LOOK):
        outline = house.plan({"user": "a"}, purpose=purpose).outline
        decision = decide(outline, Answer(True, 0, (REFUSED,)))
        house.metrics.record(decision, house.metrics.counters(outline))
    assert house.decisions() == {("my.edge", "my.edge.user", "over_limit", "store"): 1}


def test_rules_and_domains_of_many_reloads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_RULES", 10)
    counted = Metrics()
    for number in range(40):
        rules = RULES.replace(b"my.edge", b"edge-%d" % number)
        plan = Planner(compile_documents({"f.yaml": rules}).tree, Policy()).plan(
            Request(f"edge-{number}", (Descriptor((Entry("user", "a"),)),))
        )
        counted.record(decide(plan.outline, Answer(False, 0, (PASSES,))), counted.counters(plan.outline))
    labels = {one.attributes[:2] for one in collect(counted) if one.instrument == instruments.DECISIONS.name}
    assert len(labels) == 6
    assert (OTHER, OTHER) in labels


def test_the_reference_s_labels_know_the_domain_whatever_dots_are_in_it_and_two_levels() -> None:
    house = House()
    house.decide({"user": "a"})
    house.decide({"path": "/x"})
    house.decide({"a": "1", "b": "1.2.3.4", "c": "z"})
    hits = instruments.REFERENCE_LIMITS["total_hits"]
    collected = collect(house.metrics)
    assert [one.attributes for one in collected if one.instrument == hits.name] == [
        ("my.edge", "user", ""),
        ("my.edge", "path_/x", ""),
        ("my.edge", "a", "b_1_2_3_4"),
    ]


def test_hits_are_told_by_what_became_of_them() -> None:
    house = House()
    house.decide({"user": "a"})
    house.decide({"user": "a"}, reading=REFUSED)
    house.decide({"trial": "a"}, reading=REFUSED)
    collected = collect(house.metrics)
    hits = {one.attributes[1:]: value for one, value in collected.items() if one.instrument == "ratelimit.hits"}
    assert hits == {
        ("my.edge.user", "ok"): 1,
        ("my.edge.user", "over_limit"): 1,
        ("my.edge.trial", "ok"): 0,
        ("my.edge.trial", "over_limit"): 0,
        ("my.edge.trial", "shadowed"): 1,
    }


def test_series_are_bounded_whatever_clients_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_PATHS", 200)
    house = House()
    for number in range(500):
        house.decide({"path": f"/{number}"}, {"user": str(number)})
        house.decide({"user": "a"}, domain=f"domain {number}")
        house.decide({"user": str(number)}, limit=Override(number + 1, Unit.HOUR))
    collected = collect(house.metrics)
    kinds = Counter(one.instrument for one in collected)
    assert kinds[instruments.UNKNOWN_DOMAINS.name] == MOST_UNKNOWN_DOMAINS + 1
    assert kinds[instruments.REFERENCE_LIMITS["total_hits"].name] <= 202
    assert kinds[instruments.DECISIONS.name] < 20  # by rule, of which there are few
    told = house.decisions()
    assert told["my.edge", "my.edge.path", "ok", "store"] == 500  # none is lost
    assert told["my.edge", OVERRIDE, "ok", "store"] == 500


def test_call_times_are_told_by_status_and_for_the_reference_together() -> None:
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


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    durations = Durations()
    durations.observe(0.001)
    durations.observe(0.0011)
    told = dict(zip(DURATIONS_S, durations.value.counts, strict=False))
    assert (told[0.001], told[0.0025]) == (1, 1)


def test_what_others_keep_is_told_with_it() -> None:
    counted = Metrics()
    counted.watch(lambda: [("ratelimit.throttle.held", 2), ("ratelimit.throttle.held_total", 7)])
    counted.measure(lambda: [(series(instruments.STORE_AVAILABLE), 1)])
    collected = collect(counted)
    assert collected[series(BY_NAME["ratelimit.throttle.held"])] == 2
    assert collected[series(BY_NAME["ratelimit.throttle.holds"])] == 7
    assert collected[series(instruments.STORE_AVAILABLE)] == 1


def process(requests: int, available: int, refused: int, seconds: float) -> Collected:
    durations = Durations()
    durations.observe(seconds)
    return {
        series(instruments.REFERENCE_REQUESTS, "ShouldRateLimit"): requests,
        series(instruments.STORE_AVAILABLE): available,
        series(instruments.RULES_REFUSED): refused,
        series(instruments.STORE_DURATION, "redis", ""): durations.value,
    }


def test_several_processes_are_put_together_as_each_instrument_wants_and_survive_json() -> None:
    parts = [process(1, 1, 0, 0.002), process(20, 0, 3, 0.2), {}]
    whole = together(from_json(to_json(part)) for part in parts)
    durations = whole.pop(series(instruments.STORE_DURATION, "redis", ""))
    assert isinstance(durations, Distribution)
    assert (sum(durations.counts), durations.sum_s) == (2, pytest.approx(0.202))
    assert list(whole.values()) == [21, 0, 3]


def test_only_what_happened_outlives_a_process() -> None:
    assert {one.instrument for one in lasting(process(1, 1, 1, 0.1))} == {
        instruments.REFERENCE_REQUESTS.name,
        instruments.STORE_DURATION.name,
    }


def test_names_are_one_instrument_s_alone_and_say_their_unit() -> None:
    assert len({one.name for one in INSTRUMENTS}) == len({one.prometheus for one in INSTRUMENTS}) == len(INSTRUMENTS)
    for one in INSTRUMENTS:
        assert not one.name.endswith("_total")
        if not one.reference:
            assert one.prometheus.endswith("_total") == (one.kind is Kind.COUNTER)
        if one.unit in ("s", "By") and not one.reference:
            assert {"s": "_seconds", "By": "_bytes"}[one.unit] in one.prometheus
