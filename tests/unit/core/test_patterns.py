"""Networks, prefixes and regular expressions: which values they match, and their order."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.match import match_descriptor
from ratelimit_rls.core.model import Descriptor, Entry
from ratelimit_rls.rules.compile import compile_documents

RULES = """
domain: d
descriptors:
  - {key: ip, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: ip, match: {regex: "10[.].*"}, rate_limit: {unit: day, requests_per_unit: 2}}
  - {key: ip, match: {prefix: "10.1"}, rate_limit: {unit: day, requests_per_unit: 3}}
  - {key: ip, match: {prefix: "10.1."}, rate_limit: {unit: day, requests_per_unit: 4}}
  - {key: ip, match: {cidr: 10.1.0.0/16}, rate_limit: {unit: day, requests_per_unit: 5}}
  - {key: ip, match: {cidr: 10.1.2.0/24}, rate_limit: {unit: day, requests_per_unit: 6}}
  - {key: ip, match: {cidr: "2001:db8::/32"}, rate_limit: {unit: day, requests_per_unit: 7}}
  - {key: ip, value: "10.1.2.9*", rate_limit: {unit: day, requests_per_unit: 8}}
  - {key: ip, value: 10.1.2.90, rate_limit: {unit: day, requests_per_unit: 9}}
  - {key: office, match: {cidr: 192.168.0.0/16}, share_threshold: true, rate_limit: {unit: day, requests_per_unit: 10}}
  - {key: path, match: {regex: "/v[0-9]+/(a|b)"}, rate_limit: {unit: day, requests_per_unit: 11}}
  - {key: path, match: {regex: "/v1/.*"}, rate_limit: {unit: day, requests_per_unit: 12}}
"""
ROOT = compile_documents({"f": RULES.encode()}).tree.domains["d"]


@pytest.mark.parametrize(
    ("key", "value", "requests_per_unit"),
    [
        ("ip", "10.1.2.90", 9),  # exact before wildcard
        ("ip", "10.1.2.91", 8),  # wildcard before cidr
        ("ip", "10.1.2.3", 6),  # the longer network first
        ("ip", "10.1.3.3", 5),
        ("ip", "::ffff:10.1.3.3", 5),  # IPv4-mapped IPv6
        ("ip", "10.1.999", 4),  # not an address: the longer prefix
        ("ip", "10.199.0.0", 3),
        ("ip", "10.200.0.1", 2),  # neither network nor prefix matches: the expression
        ("ip", "2001:DB8:0:0::1", 7),  # another spelling
        ("ip", "fe80::1%eth0", 1),  # nothing else matches: the key alone
        ("ip", "x10.1.2.3", 1),  # expressions are anchored at both ends
        ("path", "/v1/a", 11),  # the first expression in the file
        ("path", "/v1/c", 12),
        ("path", "/v2/c", None),
    ],
)
def test_most_specific_pattern_matches_first(key: str, value: str, requests_per_unit: int | None) -> None:
    rule = match_descriptor(ROOT, Descriptor((Entry(key, value),))).rule

    assert (rule.limits[0].requests_per_unit if rule else None) == requests_per_unit


def test_values_share_a_counter_only_with_share_threshold() -> None:
    alone = match_descriptor(ROOT, Descriptor((Entry("ip", "10.1.3.3"),)))
    shared = match_descriptor(ROOT, Descriptor((Entry("office", "192.168.7.7"),)))

    assert alone.entries == (Entry("ip", "10.1.3.3"),)
    assert shared.entries == (Entry("office", "cidr(192.168.0.0/16)"),)
    assert shared.metric_path == "d.office_cidr(192.168.0.0/16)"


@pytest.mark.parametrize(
    ("network", "value", "is_match"),
    [
        ("::ffff:10.0.0.0/104", "10.1.2.3", True),
        ("::ffff:10.0.0.0/104", "::ffff:10.1.2.3", True),
        ("::FFFF:a00:0/104", "10.1.2.3", True),
        ("::ffff:10.0.0.0/104", "11.1.2.3", False),
        ("::ffff:10.1.2.3", "10.1.2.3", True),
        ("::ffff:0:0/96", "192.0.2.1", True),  # all of IPv4
        ("::ffff:0:0/96", "2001:db8::1", False),
        ("::fffe:0:0/95", "192.0.2.1", False),  # not only IPv4-mapped addresses, so it stays IPv6
        ("::/0", "192.0.2.1", False),
        ("::fffe:a00:0/104", "10.1.2.3", False),
    ],
)
def test_ipv4_mapped_network_matches_ipv4(network: str, value: str, is_match: bool) -> None:
    limit = "rate_limit: {unit: day, requests_per_unit: 1}"
    rules = f"domain: d\ndescriptors: [{{key: ip, match: {{cidr: '{network}'}}, {limit}}}]"
    root = compile_documents({"f": rules.encode()}).tree.domains["d"]

    rule = match_descriptor(root, Descriptor((Entry("ip", value),))).rule

    assert (rule is not None) == is_match
    assert [node.label for node in root.patterns["ip"]] == [f"ip_cidr({network})"]  # shown as written


def test_longer_network_is_first_even_if_ipv4_mapped() -> None:
    rules = """
    domain: d
    descriptors:
      - {key: ip, match: {cidr: "::ffff:10.0.0.0/104"}, rate_limit: {unit: day, requests_per_unit: 8}}
      - {key: ip, match: {cidr: 10.1.0.0/16}, rate_limit: {unit: day, requests_per_unit: 16}}
    """
    root = compile_documents({"f": rules.encode()}).tree.domains["d"]

    rule = match_descriptor(root, Descriptor((Entry("ip", "10.1.2.3"),))).rule

    assert rule is not None
    assert rule.limits[0].requests_per_unit == 16


def test_regex_matches_hostile_value_in_linear_time() -> None:
    rules = (
        "domain: d\ndescriptors: [{key: k, match: {regex: '(a*)*b'}, rate_limit: {unit: day, requests_per_unit: 1}}]"
    )
    root = compile_documents({"f": rules.encode()}).tree.domains["d"]

    # Exponential time in a backtracking engine.
    assert match_descriptor(root, Descriptor((Entry("k", "a" * 100_000),))).rule is None
