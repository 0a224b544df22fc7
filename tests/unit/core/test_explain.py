from __future__ import annotations

import pytest

from ratelimit_rls.core.explain import Attempt, Explanation, Outcome, Way, explain
from ratelimit_rls.core.model import Descriptor, Entry, Override, Unit
from ratelimit_rls.rules.compile import compile_documents

RULES = """\
domain: edge
descriptors:
  - key: path
    value: /v1/pay
    descriptors:
      - key: user
        rate_limit: {unit: minute, requests_per_unit: 20}
  - key: path
    value: /v2/*
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: path
    value: "*"
    rate_limit: {unlimited: true}
  - key: path
"""
TREE = compile_documents({"api.yaml": RULES.encode()}).tree


def _explain(*entries: tuple[str, str], domain: str = "edge", limit: Override | None = None) -> Explanation:
    return explain(TREE, domain, Descriptor(tuple(Entry(*entry) for entry in entries), limit))


def _told(attempt: Attempt) -> tuple[Way, str, Outcome, str]:
    return attempt.way, attempt.pattern, attempt.outcome, str(attempt.position or "-")


def test_the_walk_is_told_level_by_level_with_places() -> None:
    told = _explain(("path", "/v1/pay"), ("user", "42"))

    first, second = told.levels
    assert [_told(attempt) for attempt in first.attempts] == [
        (Way.EXACT, "/v1/pay", Outcome.MET, "api.yaml:3:5"),
        (Way.WILDCARD, "/v2/*", Outcome.DIFFERENT, "api.yaml:8:5"),
        (Way.WILDCARD, "*", Outcome.NOT_TRIED, "api.yaml:11:5"),
        (Way.KEY_ONLY, "path", Outcome.NOT_TRIED, "api.yaml:14:5"),
    ]
    assert [_told(attempt) for attempt in second.attempts] == [
        (Way.EXACT, "42", Outcome.ABSENT, "-"),
        (Way.KEY_ONLY, "user", Outcome.MET, "api.yaml:6:9"),
    ]
    assert told.match.rule is not None
    assert told.conclusion == "rule edge.path_/v1/pay.user"


def test_a_value_that_is_not_there_is_told_apart_from_a_key_without_values() -> None:
    (level,) = _explain(("path", "/v2/x")).levels

    assert _told(level.attempts[0]) == (Way.EXACT, "/v2/x", Outcome.DIFFERENT, "-")
    assert level.met is not None
    assert _told(level.met) == (Way.WILDCARD, "/v2/*", Outcome.MET, "api.yaml:8:5")


def test_patterns_that_would_be_met_too_are_told_as_not_tried() -> None:
    limit = "rate_limit: {unit: day, requests_per_unit: 1}"
    ways = ("prefix: /a", "prefix: /a/b", "prefix: /b", "regex: /a/.*", "regex: /b/.*")
    rules = "domain: edge\ndescriptors:\n" + "".join(f"- {{key: path, match: {{{way}}}, {limit}}}\n" for way in ways)
    tree = compile_documents({"f.yaml": rules.encode()}).tree

    (level,) = explain(tree, "edge", Descriptor((Entry("path", "/a/b/c"),))).levels

    assert [(attempt.pattern, attempt.outcome) for attempt in level.attempts[1:-1]] == [
        ("/a/b", Outcome.MET),
        ("/a", Outcome.NOT_TRIED),
        ("/b", Outcome.DIFFERENT),
        ("/a/.*", Outcome.NOT_TRIED),
        ("/b/.*", Outcome.DIFFERENT),
    ]


CONCLUSIONS = [
    ([("path", "/v2/x")], "rule edge.path_/v2/*"),
    ([("path", "else")], "rule edge.path_*: unlimited"),
    ([("path", "/v1/pay")], "the descriptor ends on path_/v1/pay, which has no rate_limit; its limits lie deeper"),
    ([("nope", "x")], "nothing is met by nope=x"),
    ([("path", "/v2/x"), ("user", "1")], "the rules end before user=1"),
    ([], "the descriptor has no entries"),
]


@pytest.mark.parametrize(("entries", "conclusion"), CONCLUSIONS)
def test_how_the_walk_ended_is_one_sentence(entries: list[tuple[str, str]], conclusion: str) -> None:
    assert _explain(*entries).conclusion.startswith(conclusion)


def test_an_unknown_domain_and_a_limit_in_the_request_need_no_walk() -> None:
    assert _explain(("path", "x"), domain="nope").conclusion.startswith("no rules for domain 'nope'")
    overridden = _explain(("path", "x"), limit=Override(3, Unit.DAY))
    assert overridden.levels == ()
    assert overridden.match.rule is not None
    assert "its own limit" in overridden.conclusion
