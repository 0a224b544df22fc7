from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import replace

import pytest

from ratelimit_rls.core import plan
from ratelimit_rls.core.model import (
    MAX_HITS,
    Charge,
    DerivedKey,
    Descriptor,
    Entry,
    LimitOverride,
    OnStoreFailure,
    Penalty,
    Plan,
    PlanTemplate,
    Purpose,
    Request,
    Unit,
    WarnAt,
)
from ratelimit_rls.core.plan import MAX_DESCRIPTORS, MAX_STATES, Planner, Policy, per_template
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


def _template(*descriptors: Descriptor | str, policy: Policy | None = None) -> PlanTemplate:
    return _plan(*descriptors, policy=policy).template


def test_plan_has_one_step_per_limit_and_one_part_per_descriptor() -> None:
    template, keys, _ = _plan("unnamed", "exempt", "user")

    assert keys == (b"rl:{d/unnamed=v}:fixed_window:86400", b"rl:{d/user=v}:fixed_window:60")
    assert [step.limit.requests_per_unit for step in template.steps] == [1, 5]
    assert [one.steps for one in template.descriptor_plans] == [template.steps[:1], (), template.steps[1:]]
    assert [descriptor_plan.metric_path for descriptor_plan in template.descriptor_plans] == ["d.unnamed", "", "d.user"]
    assert template.domain_known


def test_replaced_limit_is_not_counted_in_any_order() -> None:
    for order in (("user", "premium"), ("premium", "user")):
        template, keys, _ = _plan(*order)

        (step,) = template.steps
        assert step.limit.name == "premium"
        assert keys == (b"rl:{d/premium=v}:fixed_window:60",)
        assert [one.steps for one in template.descriptor_plans] == [() if key == "user" else (step,) for key in order]


def test_unlimited_rule_replaces_and_needs_no_store() -> None:
    template = _template("free", "user")

    assert template.steps == ()
    assert [descriptor_plan.unlimited for descriptor_plan in template.descriptor_plans] == [True, False]


def test_limits_that_replace_each_other_are_both_dropped() -> None:
    assert _template("left", "right").steps == ()


def test_unnamed_limit_cannot_be_replaced() -> None:
    assert len(_template("premium", "unnamed").steps) == 2


HITS = [
    # hits of the request, hits of the descriptor, hits counted
    (0, None, 1),
    (1, None, 1),
    (7, None, 7),
    (7, 0, 0),
    (7, 3, 3),
    (0, MAX_HITS, MAX_HITS),
]


@pytest.mark.parametrize(("request_hits", "descriptor_hits", "counted"), HITS)
def test_descriptor_hits_take_precedence_even_if_zero(
    request_hits: int, descriptor_hits: int | None, counted: int
) -> None:
    request = _request(_descriptor("user", hits=descriptor_hits), hits=request_hits)

    (step,) = Planner(TREE, Policy()).plan(request).template.steps

    assert step.cost == counted


def test_refund_has_negative_cost() -> None:
    template = _template(_descriptor("user", hits=3, is_refund=True))

    assert template.steps[0].cost == -3
    assert template.descriptor_plans[0].hits == 3


def test_step_has_modes_of_its_rule() -> None:
    quota, shadow = _template("quota", "shadow").steps

    assert (quota.quota_mode, quota.shadow_mode, quota.charge) == (True, False, Charge.ALWAYS)
    assert (shadow.quota_mode, shadow.shadow_mode, shadow.charge) == (False, True, Charge.ADMITTED)


def test_override_charge_comes_from_policy() -> None:
    override = _descriptor("free", limit=LimitOverride(9, Unit.WEEK))

    for charge in Charge:
        (step,) = _template(override, policy=Policy(override_charge=charge)).steps
        assert (step.limit.requests_per_unit, step.charge) == (9, charge)


