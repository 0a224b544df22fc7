"""Counters: arithmetic and names of envoyproxy/ratelimit, and bounds on names that clients influence."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Charge,
    DescriptorPlan,
    Limit,
    PlanTemplate,
    Reading,
    Step,
    StoreResult,
    Unit,
    WarnAt,
    WarningState,
)
from ratelimit_rls.telemetry.metrics import MAX_PATHS, OTHER, LimitCounters, Metrics, near_limit

LIMIT = 20  # near_limit is above 16


def counted(after: int, hits: int, *, charge: Charge = Charge.ALWAYS, shadow: bool = False) -> LimitCounters:
    """Return the counters when `hits` bring the count to `after` (under `admitted`: would bring)."""
    metrics = Metrics()
    step = Step(Limit(LIMIT, Unit.MINUTE), hits, charge, shadow_mode=shadow)
    template = PlanTemplate("d", True, (step,), (DescriptorPlan(None, (step,), hits, "d.k"),))
    over = after > LIMIT
    left = LIMIT - (after - hits if over and charge is Charge.ADMITTED else after)
    answer = StoreResult.of(over and not shadow, 0, (Reading(left, 1 if over else 0, 1),))
    counters = metrics.limit("d.k")
    metrics.record(decision_of(template, answer), (counters,))
    return counters


@pytest.mark.parametrize("charge", Charge)
@pytest.mark.parametrize(
    ("after", "hits", "within", "near", "over"),
    [
        (1, 1, 1, 0, 0),
        (16, 1, 1, 0, 0),
        (17, 1, 1, 1, 0),
        (18, 4, 4, 2, 0),  # 14 to 18 crosses 16: two of the four are near
        (20, 1, 1, 1, 0),
        (21, 1, 0, 0, 1),
        (22, 5, 0, 3, 2),  # 17 to 22 crosses 20: three were near, two are over
        (25, 12, 0, 4, 5),  # from 13: below 16 nothing is near
    ],
)
def test_hits_are_split_at_each_threshold(
    charge: Charge, after: int, hits: int, within: int, near: int, over: int
) -> None:
    counters = counted(after, hits, charge=charge)

    assert (counters.total_hits, counters.within_limit, counters.near_limit, counters.over_limit) == (
        hits,
        within,
        near,
        over,
    )
    assert counters.shadow_mode == 0


def test_all_hits_are_over_limit_when_the_limit_was_used_up() -> None:
    assert counted(30, 5).over_limit == 5


def test_hits_over_a_shadowed_limit_are_counted_twice() -> None:
    counters = counted(22, 5, shadow=True)

    assert (counters.over_limit, counters.shadow_mode) == (2, 2)


def test_refunds_are_counted_separately() -> None:
    counters = counted(5, -3)

    assert (counters.total_negative_hits, counters.total_hits) == (3, 0)


def test_warn_at_states_are_counted_and_exported_only_above_zero() -> None:
    metrics = Metrics()
    step = Step(Limit(LIMIT, Unit.MINUTE), 1, Charge.ADMITTED)
    template = PlanTemplate("d", True, (step,), (DescriptorPlan(None, (step,), 1, "d.k", watchers=(WarnAt(800),)),))
    counters = metrics.limit("d.k")
    metrics.limit("d.other")
    for state in (WarningState.NORMAL, WarningState.WARNING, WarningState.WARNING, WarningState.THROTTLED):
        denied = state is WarningState.THROTTLED
        reading = Reading(0, 1 if denied else 0, 1)
        metrics.record(decision_of(template, StoreResult.of(denied, 0, (reading, Reading(state, 0, 0)))), (counters,))

    states = {name: count for name, count in metrics.names().items() if ".state_" in name}
    prefix = "ratelimit.service.rate_limit.d.k"
    assert states == {f"{prefix}.state_warning": 2, f"{prefix}.state_throttled": 1}


def test_near_limit_is_computed_in_single_precision() -> None:
    assert near_limit(20, 0.8) == 16
    # In double precision the product is 3435973835.99…; the nearest 32-bit float is above it.
    assert near_limit(2**32 - 1, 0.8) == 3435973888


def test_names_are_safe_for_statsd() -> None:
    metrics = Metrics()
    metrics.limit("edge.remote_address_10.0.0.1.path_a:b|c")

    names = list(metrics.names())

    assert "ratelimit.service.rate_limit.edge.remote_address_10_0_0_1.path_a_b_c.total_hits" in names


def test_paths_and_domains_that_clients_choose_are_bounded() -> None:
    metrics = Metrics()
    for i in range(MAX_PATHS + 50):
        metrics.limit(f"edge.user_{i}").total_hits += 1
        metrics.domain_not_found(f"domain {i}", 1)

    names = metrics.names()

    assert len(names) < (MAX_PATHS + 1) * 8 + 20
    assert names[f"ratelimit.service.rate_limit.{OTHER}.total_hits"] == 50
    assert names[f"ratelimit.service.rate_limit.{OTHER}.domain_not_found"] == 50
