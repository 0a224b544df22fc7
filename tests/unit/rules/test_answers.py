"""`penalty`, `warn_at`, `answer`, `deny`, `ext_authz`: what they compile to, and whose counts."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import Charge, Descriptor, Entry, Override, Penalty, Request, Rule, Unit, WarnAt
from ratelimit_rls.core.style import PLAIN, AnswerStyle, BodyFormat, Deny, Family
from ratelimit_rls.core.template import Hole, Template
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.rules.compile import compile_documents

HOUR_US = 3_600_000_000


def tree(written: str = "", of_domain: str = "") -> Tree:
    limit = "rate_limit: {unit: minute, requests_per_unit: 5}"
    text = f"domain: d\n{of_domain}\ndescriptors:\n- key: k\n  {limit}\n  {written}\n"
    return compile_documents({"f": text.encode()}).tree


def rule(written: str = "", of_domain: str = "") -> Rule:
    (found,) = tree(written, of_domain).rules()
    return found


def test_without_any_of_them_a_rule_is_as_ever() -> None:
    found = rule()

    assert (found.penalty, found.warn_at, found.style, found.deny) == (None, None, PLAIN, None)


PENALTIES = {
    "{}": Penalty(HOUR_US, 3, (1, 2, 4, 8)),
    "{within: 1s, after: 1, multipliers: [10000]}": Penalty(1_000_000, 1, (10_000,)),
    "{within: 720h, after: 984, multipliers: [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]}": Penalty(
        720 * HOUR_US, 984, (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8)
    ),
}


@pytest.mark.parametrize("written", PENALTIES)
def test_a_penalty_is_what_was_written_up_to_the_bounds(written: str) -> None:
    assert rule(f"penalty: {written}").penalty == PENALTIES[written]


@pytest.mark.parametrize(("written", "permille"), [("0.8", 800), ("0.101", 101), (".999", 999), ("5e-1", 500)])
def test_warn_at_is_a_part_of_the_limit(written: str, permille: int) -> None:
    assert rule(f"warn_at: {written}").warn_at == WarnAt(permille)


WHO_PAYS = {
    "penalty: {}": Charge.ADMITTED,
    "warn_at: 0.8": Charge.ALWAYS,
    "answer: {headers: [ietf]}": Charge.ALWAYS,
    "deny: {format: json}": Charge.ALWAYS,
}


@pytest.mark.parametrize("written", WHO_PAYS)
def test_a_penalty_changes_who_pays_and_wording_does_not(written: str) -> None:
    assert rule(written).charge is WHO_PAYS[written]
    assert rule(written, "charge: always").charge is Charge.ALWAYS


STYLES = {
    "{}": PLAIN,
    "{headers: []}": AnswerStyle(()),
    "{headers: [rule, ietf]}": AnswerStyle((Family.RULE, Family.IETF)),
    "{retry_jitter: 1h}": AnswerStyle(None, HOUR_US),
}


@pytest.mark.parametrize("written", STYLES)
def test_an_answer_is_a_rule_s_own_or_its_domain_s(written: str) -> None:
    assert rule(f"answer: {written}").style == STYLES[written]
    assert rule(of_domain=f"answer: {written}").style == STYLES[written]
    assert rule(f"answer: {written}", "answer: {headers: [retry-after], retry_jitter: 9s}").style == STYLES[written]


DENIALS = {
    "{}": Deny(),
    "{format: problem+json, status: 599}": Deny(BodyFormat.PROBLEM, status=599),
    "{format: json, headers: {X-Plan: a, x-when: 'at ${reset_at}'}}": Deny(
        BodyFormat.JSON, headers=(("X-Plan", Template(("a",))), ("x-when", Template(("at ", Hole.RESET_AT))))
    ),
    "{body: ''}": Deny(BodyFormat.TEXT, Template(()), "text/plain; charset=utf-8"),
    '{body: "a\\n${rule}", content_type: \'text/html; charset="utf-8"; x=y\', status: 400}': Deny(
        BodyFormat.TEXT, Template(("a\n", Hole.RULE)), 'text/html; charset="utf-8"; x=y', status=400
    ),
}


@pytest.mark.parametrize("written", DENIALS)
def test_a_refusal_is_worded_by_the_rule_or_its_domain_never_by_both(written: str) -> None:
    assert rule(f"deny: {written}").deny == DENIALS[written]
    assert rule(of_domain=f"deny: {written}").deny == DENIALS[written]
    assert rule(f"deny: {written}", "deny: {body: sorry, headers: {x-a: b}, status: 503}").deny == DENIALS[written]


def test_a_limit_that_the_request_brings_is_told_as_the_domain_says() -> None:
    rules = tree("answer: {headers: []}\n  deny: {format: json}", "answer: {headers: [ietf]}\ndeny: {status: 503}")
    descriptor = Descriptor((Entry("k", "v"),), Override(7, Unit.HOUR))

    (found,) = match(rules, Request("d", (descriptor,)))

    assert found.rule is not None
    assert found.rule.style == AnswerStyle((Family.IETF,))
    assert found.rule.deny == Deny(status=503)


def test_what_one_file_says_of_a_domain_counts_for_all_its_files() -> None:
    files = {
        "a.yaml": b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}]",
        "b.yaml": b"domain: d\nanswer: {headers: [rule]}\ndeny: {format: json}",
    }

    (found,) = compile_documents(files, merge_domains=True).tree.rules()

    assert (found.style, found.deny) == (AnswerStyle((Family.RULE,)), Deny(BodyFormat.JSON))


def test_a_merged_mapping_takes_the_last_block_whole() -> None:
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

    assert second.deny == Deny(headers=(("x-a", Template(("b",))),))


def test_a_mapping_belongs_to_its_domain() -> None:
    files = {
        "a.yaml": b"domain: a\next_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}",
        "b.yaml": b"domain: b",
    }

    mappings = compile_documents(files).tree.mappings

    assert mappings.keys() == {"a"}
    assert [entry.key for entry in mappings["a"].descriptors[0].entries] == ["user"]
