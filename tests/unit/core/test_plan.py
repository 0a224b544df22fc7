from __future__ import annotations

import gc
import tracemalloc
import weakref

import pytest

from ratelimit_rls.core import plan
from ratelimit_rls.core.model import (
    MAX_HITS,
    Charge,
    Descriptor,
    Entry,
    OnStoreFailure,
    Outline,
    Override,
    Penalty,
    Plan,
    Purpose,
    Request,
    Unit,
    WarnAt,
)
from ratelimit_rls.core.plan import MOST_DESCRIPTORS, MOST_STATES, Planner, Policy, per_outline
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.rules.compile import compile_documents

RULES = """
domain: d
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 5, name: ordinary}
  - key: premium
    rate_limit: {unit: minute, requests_per_unit: 50, name: premium, replaces: [{name: ordinary}]}
  - key: free
    rate_limit: {unlimited: true, replaces: [{name: ordinary}]}
  - key: left
    rate_limit: {unit: day, requests_per_unit: 1, name: left, replaces: [{name: right}]}
  - key: right
    rate_limit: {unit: day, requests_per_unit: 1, name: right, replaces: [{name: left}]}
  - key: unnamed
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: quota
    quota_mode: true
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: shadow
    shadow_mode: true
    charge: admitted
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: exempt
"""
TREE = compile_documents({"f.yaml": RULES.encode()}).tree


def _descriptor(key: str, **fields: object) -> Descriptor:
    return Descriptor((Entry(key, "v"),), **fields)  # type: ignore[arg-type]


def _request(*descriptors: Descriptor | str, hits: int = 0, domain: str = "d") -> Request:
    return Request(
        domain, tuple(_descriptor(found) if isinstance(found, str) else found for found in descriptors), hits
    )


def _plan(*descriptors: Descriptor | str, policy: Policy | None = None) -> Plan:
    return Planner(TREE, policy or Policy()).plan(_request(*descriptors))


def _outline(*descriptors: Descriptor | str, policy: Policy | None = None) -> Outline:
    return _plan(*descriptors, policy=policy).outline


def test_each_limit_becomes_a_step_with_a_key_and_each_descriptor_a_slot_in_order() -> None:
    outline, keys, _ = _plan("unnamed", "exempt", "user")

    assert keys == (b"rl:{d/unnamed=v}:fixed_window:86400", b"rl:{d/user=v}:fixed_window:60")
    assert [step.limit.requests_per_unit for step in outline.steps] == [1, 5]
    assert [slot.steps for slot in outline.slots] == [outline.steps[:1], (), outline.steps[1:]]
    assert [slot.metric_path for slot in outline.slots] == ["d.unnamed", "", "d.user"]
    assert outline.domain_known


def test_a_replaced_limit_is_not_counted_wherever_it_stands() -> None:
    for order in (("user", "premium"), ("premium", "user")):
        outline, keys, _ = _plan(*order)

        (step,) = outline.steps
        assert step.limit.name == "premium"
        assert keys == (b"rl:{d/premium=v}:fixed_window:60",)
        assert [slot.steps for slot in outline.slots] == [() if key == "user" else (step,) for key in order]


def test_an_unlimited_rule_replaces_too_and_is_asked_of_nobody() -> None:
    outline = _outline("free", "user")

    assert outline.steps == ()
    assert [slot.unlimited for slot in outline.slots] == [True, False]


def test_two_that_replace_each_other_are_both_gone() -> None:
    assert _outline("left", "right").steps == ()


def test_a_limit_without_a_name_is_replaced_by_nobody() -> None:
    assert len(_outline("premium", "unnamed").steps) == 2


HITS = [
    # the request's, the descriptor's, counted
    (0, None, 1),
    (1, None, 1),
    (7, None, 7),
    (7, 0, 0),
    (7, 3, 3),
    (0, MAX_HITS, MAX_HITS),
]


