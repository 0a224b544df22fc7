"""The compiled tree agrees with a naive matcher that follows the docs of envoyproxy/ratelimit, and so does explain."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.explain import explain
from ratelimit_rls.core.match import match, match_descriptor
from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.core.pattern import Glob
from ratelimit_rls.core.pattern_index import Wildcard
from ratelimit_rls.core.tree import Node
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.lint import covers

# No deadline: the machine may be busy.
patiently = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

# A small alphabet, so that values match patterns often; "_" because envoyproxy/ratelimit joins with it.
words = st.text("ab_", max_size=3)
patterns = st.text("ab_*", max_size=4)
rate_limits = st.fixed_dictionaries({"unit": st.just("second"), "requests_per_unit": st.integers(1, 2**32 - 1)})


def _levels(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    descriptor = st.fixed_dictionaries(
        {"key": patterns.filter(bool)},
        optional={"value": patterns, "rate_limit": rate_limits, "descriptors": children},
    )
    return st.lists(descriptor, max_size=5, unique_by=lambda d: (d["key"], d.get("value", "")))


documents = st.recursive(st.just([]), _levels, max_leaves=6)  # type: ignore[var-annotated]
requests = st.lists(st.builds(Entry, words, words), max_size=4)


def naive_glob(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), text, re.DOTALL) is not None


def naive_match(descriptors: list[dict[str, Any]], entries: list[Entry]) -> dict[str, Any] | None:
    """Return the limit of the last entry: exact, then the first wildcard, then the key alone; no backtracking."""
    limit = None
    level = descriptors
    for index, (key, value) in enumerate(entries):
        found = next((d for d in level if value and (d["key"], d.get("value", "")) == (key, value)), None)
        for d in level if found is None else []:
            has_wildcard = "*" in d["key"] + d.get("value", "")
            if has_wildcard and naive_glob(d["key"], key) and naive_glob(d.get("value", "") or "*", value):
                found = d
                break
        if found is None:
            found = next((d for d in level if (d["key"], d.get("value", "")) == (key, "")), None)
        if found is None:
            return None
        if index == len(entries) - 1:
            limit = found.get("rate_limit")
        level = found.get("descriptors", [])
    return limit


@patiently
@given(documents, requests)
def test_compiled_tree_agrees_with_naive_matcher(rules: list[dict[str, Any]], entries: list[Entry]) -> None:
    text = json.dumps({"domain": "d", "descriptors": rules})
    tree = compile_documents({"f": text.encode()}).tree

    (found,) = match(tree, Request("d", (Descriptor(tuple(entries)),)))

    expected = naive_match(rules, entries)
    if expected is None:
        assert found.rule is None
    else:
        assert found.rule is not None
        assert found.rule.limits
        assert found.rule.limits[0].requests_per_unit == expected["requests_per_unit"]


@patiently
@given(documents, requests)
def test_explain_agrees_with_match(rules: list[dict[str, Any]], entries: list[Entry]) -> None:
    tree = compile_documents({"f": json.dumps({"domain": "d", "descriptors": rules}).encode()}).tree
    descriptor = Descriptor(tuple(entries))

    explanation = explain(tree, "d", descriptor)

    assert explanation.match == match_descriptor(tree.domains["d"], descriptor)
    assert all(level.matched for level in explanation.levels[:-1])
    if explanation.match.rule is not None:
        matched = explanation.levels[-1].matched
        assert matched is not None
        assert matched.position == explanation.match.rule.position
        assert [level.entry for level in explanation.levels] == entries


globs = st.text("ab*", max_size=7)
texts = st.text("ab", max_size=6)


@patiently
@given(globs, texts)
def test_glob_agrees_with_regex(pattern: str, text: str) -> None:
    assert Glob.of(pattern).matches(text) == naive_glob(pattern, text)


@patiently
@given(globs, globs.filter(bool), texts)
def test_covering_glob_matches_everything_covered(outer: str, inner: str, text: str) -> None:
    wildcard = Wildcard(Glob.of("k"), Glob.of(outer), Node("k", outer))

    if covers(wildcard, "k", inner) and naive_glob(inner, text):
        assert naive_glob(outer, text)


@patiently
@given(documents)
def test_unreachable_are_those_that_an_earlier_wildcard_covers(rules: list[dict[str, Any]]) -> None:
    lines = "".join(f"- {json.dumps(descriptor)}\n" for descriptor in rules)
    compiled = compile_documents({"f": f"domain: d\ndescriptors:\n{lines}".encode() if rules else b"domain: d"})

    reported = {(problem.line, problem.column) for problem in compiled.warnings if problem.code == "unreachable"}

    expected = set()
    for level in compiled.tree.levels():
        bare = [(len(level.wildcards), child) for key, child in level.by_key.items() if "*" not in key]
        for index, child in [*enumerate(one.node for one in level.wildcards), *bare]:
            if any(covers(earlier, child.key, child.value) for earlier in level.wildcards[:index]):
                assert child.position is not None
                expected.add((child.position.line, child.position.column))
    assert reported == expected
