from __future__ import annotations

import pytest

from ratelimit_rls.core.explain import Attempt, AttemptOutcome, Explanation, MatchKind, explain
from ratelimit_rls.core.model import Descriptor, Entry, LimitOverride, Unit
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


def _explain(*entries: tuple[str, str], domain: str = "edge", limit: LimitOverride | None = None) -> Explanation:
    return explain(TREE, domain, Descriptor(tuple(Entry(*entry) for entry in entries), limit))


def _summary(attempt: Attempt) -> tuple[MatchKind, str, AttemptOutcome, str]:
    return attempt.kind, attempt.pattern, attempt.outcome, str(attempt.position or "-")


def test_explanation_has_levels_with_positions() -> None:
    explanation = _explain(("path", "/v1/pay"), ("user", "42"))

    first, second = explanation.levels
    assert [_summary(attempt) for attempt in first.attempts] == [
        (MatchKind.EXACT, "/v1/pay", AttemptOutcome.MATCHED, "api.yaml:3:5"),
        (MatchKind.WILDCARD, "/v2/*", AttemptOutcome.DIFFERENT, "api.yaml:8:5"),
        (MatchKind.WILDCARD, "*", AttemptOutcome.NOT_TRIED, "api.yaml:11:5"),
        (MatchKind.KEY_ONLY, "path", AttemptOutcome.NOT_TRIED, "api.yaml:14:5"),
    ]
    assert [_summary(attempt) for attempt in second.attempts] == [
        (MatchKind.EXACT, "42", AttemptOutcome.ABSENT, "-"),
        (MatchKind.KEY_ONLY, "user", AttemptOutcome.MATCHED, "api.yaml:6:9"),
    ]
    assert explanation.match.rule is not None
    assert explanation.conclusion == "rule edge.path_/v1/pay.user"


def test_unknown_value_differs_from_unknown_key() -> None:
    (level,) = _explain(("path", "/v2/x")).levels

    assert _summary(level.attempts[0]) == (MatchKind.EXACT, "/v2/x", AttemptOutcome.DIFFERENT, "-")
    assert level.matched is not None
    assert _summary(level.matched) == (MatchKind.WILDCARD, "/v2/*", AttemptOutcome.MATCHED, "api.yaml:8:5")


def test_patterns_that_would_match_too_are_not_tried() -> None:
    limit = "rate_limit: {unit: day, requests_per_unit: 1}"
    patterns = ("prefix: /a", "prefix: /a/b", "prefix: /b", "regex: /a/.*", "regex: /b/.*")
    rules = "domain: edge\ndescriptors:\n" + "".join(
        f"- {{key: path, match: {{{one}}}, {limit}}}\n" for one in patterns
    )
    tree = compile_documents({"f.yaml": rules.encode()}).tree

    (level,) = explain(tree, "edge", Descriptor((Entry("path", "/a/b/c"),))).levels

    assert [(attempt.pattern, attempt.outcome) for attempt in level.attempts[1:-1]] == [
        ("/a/b", AttemptOutcome.MATCHED),
        ("/a", AttemptOutcome.NOT_TRIED),
        ("/b", AttemptOutcome.DIFFERENT),
        ("/a/.*", AttemptOutcome.NOT_TRIED),
        ("/b/.*", AttemptOutcome.DIFFERENT),
    ]


CONCLUSIONS = [
    ([("path", "/v2/x")], "rule edge.path_/v2/*"),
    ([("path", "else")], "rule edge.path_*: unlimited"),
    (
        [("path", "/v1/pay")],
        "the descriptor ends on path_/v1/pay, which has no rate_limit; its limits are on deeper levels",
    ),
    ([("nope", "x")], "nothing matches nope=x"),
    ([("path", "/v2/x"), ("user", "1")], "the rules end before user=1"),
    ([], "the descriptor has no entries"),
]


@pytest.mark.parametrize(("entries", "conclusion"), CONCLUSIONS)
def test_conclusion(entries: list[tuple[str, str]], conclusion: str) -> None:
    assert _explain(*entries).conclusion.startswith(conclusion)


def test_unknown_domain_and_request_limit_have_no_levels() -> None:
    assert _explain(("path", "x"), domain="nope").conclusion.startswith("no rules for domain 'nope'")
    overridden = _explain(("path", "x"), limit=LimitOverride(3, Unit.DAY))
    assert overridden.levels == ()
    assert overridden.match.rule is not None
    assert "its own limit" in overridden.conclusion