@pytest.mark.parametrize(("request_hits", "descriptor_hits", "counted"), HITS)
def test_a_descriptor_s_own_hits_come_first_and_may_be_none(
    request_hits: int, descriptor_hits: int | None, counted: int
) -> None:
    asked = _request(_descriptor("user", hits=descriptor_hits), hits=request_hits)

    (step,) = Planner(TREE, Policy()).plan(asked).outline.steps

    assert step.cost == counted


def test_a_refund_gives_back() -> None:
    outline = _outline(_descriptor("user", hits=3, is_refund=True))

    assert outline.steps[0].cost == -3
    assert outline.slots[0].hits == 3


def test_the_modes_of_a_rule_are_its_step_s() -> None:
    quota, shadow = _outline("quota", "shadow").steps

    assert (quota.quota_mode, quota.shadow_mode, quota.charge) == (True, False, Charge.ALWAYS)
    assert (shadow.quota_mode, shadow.shadow_mode, shadow.charge) == (False, True, Charge.ADMITTED)


def test_an_override_is_charged_by_the_policy() -> None:
    override = _descriptor("free", limit=Override(9, Unit.WEEK))

    for charge in Charge:
        (step,) = _outline(override, policy=Policy(override_charge=charge)).steps
        assert (step.limit.requests_per_unit, step.charge) == (9, charge)


QUOTA_PASSES = [
    (["user", "exempt"], True),
    (["unnamed", "free"], False),
    (["user", "unnamed"], False),
    (["premium", "user"], True),  # a replaced limit passes too
]


@pytest.mark.parametrize(("keys", "passes"), QUOTA_PASSES)
def test_under_the_global_quota_mode_a_descriptor_without_limit_is_a_quota_that_passes(
    keys: list[str], passes: bool
) -> None:
    outline = _outline(*keys, policy=Policy(quota_mode=True))

    assert outline.quota_passes is passes
    assert all(step.quota_mode for step in outline.steps)
    assert _outline(*keys).quota_passes is False


def test_the_global_shadow_mode_is_the_outline_s() -> None:
    assert _outline("user", policy=Policy(shadow_mode=True)).shadow_mode
    assert not _outline("user").shadow_mode


def test_the_key_prefix_stands_before_every_key() -> None:
    assert _plan("user", policy=Policy(key_prefix="blue:")).keys == (b"blue:rl:{d/user=v}:fixed_window:60",)


def test_an_unknown_domain_is_told_apart_from_one_without_limits() -> None:
    planner = Planner(TREE, Policy())

    assert not planner.plan(_request("user", domain="nope")).outline.domain_known
    assert planner.plan(_request("exempt")).outline.domain_known


OTHER_KINDS = {
    "another rule": _request("premium"),
    "one more descriptor": _request("user", "exempt"),
    "other hits": _request("user", hits=2),
    "hits of its own": _request(_descriptor("user", hits=1)),
    "a refund": _request(_descriptor("user", hits=1, is_refund=True)),
    "a limit of its own": _request(_descriptor("user", limit=Override(5, Unit.MINUTE))),
    "a smaller limit of its own": _request(_descriptor("user", limit=Override(4, Unit.MINUTE))),
    "another domain": _request("user", domain="nope"),
}


def test_requests_of_one_kind_share_an_outline_and_those_of_another_do_not() -> None:
    planner = Planner(TREE, Policy())
    alice, bob = (planner.plan(Request("d", (Descriptor((Entry("user", name),)),))) for name in ("alice", "bob"))

    others = [planner.plan(request).outline for request in OTHER_KINDS.values()]

    assert alice.outline is bob.outline
    assert alice.keys != bob.keys
    assert len({alice.outline, *others}) == len(others) + 1
    for request, outline in zip(OTHER_KINDS.values(), others, strict=True):
        assert planner.plan(request).outline is outline


def _own_limits(number: int) -> Request:
    limit = Override(5, Unit.HOUR)
    return Request("d", tuple(Descriptor((Entry("k", f"{number}-{n}"),), limit) for n in range(MOST_DESCRIPTORS)))


MANY_KINDS = {
    "hits": lambda number: _request("user", hits=number),
    "limits in the request": _own_limits,
    "huge domains": lambda number: Request(f"{number}" + "x" * 1_000_000, (_descriptor("user"),)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("hits", 5_000), ("limits in the request", 6), ("huge domains", 6)])