QUOTA_PASSES = [
    (["user", "exempt"], True),
    (["unnamed", "free"], False),
    (["user", "unnamed"], False),
    (["premium", "user"], True),  # a replaced limit passes too
]


@pytest.mark.parametrize(("keys", "passes"), QUOTA_PASSES)
def test_global_quota_mode_descriptor_without_limit_passes(keys: list[str], passes: bool) -> None:
    template = _template(*keys, policy=Policy(quota_mode=True))

    assert template.quota_passes is passes
    assert all(step.quota_mode for step in template.steps)
    assert _template(*keys).quota_passes is False


def test_template_has_global_shadow_mode() -> None:
    assert _template("user", policy=Policy(shadow_mode=True)).shadow_mode
    assert not _template("user").shadow_mode


def test_every_key_has_the_prefix() -> None:
    assert _plan("user", policy=Policy(key_prefix="blue:")).keys == (b"blue:rl:{d/user=v}:fixed_window:60",)


def test_unknown_domain_differs_from_domain_without_limits() -> None:
    planner = Planner(TREE, Policy())

    assert not planner.plan(_request("user", domain="nope")).template.domain_known
    assert planner.plan(_request("exempt")).template.domain_known


OTHER_KINDS = {
    "another rule": _request("premium"),
    "one more descriptor": _request("user", "exempt"),
    "other hits": _request("user", hits=2),
    "hits of its own": _request(_descriptor("user", hits=1)),
    "a refund": _request(_descriptor("user", hits=1, is_refund=True)),
    "a limit of its own": _request(_descriptor("user", limit=LimitOverride(5, Unit.MINUTE))),
    "a smaller limit of its own": _request(_descriptor("user", limit=LimitOverride(4, Unit.MINUTE))),
    "another domain": _request("user", domain="nope"),
}


def test_descriptors_without_a_rule_share_one_plan() -> None:
    """A request with hundreds of them must not cost hundreds of objects, which the garbage collector traverses."""
    first, second = (_plan("other", "another").template.descriptor_plans for _ in range(2))
    assert len({id(descriptor_plan) for descriptor_plan in (*first, *second)}) == 1
    (heavier,) = _plan(_descriptor("other", hits=7)).template.descriptor_plans
    assert (heavier.rule, heavier.steps, heavier.hits) == (None, (), 7)


def test_requests_share_a_template_iff_rules_and_hits_are_equal() -> None:
    planner = Planner(TREE, Policy())
    alice, bob = (planner.plan(Request("d", (Descriptor((Entry("user", name),)),))) for name in ("alice", "bob"))

    others = [planner.plan(request).template for request in OTHER_KINDS.values()]

    assert alice.template is bob.template
    assert alice.keys != bob.keys
    assert len({alice.template, *others}) == len(others) + 1
    for request, template in zip(OTHER_KINDS.values(), others, strict=True):
        assert planner.plan(request).template is template


def _own_limits(number: int) -> Request:
    limit = LimitOverride(5, Unit.HOUR)
    return Request("d", tuple(Descriptor((Entry("k", f"{number}-{n}"),), limit) for n in range(MAX_DESCRIPTORS)))


MANY_KINDS = {
    "hits": lambda number: _request("user", hits=number),
    "limits in the request": _own_limits,
    "huge domains": lambda number: Request(f"{number}" + "x" * 1_000_000, (_descriptor("user"),)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("hits", 5_000), ("limits in the request", 6), ("huge domains", 6)])
