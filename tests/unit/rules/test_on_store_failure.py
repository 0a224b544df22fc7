"""Compilation and inheritance of `on_store_failure`."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import Charge, Descriptor, Entry, LimitOverride, OnStoreFailure, Request, Unit
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents

NESTED = """
domain: d
{domain_keys}
descriptors:
  - key: alone
    rate_limit: {{unit: day, requests_per_unit: 1}}
  - key: own
    on_store_failure: deny
    rate_limit: {{unit: day, requests_per_unit: 1}}
  - key: above
    on_store_failure: allow
    descriptors:
      - key: below
        rate_limit: {{unit: day, requests_per_unit: 1}}
        descriptors:
          - key: deeper
            rate_limit: {{unit: day, requests_per_unit: 1}}
      - key: otherwise
        on_store_failure: error
        rate_limit: {{unit: day, requests_per_unit: 1}}
      - key: free
        rate_limit: {{unlimited: true}}
  - key: "off"
    enabled: false
    on_store_failure: deny
    rate_limit: {{unit: day, requests_per_unit: 1}}
    descriptors:
      - key: "on"
        rate_limit: {{unit: day, requests_per_unit: 1}}
"""


def policies(domain_keys: str = "") -> dict[str, OnStoreFailure | None]:
    tree = compile_documents({"f": NESTED.format(domain_keys=domain_keys).encode()}).tree
    return {rule.path: rule.on_store_failure for rule in tree.rules()}


INHERITED = {
    "d.own": OnStoreFailure.DENY,
    "d.above.below": OnStoreFailure.ALLOW,
    "d.above.below.deeper": OnStoreFailure.ALLOW,
    "d.above.otherwise": OnStoreFailure.ERROR,
    "d.above.free": None,  # the store is not used
    "d.off.on": OnStoreFailure.DENY,
}


def test_descriptor_policy_applies_to_everything_below() -> None:
    assert policies() == {**INHERITED, "d.alone": None}


@pytest.mark.parametrize("policy", OnStoreFailure)
def test_domain_policy_is_the_default_for_its_rules(policy: OnStoreFailure) -> None:
    assert policies(f"on_store_failure: {policy.value}") == {**INHERITED, "d.alone": policy}


def tree(text: str) -> Tree:
    return compile_documents({"f": text.encode()}).tree


def test_limit_from_the_request_uses_the_domain_policy() -> None:
    rules = tree("domain: d\non_store_failure: local\ndescriptors: [{key: k, on_store_failure: deny, descriptors: []}]")
    descriptor = Descriptor((Entry("k", "v"),), LimitOverride(7, Unit.HOUR))

    (found,) = match(rules, Request("d", (descriptor,)))

    assert found.rule is not None
    assert found.rule.on_store_failure is OnStoreFailure.LOCAL


def test_on_store_failure_does_not_change_the_charge() -> None:
    limit = "rate_limit: {unit: day, requests_per_unit: 1}"
    (rule,) = tree(f"domain: d\ndescriptors: [{{key: k, on_store_failure: deny, {limit}}}]").rules()

    assert rule.charge is Charge.ALWAYS


def test_policy_of_one_file_applies_to_all_and_may_be_repeated() -> None:
    limit = "rate_limit: {unit: day, requests_per_unit: 1}"
    files = {
        "a.yaml": f"domain: d\ndescriptors: [{{key: a, {limit}}}]".encode(),
        "b.yaml": b"domain: d\non_store_failure: local",
        "c.yaml": b"domain: d\non_store_failure: local",
    }

    (rule,) = compile_documents(files, merge_domains=True).tree.rules()

    assert rule.on_store_failure is OnStoreFailure.LOCAL


def test_conflicting_domain_policies_are_an_error() -> None:
    files = {"a.yaml": b"domain: d\non_store_failure: local", "b.yaml": b"domain: d\non_store_failure: deny"}

    with pytest.raises(RulesError, match=r"b\.yaml:2:19: .*different on_store_failure at a\.yaml:2:19.*rule may have"):
        compile_documents(files, merge_domains=True)
