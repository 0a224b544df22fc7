from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.core.decision import UNLIMITED_REMAINING, allow_without_store, decision_of, deny_without_store
from ratelimit_rls.core.model import (
    Code,
    Decision,
    Descriptor,
    Entry,
    OnStoreFailure,
    Purpose,
    Reading,
    Request,
    StoreResult,
    WarningState,
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
DENIED = Reading(left=0, retry_us=12_000_000, reset_us=41_000_000)


def _decide(keys: list[str], *readings: Reading, denied: bool = False, policy: Policy | None = None) -> Decision:
    request = Request("d", tuple(Descriptor((Entry(key, "v"),)) for key in keys))
    answer = StoreResult.of(denied, 1_000, tuple(readings)) if readings else None
    return decision_of(Planner(TREE, policy or Policy()).plan(request).template, answer)


def test_descriptor_without_counters_is_ok() -> None:
    decision = _decide(["exempt", "free"])

    assert decision.code is Code.OK
    exempt, free = decision.statuses
    assert (exempt.code, exempt.step, exempt.remaining, exempt.reset_s) == (Code.OK, None, 0, 0)
    assert (free.code, free.step, free.remaining, free.reset_s) == (Code.OK, None, UNLIMITED_REMAINING, 0)


def test_statuses_are_in_descriptor_order() -> None:
    decision = _decide(["exempt", "user", "free", "shadow"], ALLOWED, DENIED)

    assert [status.reading for status in decision.statuses] == [None, ALLOWED, None, DENIED]


def test_allowed_status_has_remaining_and_reset() -> None:
    (status,) = _decide(["user"], ALLOWED).statuses

    assert status.step is not None
    assert (status.code, status.step.limit.requests_per_unit, status.remaining) == (Code.OK, 5, 3)
    assert status.reset_s == 42  # rounded up


def test_remaining_is_clamped_to_uint32() -> None:
    assert _decide(["user"], ALLOWED._replace(left=-7)).statuses[0].remaining == 0
    assert _decide(["user"], ALLOWED._replace(left=2**40)).statuses[0].remaining == UNLIMITED_REMAINING


def test_denied_status_has_retry_after() -> None:
    decision = _decide(["user"], DENIED, denied=True)

    assert decision.code is Code.OVER_LIMIT
    assert (decision.statuses[0].code, decision.statuses[0].remaining) == (Code.OVER_LIMIT, 0)
    assert decision.statuses[0].reset_s == 12


def test_never_admitted_status_has_time_until_reset() -> None:
    (status,) = _decide(["user"], DENIED._replace(retry_us=-1), denied=True).statuses

    assert (status.code, status.reset_s) == (Code.OVER_LIMIT, 41)


def test_shadow_limit_over_limit_is_ok_with_zero_remaining() -> None:
    decision = _decide(["shadow"], DENIED)

    (status,) = decision.statuses
    assert (decision.code, status.code, status.remaining) == (Code.OK, Code.OK, 0)
    assert status.step is not None


def test_code_is_the_verdict_of_the_store() -> None:
    assert _decide(["user", "shadow"], DENIED, ALLOWED, denied=False).code is Code.OK
    assert _decide(["user", "shadow"], DENIED, ALLOWED, denied=True).code is Code.OVER_LIMIT


def test_global_shadow_mode_changes_code_but_not_statuses() -> None:
    decision = _decide(["user"], DENIED, denied=True, policy=Policy(shadow_mode=True))

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


def _decide_watched(key: str, *readings: Reading, denied: bool = False, purpose: Purpose = Purpose.DECIDE) -> Decision:
    request = Request("d", (Descriptor((Entry(key, "v"),)),), purpose=purpose)
    return decision_of(Planner(WATCHED_TREE, Policy()).plan(request).template, StoreResult.of(denied, 1_000, readings))


def test_watcher_states_are_in_the_status() -> None:
    decision = _decide_watched("client", Reading(1, 0, 500_000), Reading(2, 0, 9_000_000), Reading(1, 0, 0))
    (status,) = decision.statuses
    assert (status.code, status.remaining, status.violations, status.state) == (Code.OK, 1, 2, WarningState.WARNING)
    assert status.readings == (Reading(1, 0, 500_000),)
    assert status.cooldown is None


def test_cooldown_denies_until_it_ends() -> None:
    decision = _decide_watched(
        "client", Reading(2, 0, 0), Reading(2, 2_500_000, 9_000_000), Reading(2, 0, 0), denied=True
    )
    (status,) = decision.statuses
    assert decision.code is Code.OVER_LIMIT
    assert (status.code, status.remaining, status.reset_s, status.state) == (
        Code.OVER_LIMIT,
        0,
        3,
        WarningState.THROTTLED,
    )
    assert status.step is decision.template.steps[0]
    assert status.reading == status.cooldown == Reading(0, 2_500_000, 9_000_000)


def test_call_is_delayed_until_its_last_slot() -> None:
    decision = _decide_watched("queue", Reading(-1, -1 - 100_000, 200_000), Reading(-1, -1 - 6_000_000, 12_000_000))
    assert (decision.code, decision.wait_us, decision.delayed_by) == (Code.OK, 6_000_000, 1)
    assert [(status.code, status.remaining) for status in decision.statuses] == [(Code.OK, 0)]


def test_denied_or_immediate_call_is_not_delayed() -> None:
    free = Reading(0, 0, 100_000)
    assert _decide_watched("queue", free, free).delayed_by == -1
    assert _decide_watched("queue", Reading(0, 5, 5), free, denied=True).wait_us == 0


def test_report_is_never_denied() -> None:
    over = Reading(-3, 1_000_000, 2_000_000)
    decision = _decide_watched("client", over, Reading(2, 0, 0), denied=True, purpose=Purpose.REPORT)
    assert decision.code is Code.OK
    assert decision.statuses[0].code is Code.OVER_LIMIT


def _denied(keys: list[str], rules: str = RULES, policy: Policy | None = None, **request: Any) -> Decision:
    tree = compile_documents({"f.yaml": rules.encode()}).tree
    descriptors = tuple(Descriptor((Entry(key, "v"),), is_refund=key == "refund") for key in keys)
    return deny_without_store(
        Planner(tree, policy or Policy()).plan(Request("d", descriptors, **request)).template, 1_000
    )


def test_allow_without_store_reports_no_limits() -> None:
    decision = allow_without_store(_decide(["user", "shadow", "free"], ALLOWED, ALLOWED).template)

    assert (decision.code, decision.without_store) == (Code.OK, OnStoreFailure.ALLOW)
    assert [(status.code, status.step, status.reading) for status in decision.statuses] == [(Code.OK, None, None)] * 3


def test_deny_without_store_denies_by_every_enforced_limit() -> None:
    decision = _denied(["exempt", "user", "shadow", "free"])

    assert (decision.code, decision.without_store, decision.now_us) == (Code.OVER_LIMIT, OnStoreFailure.DENY, 1_000)
    assert [status.code.name for status in decision.statuses] == ["OK", "OVER_LIMIT", "OK", "OK"]
    user = decision.statuses[1]
    assert user.step is decision.template.steps[0]
    assert (user.remaining, user.reset_s, len(user.readings)) == (0, 1, 1)


def test_deny_without_store_reports_the_first_limit() -> None:
    limits = "[{unit: minute, requests_per_unit: 5}, {unit: day, requests_per_unit: 9}]"
    rules = f"domain: d\ndescriptors: [{{key: user, limits: {limits}}}]"
    (status,) = _denied(["user"], rules).statuses

    assert status.step is status.descriptor_plan.steps[0]
    assert [reading.retry_us for reading in status.readings] == [1_000_000] * 2


@pytest.mark.parametrize(
    ("keys", "policy", "fields", "code"),
    [
        (["shadow"], Policy(), {}, Code.OK),
        (["free", "exempt"], Policy(), {}, Code.OK),
        (["user"], Policy(), {"purpose": Purpose.REPORT}, Code.OK),  # already happened
        (["user"], Policy(), {"purpose": Purpose.LOOK}, Code.OVER_LIMIT),
        (["user"], Policy(shadow_mode=True), {}, Code.OK),
        (["user"], Policy(quota_mode=True), {}, Code.OVER_LIMIT),
        (["user", "exempt"], Policy(quota_mode=True), {}, Code.OK),  # a quota that passes
        (["user", "shadow"], Policy(quota_mode=True), {}, Code.OK),
        (["user", "free"], Policy(quota_mode=True), {}, Code.OVER_LIMIT),
    ],
)
def test_deny_without_store_denies_only_what_a_store_could(
    keys: list[str], policy: Policy, fields: dict[str, Any], code: Code
) -> None:
    decision = _denied(keys, policy=policy, **fields)

    assert decision.code is code
    assert decision.shadowed is policy.shadow_mode


def test_refund_is_never_denied() -> None:
    rules = "domain: d\ndescriptors: [{key: refund, rate_limit: {unit: minute, requests_per_unit: 5}}]"

    assert _denied(["refund"], rules).code is Code.OK


def test_cached_denial_is_marked() -> None:
    template = _decide(["user"], DENIED).template

    assert decision_of(template, StoreResult.of(True, 1_000, (DENIED,), remembered=True)).remembered
    assert not decision_of(template, StoreResult.of(True, 1_000, (DENIED,))).remembered
