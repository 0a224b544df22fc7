"""`hot`: what it compiles to, and what it does not go with."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Charge, Hot, Rule
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 5}"


def rules(written: str, of_domain: str = "") -> list[Rule]:
    text = f"domain: d\n{of_domain}\ndescriptors:\n- key: k\n  {written}"
    return compile_documents({"f": text.encode()}).tree.rules()


LEASES = {"1ms": 1_000, "100ms": 100_000, "1.5s": 1_500_000, "10s": 10_000_000}


@pytest.mark.parametrize("lease", LEASES)
def test_a_lease_is_from_a_millisecond_to_ten_seconds(lease: str) -> None:
    (rule,) = rules(f"hot: {{lease: {lease}}}\n  {LIMIT}")

    assert rule.hot == Hot(LEASES[lease])


@pytest.mark.parametrize("of_domain", ["", "charge: admitted"])
def test_only_who_is_admitted_pays(of_domain: str) -> None:
    (rule,) = rules(f"hot: {{lease: 1s}}\n  {LIMIT}", of_domain)

    assert rule.charge is Charge.ADMITTED


def test_in_a_domain_that_charges_always_the_rule_says_that_it_does_not() -> None:
    (rule,) = rules(f"hot: {{lease: 1s}}\n  charge: admitted\n  {LIMIT}", "charge: always")

    assert rule.hot == Hot(1_000_000)


def test_it_counts_for_its_own_descriptor_alone() -> None:
    above, below = rules(f"hot: {{lease: 1s}}\n  {LIMIT}\n  descriptors: [{{key: b, {LIMIT}}}]")

    assert (above.path, above.hot, below.hot) == ("d.k", Hot(1_000_000), None)
    assert below.charge is Charge.ALWAYS


@pytest.mark.parametrize("beside", ["shadow_mode: false", "quota_mode: false", "action: reject", "charge: admitted"])
def test_what_is_off_may_stand_beside_it(beside: str) -> None:
    (rule,) = rules(f"hot: {{lease: 1s}}\n  {beside}\n  {LIMIT}")

    assert rule.hot == Hot(1_000_000)


# The limit, the longest lease.
WINDOWS = {
    "rate_limit: {unit: second, requests_per_unit: 5}": "500ms",
    "rate_limit: {unit: second, unit_multiplier: 3, requests_per_unit: 5, algorithm: gcra}": "1500ms",
    "limits: [{unit: minute, requests_per_unit: 5}, {unit: second, unit_multiplier: 2, requests_per_unit: 5}]": "1s",
    "rate_limit: {unit: day, requests_per_unit: 5, calendar: true}": "10s",
}


@pytest.mark.parametrize("limits", WINDOWS)
def test_a_lease_is_at_most_half_of_the_shortest_window(limits: str) -> None:
    longest = WINDOWS[limits]
    (rule,) = rules(f"hot: {{lease: {longest}}}\n  {limits}")
    assert rule.hot is not None

    if rule.hot.lease_us < 10_000_000:
        with pytest.raises(RulesError, match=rf"5:16: error: lease: .* is more than half of .* at most {longest}, or"):
            rules(f"hot: {{lease: {rule.hot.lease_us + 1}us}}\n  {limits}")