def test_what_a_planner_and_those_who_ask_it_keep_is_bounded(
    kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MOST_KEPT_BYTES", 2**20)
    planner = Planner(TREE, Policy())
    remembered = per_outline(lambda outline: bytes(100 * len(outline.slots)))
    tracemalloc.start()
    try:
        for one in range(number):
            remembered(planner.plan(MANY_KINDS[kind](one)).outline)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held_bytes < 2 * plan.MOST_KEPT_BYTES


REFUSED = {
    "no domain": (Request("", (_descriptor("user"),)), "rate limit domain must not be empty"),
    "no domain and no descriptors": (Request("", ()), "rate limit domain must not be empty"),
    "no descriptors": (Request("d", ()), "rate limit descriptor list must not be empty"),
    "too many descriptors": (Request("d", (_descriptor("user"),) * (MOST_DESCRIPTORS + 1)), "at most 1024"),
    "too many hits": (Request("d", (_descriptor("user", hits=MAX_HITS + 1),)), "descriptor 0: hits_addend 4294967296"),
    "unknown unit": (
        Request("d", (_descriptor("user"), _descriptor("user", limit=Override(1, Unit.UNKNOWN)))),
        "descriptor 1: the limit's unit is unknown; use SECOND",
    ),
}


@pytest.mark.parametrize(("request_", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_request_without_meaning_is_refused(request_: Request, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        Planner(TREE, Policy()).plan(request_)


WATCHED = """
domain: d
descriptors:
  - key: client
    penalty: {within: 1h, after: 2, multipliers: [1, 3]}
    warn_at: 0.8
    limits:
      - {unit: second, requests_per_unit: 2, algorithm: gcra}
      - {unit: day, requests_per_unit: 9}
  - key: queue
    action: throttle
    max_delay: 250ms
    limits:
      - {unit: second, requests_per_unit: 10, algorithm: leaky_bucket}
      - {unit: day, requests_per_unit: 1000}
  - key: plain
    rate_limit: {unit: minute, requests_per_unit: 5}
"""
WATCHED_TREE = compile_documents({"f.yaml": WATCHED.encode()}).tree


def _watched(*keys: str, policy: Policy | None = None, purpose: Purpose = Purpose.DECIDE) -> Plan:
    request = Request("d", tuple(_descriptor(key) for key in keys), purpose=purpose)
    return Planner(WATCHED_TREE, policy or Policy()).plan(request)


def test_a_descriptors_watchers_have_keys_behind_those_of_its_limits() -> None:
    outline, keys, _ = _watched("client", "plain")
    assert keys == (
        b"rl:{d/client=v}:gcra:1",
        b"rl:{d/client=v}:fixed_window:86400",
        b"rl:{d/client=v}:penalty",
        b"rl:{d/client=v}:warning",
        b"rl:{d/plain=v}:fixed_window:60",
    )
    assert [len(slot.steps) for slot in outline.slots] == [2, 1]
    assert outline.slots[0].watchers == (Penalty(3_600_000_000, 2, (1, 3)), WarnAt(800))


def test_only_buckets_have_slots_to_wait_for() -> None:
    outline = _watched("queue").outline
    assert [step.max_delay_us for step in outline.steps] == [250_000, 0]
    assert outline.can_wait
    assert not _watched("client").outline.can_wait


@pytest.mark.parametrize(
    "policy", [Policy(shadow_mode=True), Policy(quota_mode=True)], ids=["global shadow mode", "global quota mode"]
)
def test_where_refusals_need_not_hold_nobody_waits_or_is_penalised(policy: Policy) -> None:
    assert not _watched("queue", policy=policy).outline.can_wait
    assert _watched("client", policy=policy).outline.slots[0].watchers == (WarnAt(800),)


def test_a_look_asks_whether_one_more_would_pass_and_a_report_counts_whatever_it_leaves() -> None:
    (look,) = _watched("plain", purpose=Purpose.LOOK).outline.steps
    assert (look.cost, look.charge) == (0, Charge.ADMITTED)
    (report,) = _watched("plain", purpose=Purpose.REPORT).outline.steps
    assert (report.cost, report.charge) == (1, Charge.ALWAYS)
    reported = _watched("client", "queue", purpose=Purpose.REPORT).outline
    assert reported.slots[0].watchers == (WarnAt(800),)
    assert not reported.can_wait


def test_requests_that_differ_in_purpose_alone_are_of_different_kinds() -> None:
    planner = Planner(WATCHED_TREE, Policy())
    outlines = {id(planner.plan(_request("plain")._replace(purpose=purpose)).outline) for purpose in Purpose}
    assert len(outlines) == len(Purpose)


def test_more_limits_than_can_be_decided_together_are_refused() -> None:
    limits = "\n".join(f"      - {{unit: second, unit_multiplier: {n}, requests_per_unit: 5}}" for n in range(1, 9))
    rules = f"domain: d\ndescriptors:\n  - key: many\n    warn_at: 0.5\n    limits:\n{limits}\n"
    planner = Planner(compile_documents({"f.yaml": rules.encode()}).tree, Policy())

    def asked(descriptors: int) -> Request:
        return Request("d", tuple(Descriptor((Entry("many", str(n)),)) for n in range(descriptors)))

    assert len(planner.plan(asked(MOST_STATES // 9)).keys) == MOST_STATES // 9 * 9
    with pytest.raises(BadRequest, match=r"meets 1026 limits; at most 1024"):
        planner.plan(asked(MOST_STATES // 9 + 1))


@pytest.mark.parametrize("hits", [100, 5_000])
def test_requests_with_hits_that_few_share_weigh_what_they_are(hits: int) -> None:
    assert _outline_of_hits(hits).own_bytes > 1_000
    assert _outline_of_hits(1).own_bytes == _outline_of_hits(plan.FEW_HITS).own_bytes == 0


def _outline_of_hits(hits: int) -> Outline:
    return Planner(TREE, Policy()).plan(_request("user", hits=hits)).outline


def test_what_is_kept_of_many_kinds_is_what_it_is_said_to_weigh() -> None:
    """Of a rule with much to it, in the planner alone: transports and stores keep about as much again."""
    planner = Planner(WATCHED_TREE, Policy())
    planner.plan(Request("d", (_descriptor("client"), _descriptor("queue")), 2_000))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    outlines = [
        planner.plan(Request("d", (_descriptor("client"), _descriptor("queue")), hits)).outline
        for hits in range(100, 400)
    ]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < sum(outline.own_bytes for outline in outlines)


FAILING = """
domain: d
descriptors:
  - {key: silent, rate_limit: {unit: minute, requests_per_unit: 5, name: silent}}
  - {key: allow, on_store_failure: allow, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: local, on_store_failure: local, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: error, on_store_failure: error, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: deny, on_store_failure: deny, rate_limit: {unit: minute, requests_per_unit: 5, name: denied}}
  - {key: trial, on_store_failure: deny, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: trial_error, on_store_failure: error, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: quota, on_store_failure: deny, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 5}}
  - key: instead
    on_store_failure: local
    rate_limit: {unit: minute, requests_per_unit: 5, replaces: [{name: denied}, {name: silent}]}
  - {key: exempt, rate_limit: {unlimited: true}}
"""
FAILING_TREE = compile_documents({"f.yaml": FAILING.encode()}).tree
DENY, ERROR, LOCAL, ALLOW = OnStoreFailure


def _on_failure(*keys: str, policy: Policy | None = None, purpose: Purpose = Purpose.DECIDE) -> OnStoreFailure:
    request = _request(*keys)._replace(purpose=purpose)
    return Planner(FAILING_TREE, policy or Policy()).plan(request).outline.on_store_failure


PRECEDENCE = [
    (["allow"], ALLOW),
    (["allow", "local"], LOCAL),
    (["local", "error", "allow"], ERROR),
    (["allow", "local", "error", "deny"], DENY),
    (["deny", "allow"], DENY),
    (["allow", "exempt", "unknown"], ALLOW),  # who does not need the store has no say
    (["instead", "deny", "silent"], LOCAL),  # nor who is replaced
    (["trial"], ALLOW),
    (["trial", "local"], LOCAL),
    (["trial", "deny"], DENY),
    (["trial_error"], ERROR),
    (["quota"], DENY),
]


@pytest.mark.parametrize(("keys", "told"), PRECEDENCE)
def test_of_what_the_rules_of_a_call_say_without_a_store_the_strictest_holds(
    keys: list[str], told: OnStoreFailure
) -> None:
    assert _on_failure(*keys) is _on_failure(*reversed(keys)) is told


@pytest.mark.parametrize("set_to", OnStoreFailure)
def test_rules_that_do_not_say_it_are_as_the_process_is_set(set_to: OnStoreFailure) -> None:
    policy = Policy(on_store_failure=set_to)

    assert _on_failure("silent", policy=policy) is set_to
    assert _on_failure("allow", "silent", policy=policy) is set_to
    assert _on_failure("silent", "deny", policy=policy) is DENY
    assert _on_failure("allow", policy=policy) is ALLOW


def test_the_default_is_an_error() -> None:
    assert _on_failure("silent") is ERROR


@pytest.mark.parametrize("policy", [Policy(shadow_mode=True), Policy(shadow_mode=True, on_store_failure=DENY)])
def test_under_the_global_shadow_mode_nobody_is_refused_for_want_of_a_store(policy: Policy) -> None:
    assert _on_failure("deny", policy=policy) is ALLOW
    assert _on_failure("deny", "local", policy=policy) is LOCAL
    assert _on_failure("error", policy=policy) is ERROR


def test_the_global_quota_mode_changes_nothing_of_it() -> None:
    assert _on_failure("deny", "allow", policy=Policy(quota_mode=True)) is DENY


def test_what_has_happened_or_is_given_back_is_not_refused_for_want_of_a_store() -> None:
    assert _on_failure("deny", purpose=Purpose.REPORT) is ALLOW
    assert _on_failure("error", "deny", purpose=Purpose.REPORT) is ERROR
    assert _on_failure("deny", purpose=Purpose.LOOK) is DENY
    refund = _request(_descriptor("deny", hits=2, is_refund=True))
    assert Planner(FAILING_TREE, Policy()).plan(refund).outline.on_store_failure is ALLOW
    mixed = _request(_descriptor("deny", hits=2, is_refund=True), _descriptor("deny"))
    assert Planner(FAILING_TREE, Policy()).plan(mixed).outline.on_store_failure is DENY


def test_by_domain_all_keys_of_a_call_are_on_one_slot() -> None:
    tree = compile_documents({"f.yaml": b"shard_by: domain" + WATCHED.encode()}).tree

    keys = Planner(tree, Policy(key_prefix="p:")).plan(_request("client", "plain")).keys

    assert keys == (
        b"p:rl:{d}/client=v:gcra:1",
        b"p:rl:{d}/client=v:fixed_window:86400",
        b"p:rl:{d}/client=v:penalty",
        b"p:rl:{d}/client=v:warning",
        b"p:rl:{d}/plain=v:fixed_window:60",
    )


def test_a_limit_that_the_request_brings_is_counted_where_its_domain_s_are() -> None:
    tree = compile_documents({"f.yaml": b"shard_by: domain" + RULES.encode()}).tree
    request = _request(_descriptor("any", limit=Override(5, Unit.HOUR)))

    assert Planner(tree, Policy()).plan(request).keys == (b"rl:{d}/any=v:fixed_window:3600",)


def test_a_planner_that_has_planned_goes_with_whoever_held_it() -> None:
    """The collector leaves old objects alone: held in a circle, the rules of every reload would stay for good."""
    planner = Planner(compile_documents({"rules.yaml": RULES.encode()}).tree, Policy())
    assert planner.plan(Request("d", (Descriptor((Entry("user", "a"),)),))).keys
    left = weakref.ref(planner)
    gc.disable()
    try:
        del planner
        assert left() is None
    finally:
        gc.enable()
