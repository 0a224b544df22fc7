"""`on_store_failure`: what it compiles to, and for whom it holds."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import Charge, Descriptor, Entry, OnStoreFailure, Override, Request, Unit
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents

NESTED = """
domain: d
{of_domain}
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


def said(of_domain: str = "") -> dict[str, OnStoreFailure | None]:
    tree = compile_documents({"f": NESTED.format(of_domain=of_domain).encode()}).tree
    return {rule.path: rule.on_store_failure for rule in tree.rules()}


HANDED_DOWN = {
    "d.own": OnStoreFailure.DENY,
    "d.above.below": OnStoreFailure.ALLOW,
    "d.above.below.deeper": OnStoreFailure.ALLOW,
    "d.above.otherwise": OnStoreFailure.ERROR,
    "d.above.free": None,  # the store is not asked
    "d.off.on": OnStoreFailure.DENY,
}


def test_a_descriptor_says_it_for_itself_and_everything_below() -> None:
    assert said() == {**HANDED_DOWN, "d.alone": None}


@pytest.mark.parametrize("policy", OnStoreFailure)
def test_a_domain_says_it_for_all_that_do_not(policy: OnStoreFailure) -> None:
    assert said(f"on_store_failure: {policy.value}") == {**HANDED_DOWN, "d.alone": policy}


def tree(text: str) -> Tree:
    return compile_documents({"f": text.encode()}).tree


def test_a_limit_that_the_request_brings_is_the_domain_s() -> None:
    rules = tree("domain: d\non_store_failure: local\ndescriptors: [{key: k, on_store_failure: deny, descriptors: []}]")
    descriptor = Descriptor((Entry("k", "v"),), Override(7, Unit.HOUR))

    (found,) = match(rules, Request("d", (descriptor,)))

    assert found.rule is not None
    assert found.rule.on_store_failure is OnStoreFailure.LOCAL


def test_who_pays_is_not_changed() -> None:
    limit = "rate_limit: {unit: day, requests_per_unit: 1}"
    (rule,) = tree(f"domain: d\ndescriptors: [{{key: k, on_store_failure: deny, {limit}}}]").rules()

    assert rule.charge is Charge.ALWAYS


def test_what_one_file_says_of_a_domain_counts_for_all_its_files_and_may_be_repeated() -> None:
    limit = "rate_limit: {unit: day, requests_per_unit: 1}"
    files = {
        "a.yaml": f"domain: d\ndescriptors: [{{key: a, {limit}}}]".encode(),
        "b.yaml": b"domain: d\non_store_failure: local",
        "c.yaml": b"domain: d\non_store_failure: local",
    }

    (rule,) = compile_documents(files, merge_domains=True).tree.rules()

    assert rule.on_store_failure is OnStoreFailure.LOCAL


def test_a_domain_has_one() -> None:
    files = {"a.yaml": b"domain: d\non_store_failure: local", "b.yaml": b"domain: d\non_store_failure: deny"}

    with pytest.raises(RulesError, match=r"b\.yaml:2:19: .*another on_store_failure at a\.yaml:2:19.*rule may have"):
        compile_documents(files, merge_domains=True)
