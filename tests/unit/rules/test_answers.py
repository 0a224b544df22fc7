"""Compilation of `penalty`, `warn_at`, `answer`, `deny` and `ext_authz`, and precedence of rule over domain."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import Charge, Descriptor, Entry, LimitOverride, Penalty, Request, Rule, Unit, WarnAt
from ratelimit_rls.core.response_policy import (
    DEFAULT_RESPONSE_POLICY,
    BodyFormat,
    DenyResponse,
    HeaderFamily,
    ResponsePolicy,
)
from ratelimit_rls.core.template import Placeholder, Template
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.rules.compile import compile_documents

HOUR_US = 3_600_000_000


def tree(written: str = "", domain_keys: str = "") -> Tree:
    limit = "rate_limit: {unit: minute, requests_per_unit: 5}"
    text = f"domain: d\n{domain_keys}\ndescriptors:\n- key: k\n  {limit}\n  {written}\n"
    return compile_documents({"f": text.encode()}).tree


def rule(written: str = "", domain_keys: str = "") -> Rule:
    (found,) = tree(written, domain_keys).rules()
    return found


def test_rule_without_extensions_has_the_defaults() -> None:
    found = rule()

    assert (found.penalty, found.warn_at, found.response_policy, found.deny) == (
        None,
        None,
        DEFAULT_RESPONSE_POLICY,
        None,
    )


PENALTIES = {
    "{}": Penalty(HOUR_US, 3, (1, 2, 4, 8)),
    "{within: 1s, after: 1, multipliers: [10000]}": Penalty(1_000_000, 1, (10_000,)),
    "{within: 720h, after: 984, multipliers: [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]}": Penalty(
        720 * HOUR_US, 984, (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8)
    ),
}


@pytest.mark.parametrize("written", PENALTIES)
def test_penalty_accepts_values_up_to_the_bounds(written: str) -> None:
    assert rule(f"penalty: {written}").penalty == PENALTIES[written]


@pytest.mark.parametrize(("written", "permille"), [("0.8", 800), ("0.101", 101), (".999", 999), ("5e-1", 500)])
def test_warn_at_is_a_fraction_of_the_limit(written: str, permille: int) -> None:
    assert rule(f"warn_at: {written}").warn_at == WarnAt(permille)


WHO_PAYS = {
    "penalty: {}": Charge.ADMITTED,
    "warn_at: 0.8": Charge.ALWAYS,
    "answer: {headers: [ietf]}": Charge.ALWAYS,
    "deny: {format: json}": Charge.ALWAYS,
}


@pytest.mark.parametrize("written", WHO_PAYS)
def test_penalty_changes_the_default_charge_and_answer_does_not(written: str) -> None:
    assert rule(written).charge is WHO_PAYS[written]
    assert rule(written, "charge: always").charge is Charge.ALWAYS


STYLES = {
    "{}": DEFAULT_RESPONSE_POLICY,
    "{headers: []}": ResponsePolicy(()),
    "{headers: [rule, ietf]}": ResponsePolicy((HeaderFamily.RULE, HeaderFamily.IETF)),
    "{retry_jitter: 1h}": ResponsePolicy(None, HOUR_US),
}


@pytest.mark.parametrize("written", STYLES)
def test_rule_answer_overrides_the_domain_answer(written: str) -> None:
    assert rule(f"answer: {written}").response_policy == STYLES[written]
    assert rule(domain_keys=f"answer: {written}").response_policy == STYLES[written]
    assert (
        rule(f"answer: {written}", "answer: {headers: [retry-after], retry_jitter: 9s}").response_policy
        == STYLES[written]
    )


DENIALS = {
    "{}": DenyResponse(),
    "{format: problem+json, status: 599}": DenyResponse(BodyFormat.PROBLEM, status=599),
    "{format: json, headers: {X-Plan: a, x-when: 'at ${reset_at}'}}": DenyResponse(
        BodyFormat.JSON, headers=(("X-Plan", Template(("a",))), ("x-when", Template(("at ", Placeholder.RESET_AT))))
    ),
    "{body: ''}": DenyResponse(BodyFormat.TEXT, Template(()), "text/plain; charset=utf-8"),
    '{body: "a\\n${rule}", content_type: \'text/html; charset="utf-8"; x=y\', status: 400}': DenyResponse(
        BodyFormat.TEXT, Template(("a\n", Placeholder.RULE)), 'text/html; charset="utf-8"; x=y', status=400
    ),
}


@pytest.mark.parametrize("written", DENIALS)
def test_rule_deny_replaces_the_domain_deny_as_a_whole(written: str) -> None:
    assert rule(f"deny: {written}").deny == DENIALS[written]
    assert rule(domain_keys=f"deny: {written}").deny == DENIALS[written]
    assert rule(f"deny: {written}", "deny: {body: sorry, headers: {x-a: b}, status: 503}").deny == DENIALS[written]


def test_limit_from_the_request_uses_the_domain_answer() -> None:
    rules = tree("answer: {headers: []}\n  deny: {format: json}", "answer: {headers: [ietf]}\ndeny: {status: 503}")
    descriptor = Descriptor((Entry("k", "v"),), LimitOverride(7, Unit.HOUR))

    (found,) = match(rules, Request("d", (descriptor,)))

    assert found.rule is not None
    assert found.rule.response_policy == ResponsePolicy((HeaderFamily.IETF,))
    assert found.rule.deny == DenyResponse(status=503)


def test_domain_setting_of_one_file_applies_to_all_its_files() -> None:
    files = {
        "a.yaml": b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}]",
        "b.yaml": b"domain: d\nanswer: {headers: [rule]}\ndeny: {format: json}",
    }

    (found,) = compile_documents(files, merge_domains=True).tree.rules()

    assert (found.response_policy, found.deny) == (ResponsePolicy((HeaderFamily.RULE,)), DenyResponse(BodyFormat.JSON))


def test_merge_key_replaces_a_block_as_a_whole() -> None:
    text = """
domain: d
descriptors:
  - &base
    key: a
    rate_limit: {unit: day, requests_per_unit: 1}
    deny: {format: json, status: 503}
  - <<: *base
    key: b
    deny: {headers: {x-a: b}}
"""
    _, second = compile_documents({"f": text.encode()}).tree.rules()

    assert second.deny == DenyResponse(headers=(("x-a", Template(("b",))),))


def test_ext_authz_mapping_belongs_to_its_domain() -> None:
    files = {
        "a.yaml": b"domain: a\next_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}",
        "b.yaml": b"domain: b",
    }

    mappings = compile_documents(files).tree.mappings

    assert mappings.keys() == {"a"}
    assert [entry.key for entry in mappings["a"].descriptors[0].entries] == ["user"]