def test_memory_of_planner_and_cached_plans_is_bounded(kind: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_TEMPLATE_CACHE_BYTES", 2**20)
    planner = Planner(TREE, Policy())
    remembered = per_template(lambda template: bytes(100 * len(template.descriptor_plans)))
    tracemalloc.start()
    try:
        for one in range(number):
            remembered(planner.plan(MANY_KINDS[kind](one)).template)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept_bytes < 2 * plan.MAX_TEMPLATE_CACHE_BYTES


def test_derived_values_are_kept_by_slot_and_not_copied() -> None:
    template = Planner(TREE, Policy()).plan(Request("d", (_descriptor("user"),))).template
    numbers: DerivedKey[int] = DerivedKey()
    names: DerivedKey[str] = DerivedKey()
    template.derived[numbers] = 7
    assert template.derived.get(numbers) == 7
    assert template.derived.get(names) is None
    assert replace(template).derived.get(numbers) is None


def test_per_template_derives_once_for_each_template() -> None:
    derived: list[PlanTemplate] = []

    @per_template
    def count(template: PlanTemplate) -> int:
        derived.append(template)
        return len(derived)

    planner = Planner(TREE, Policy())
    first, second = (planner.plan(Request("d", (_descriptor("user"),), hits)).template for hits in (1, 2))
    assert [count(first), count(second), count(first)] == [1, 2, 1]
    assert derived == [first, second]


INVALID_REQUESTS = {
    "no domain": (Request("", (_descriptor("user"),)), "rate limit domain must not be empty"),
    "no domain and no descriptors": (Request("", ()), "rate limit domain must not be empty"),
    "no descriptors": (Request("d", ()), "rate limit descriptor list must not be empty"),
    "too many descriptors": (Request("d", (_descriptor("user"),) * (MAX_DESCRIPTORS + 1)), "at most 1024"),
    "too many hits": (Request("d", (_descriptor("user", hits=MAX_HITS + 1),)), "descriptor 0: hits_addend 4294967296"),
    "unknown unit": (
        Request("d", (_descriptor("user"), _descriptor("user", limit=LimitOverride(1, Unit.UNKNOWN)))),
        "descriptor 1: the limit's unit is unknown; use SECOND",
    ),
}


@pytest.mark.parametrize(("request_", "sentence"), INVALID_REQUESTS.values(), ids=INVALID_REQUESTS.keys())
def test_invalid_request_is_rejected(request_: Request, sentence: str) -> None:
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


def test_watcher_keys_follow_limit_keys() -> None:
    template, keys, _ = _watched("client", "plain")
    assert keys == (
        b"rl:{d/client=v}:gcra:1",
        b"rl:{d/client=v}:fixed_window:86400",
        b"rl:{d/client=v}:penalty",
        b"rl:{d/client=v}:warning",
        b"rl:{d/plain=v}:fixed_window:60",
    )
    assert [len(descriptor_plan.steps) for descriptor_plan in template.descriptor_plans] == [2, 1]
    assert template.descriptor_plans[0].watchers == (Penalty(3_600_000_000, 2, (1, 3)), WarnAt(800))


def test_only_buckets_can_be_delayed() -> None:
    template = _watched("queue").template
    assert [step.max_delay_us for step in template.steps] == [250_000, 0]
    assert template.can_wait
    assert not _watched("client").template.can_wait


@pytest.mark.parametrize(
    "policy", [Policy(shadow_mode=True), Policy(quota_mode=True)], ids=["global shadow mode", "global quota mode"]
)
def test_no_delay_or_penalty_if_denials_are_not_enforced(policy: Policy) -> None:
    assert not _watched("queue", policy=policy).template.can_wait
    assert _watched("client", policy=policy).template.descriptor_plans[0].watchers == (WarnAt(800),)


def test_look_costs_nothing_and_report_is_always_charged() -> None:
    (look,) = _watched("plain", purpose=Purpose.LOOK).template.steps
    assert (look.cost, look.charge) == (0, Charge.ADMITTED)
    (report,) = _watched("plain", purpose=Purpose.REPORT).template.steps
    assert (report.cost, report.charge) == (1, Charge.ALWAYS)
    reported = _watched("client", "queue", purpose=Purpose.REPORT).template
    assert reported.descriptor_plans[0].watchers == (WarnAt(800),)
    assert not reported.can_wait


def test_requests_with_different_purposes_have_different_templates() -> None:
    planner = Planner(WATCHED_TREE, Policy())
    templates = {id(planner.plan(_request("plain")._replace(purpose=purpose)).template) for purpose in Purpose}
    assert len(templates) == len(Purpose)


def test_too_many_limits_are_rejected() -> None:
    limits = "\n".join(f"      - {{unit: second, unit_multiplier: {n}, requests_per_unit: 5}}" for n in range(1, 9))
    rules = f"domain: d\ndescriptors:\n  - key: many\n    warn_at: 0.5\n    limits:\n{limits}\n"
    planner = Planner(compile_documents({"f.yaml": rules.encode()}).tree, Policy())

    def request(descriptors: int) -> Request:
        return Request("d", tuple(Descriptor((Entry("many", str(n)),)) for n in range(descriptors)))

    assert len(planner.plan(request(MAX_STATES // 9)).keys) == MAX_STATES // 9 * 9
    with pytest.raises(BadRequest, match=r"matches 1026 limits; at most 1024"):
        planner.plan(request(MAX_STATES // 9 + 1))


@pytest.mark.parametrize("hits", [100, 5_000])
def test_template_with_unusual_hits_has_own_bytes(hits: int) -> None:
    assert _template_for_hits(hits).own_bytes > 1_000
    assert _template_for_hits(1).own_bytes == _template_for_hits(plan.MAX_SHARED_HITS).own_bytes == 0


def _template_for_hits(hits: int) -> PlanTemplate:
    return Planner(TREE, Policy()).plan(_request("user", hits=hits)).template


def test_estimated_template_size_is_accurate() -> None:
    """Measures a rule with many options, in the planner alone: transports and stores keep about as much again."""
    planner = Planner(WATCHED_TREE, Policy())
    planner.plan(Request("d", (_descriptor("client"), _descriptor("queue")), 2_000))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    templates = [
        planner.plan(Request("d", (_descriptor("client"), _descriptor("queue")), hits)).template
        for hits in range(100, 400)
    ]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < sum(template.own_bytes for template in templates)


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
    return Planner(FAILING_TREE, policy or Policy()).plan(request).template.on_store_failure


PRECEDENCE = [
    (["allow"], ALLOW),
    (["allow", "local"], LOCAL),
    (["local", "error", "allow"], ERROR),
    (["allow", "local", "error", "deny"], DENY),
    (["deny", "allow"], DENY),
    (["allow", "exempt", "unknown"], ALLOW),  # descriptors without counters are ignored
    (["instead", "deny", "silent"], LOCAL),  # and so are replaced ones
    (["trial"], ALLOW),
    (["trial", "local"], LOCAL),
    (["trial", "deny"], DENY),
    (["trial_error"], ERROR),
    (["quota"], DENY),
]


@pytest.mark.parametrize(("keys", "expected"), PRECEDENCE)
def test_strictest_on_store_failure_wins(keys: list[str], expected: OnStoreFailure) -> None:
    assert _on_failure(*keys) is _on_failure(*reversed(keys)) is expected


@pytest.mark.parametrize("set_to", OnStoreFailure)
def test_on_store_failure_defaults_to_policy(set_to: OnStoreFailure) -> None:
    policy = Policy(on_store_failure=set_to)

    assert _on_failure("silent", policy=policy) is set_to
    assert _on_failure("allow", "silent", policy=policy) is set_to
    assert _on_failure("silent", "deny", policy=policy) is DENY
    assert _on_failure("allow", policy=policy) is ALLOW


def test_on_store_failure_default_is_error() -> None:
    assert _on_failure("silent") is ERROR


@pytest.mark.parametrize("policy", [Policy(shadow_mode=True), Policy(shadow_mode=True, on_store_failure=DENY)])
def test_global_shadow_mode_allows_without_store(policy: Policy) -> None:
    assert _on_failure("deny", policy=policy) is ALLOW
    assert _on_failure("deny", "local", policy=policy) is LOCAL
    assert _on_failure("error", policy=policy) is ERROR


def test_global_quota_mode_keeps_on_store_failure() -> None:
    assert _on_failure("deny", "allow", policy=Policy(quota_mode=True)) is DENY


def test_reports_and_refunds_are_allowed_without_store() -> None:
    assert _on_failure("deny", purpose=Purpose.REPORT) is ALLOW
    assert _on_failure("error", "deny", purpose=Purpose.REPORT) is ERROR
    assert _on_failure("deny", purpose=Purpose.LOOK) is DENY
    refund = _request(_descriptor("deny", hits=2, is_refund=True))
    assert Planner(FAILING_TREE, Policy()).plan(refund).template.on_store_failure is ALLOW
    mixed = _request(_descriptor("deny", hits=2, is_refund=True), _descriptor("deny"))
    assert Planner(FAILING_TREE, Policy()).plan(mixed).template.on_store_failure is DENY


def test_shard_by_domain_puts_all_keys_on_one_slot() -> None:
    tree = compile_documents({"f.yaml": b"shard_by: domain" + WATCHED.encode()}).tree

    keys = Planner(tree, Policy(key_prefix="p:")).plan(_request("client", "plain")).keys

    assert keys == (
        b"p:rl:{d}/client=v:gcra:1",
        b"p:rl:{d}/client=v:fixed_window:86400",
        b"p:rl:{d}/client=v:penalty",
        b"p:rl:{d}/client=v:warning",
        b"p:rl:{d}/plain=v:fixed_window:60",
    )


def test_shard_by_key_puts_all_keys_of_a_tenant_on_one_slot() -> None:
    """The entry may have any position. A descriptor without it keeps its own slot."""
    rules = b"""
domain: d
shard_by: {key: org}
descriptors:
  - key: org
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: plan
    descriptors:
      - key: org
        rate_limit: {unit: minute, requests_per_unit: 5}
        descriptors:
          - key: user
            rate_limit: {unit: minute, requests_per_unit: 5}
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 5}
"""
    tree = compile_documents({"f.yaml": rules}).tree
    org, plan, user = Entry("org", "acme"), Entry("plan", "free"), Entry("user", "a")
    descriptors = [(org,), (plan, org), (plan, org, user), (user,)]

    request = Request("d", tuple(map(Descriptor, descriptors)))
    keys = Planner(tree, Policy(key_prefix="p:")).plan(request).keys

    assert keys == (
        b"p:rl:{d/org=acme}/:fixed_window:60",
        b"p:rl:{d/org=acme}/plan=free/:fixed_window:60",
        b"p:rl:{d/org=acme}/plan=free//user=a:fixed_window:60",
        b"p:rl:{d/user=a}:fixed_window:60",
    )
    for alone, key in zip(descriptors, keys, strict=True):
        assert Planner(tree, Policy(key_prefix="p:")).plan(Request("d", (Descriptor(alone),))).keys == (key,)


def test_override_is_sharded_as_its_domain() -> None:
    tree = compile_documents({"f.yaml": b"shard_by: domain" + RULES.encode()}).tree
    request = _request(_descriptor("any", limit=LimitOverride(5, Unit.HOUR)))

    assert Planner(tree, Policy()).plan(request).keys == (b"rl:{d}/any=v:fixed_window:3600",)


def test_planner_is_freed_without_garbage_collection() -> None:
    """The garbage collector ignores old objects: in a reference cycle, the rules of every reload would be leaked."""
    planner = Planner(compile_documents({"rules.yaml": RULES.encode()}).tree, Policy())
    assert planner.plan(Request("d", (Descriptor((Entry("user", "a"),)),))).keys
    left = weakref.ref(planner)
    gc.disable()
    try:
        del planner
        assert left() is None
    finally:
        gc.enable()
