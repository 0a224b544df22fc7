"""Compilation of `hot`, and its conflicts with other keys."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Charge, LeasePolicy, Rule
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 5}"


def rules(written: str, domain_keys: str = "") -> list[Rule]:
    text = f"domain: d\n{domain_keys}\ndescriptors:\n- key: k\n  {written}"
    return compile_documents({"f": text.encode()}).tree.rules()


LEASES = {"1ms": 1_000, "100ms": 100_000, "1.5s": 1_500_000, "10s": 10_000_000}


@pytest.mark.parametrize("lease", LEASES)
def test_lease_bounds_are_1ms_and_10s(lease: str) -> None:
    (rule,) = rules(f"hot: {{lease: {lease}}}\n  {LIMIT}")

    assert rule.hot == LeasePolicy(LEASES[lease])


@pytest.mark.parametrize("domain_keys", ["", "charge: admitted"])
def test_hot_rule_charges_admitted_calls_only(domain_keys: str) -> None:
    (rule,) = rules(f"hot: {{lease: 1s}}\n  {LIMIT}", domain_keys)

    assert rule.charge is Charge.ADMITTED


def test_hot_rule_may_override_domain_charge_always() -> None:
    (rule,) = rules(f"hot: {{lease: 1s}}\n  charge: admitted\n  {LIMIT}", "charge: always")

    assert rule.hot == LeasePolicy(1_000_000)


def test_hot_is_not_inherited() -> None:
    above, below = rules(f"hot: {{lease: 1s}}\n  {LIMIT}\n  descriptors: [{{key: b, {LIMIT}}}]")

    assert (above.path, above.hot, below.hot) == ("d.k", LeasePolicy(1_000_000), None)
    assert below.charge is Charge.ALWAYS


@pytest.mark.parametrize("beside", ["shadow_mode: false", "quota_mode: false", "action: reject", "charge: admitted"])
def test_hot_allows_disabled_conflicting_keys(beside: str) -> None:
    (rule,) = rules(f"hot: {{lease: 1s}}\n  {beside}\n  {LIMIT}")

    assert rule.hot == LeasePolicy(1_000_000)


# The limits: the longest valid lease.
WINDOWS = {
    "rate_limit: {unit: second, requests_per_unit: 5}": "500ms",
    "rate_limit: {unit: second, unit_multiplier: 3, requests_per_unit: 5, algorithm: gcra}": "1500ms",
    "limits: [{unit: minute, requests_per_unit: 5}, {unit: second, unit_multiplier: 2, requests_per_unit: 5}]": "1s",
    "rate_limit: {unit: day, requests_per_unit: 5, calendar: true}": "10s",
}


@pytest.mark.parametrize("limits", WINDOWS)
def test_lease_is_at_most_half_of_the_shortest_window(limits: str) -> None:
    longest = WINDOWS[limits]
    (rule,) = rules(f"hot: {{lease: {longest}}}\n  {limits}")
    assert rule.hot is not None

    if rule.hot.lease_us < 10_000_000:
        with pytest.raises(RulesError, match=rf"5:16: error: lease: .* is more than half of .* at most {longest}, or"):
            rules(f"hot: {{lease: {rule.hot.lease_us + 1}us}}\n  {limits}")
