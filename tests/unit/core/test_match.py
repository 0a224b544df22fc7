"""Matching as in envoyproxy/ratelimit, case by case, and its metric names."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import Descriptor, Entry, Limit, LimitOverride, Match, Request, Unit
from ratelimit_rls.core.pattern import Glob
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.rules.compile import compile_documents

RULES = """
domain: d
descriptors:
  - key: key1
    value: value1
    rate_limit: {unit: hour, requests_per_unit: 1}
    descriptors:
      - key: sub
        rate_limit: {unit: second, requests_per_unit: 2}
      - key: sub
        value: exact
        rate_limit: {unit: second, requests_per_unit: 3}
  - key: key1
    rate_limit: {unit: hour, requests_per_unit: 4}
    descriptors:
      - key: other
        rate_limit: {unit: hour, requests_per_unit: 5}
  - key: key2
    rate_limit: {unit: minute, requests_per_unit: 6}
  - key: key2
    value: exempt
  - key: path
    value: /a/*
    rate_limit: {unit: second, requests_per_unit: 7}
  - key: path
    value: /a/b/*
    rate_limit: {unit: second, requests_per_unit: 8}
  - key: path
    value: "*.png"
    rate_limit: {unit: second, requests_per_unit: 9}
  - key: path
    value: /a/exact
    rate_limit: {unit: second, requests_per_unit: 10}
  - key: path
    rate_limit: {unit: second, requests_per_unit: 11}
  - key: x-*
    rate_limit: {unit: second, requests_per_unit: 12}
  - key: key1
    value: deep*
    descriptors:
      - key: key1
        value: deep
        rate_limit: {unit: second, requests_per_unit: 13}
  - key: a_b
    value: c
    rate_limit: {unit: second, requests_per_unit: 14}
"""
TREE = compile_documents({"f.yaml": RULES.encode()}).tree


def _match(tree: Tree, *entries: tuple[str, str], domain: str = "d", limit: LimitOverride | None = None) -> Match:
    descriptor = Descriptor(tuple(Entry(*entry) for entry in entries), limit)
    (found,) = match(tree, Request(domain, (descriptor,)))
    return found


MATCHING = {
    "exact value before the bare key": ([("key1", "value1")], 1),
    "bare key for any other value": ([("key1", "value2")], 4),
    "bare key for an empty value": ([("key1", "")], 4),
    "second level": ([("key1", "value1"), ("sub", "x")], 2),
    "second level, exact": ([("key1", "value1"), ("sub", "exact")], 3),
    "second level under the bare key": ([("key1", "x"), ("other", "y")], 5),
    "the same key on both levels": ([("key1", "deeper"), ("key1", "deep")], 13),
    "first wildcard in the order written, not the longest": ([("path", "/a/b/c")], 7),
    "wildcard before the bare key": ([("path", "/x.png")], 9),
    "the first of two matching wildcards": ([("path", "/a/x.png")], 7),
    "exact value before any wildcard": ([("path", "/a/exact")], 10),
    "bare key if no wildcard matches": ([("path", "/b")], 11),
    "a literal star is an exact value": ([("path", "/a/b/*")], 8),
    "wildcard in the key": ([("x-tenant", "any")], 12),
    "wildcard in the key with an empty value": ([("x-", "")], 12),
}


@pytest.mark.parametrize(("entries", "requests_per_unit"), MATCHING.values(), ids=MATCHING.keys())
def test_descriptor_matches_rule_of_its_last_entry(entries: list[tuple[str, str]], requests_per_unit: int) -> None:
    rule = _match(TREE, *entries).rule

    assert rule is not None
    assert rule.limits
    assert rule.limits[0].requests_per_unit == requests_per_unit


NOT_MATCHING = {
    "no such key": [("nope", "")],
    "keys are case-sensitive": [("KEY1", "value1")],
    "more entries than levels": [("key2", "x"), ("more", "y")],
    "the order of entries matters": [("sub", "x"), ("key1", "value1")],
    "a descriptor without limit exempts": [("key2", "exempt")],
    "no backtracking from the exact value": [("key1", "value1"), ("other", "y")],
    "no backtracking from the wildcard": [("key1", "deeper"), ("other", "y")],
    "the level above has no limit of its own": [("key1", "deeper")],
    "no entries": [],
    "joined text is not compared: key": [("a", "b_c")],
    "joined text is not compared: value": [("a_b_c", "")],
    "joined text is not compared: wildcard": [("path_/a/x", "y")],
}


@pytest.mark.parametrize("entries", NOT_MATCHING.values(), ids=NOT_MATCHING.keys())
def test_descriptor_without_match(entries: list[tuple[str, str]]) -> None:
    assert _match(TREE, *entries).rule is None


def test_unknown_domain_has_no_match_even_with_override() -> None:
    assert _match(TREE, ("key1", "value1"), domain="D").rule is None
    assert _match(TREE, ("key1", "value1"), domain="nope", limit=LimitOverride(5, Unit.DAY)).rule is None


def test_override_replaces_the_rules() -> None:
    for entries in ([("key1", "value1"), ("new", "")], [("key2", "exempt")]):
        found = _match(TREE, *entries, limit=LimitOverride(99, Unit.WEEK))

        assert found.rule is not None
        assert found.rule.limits == (Limit(99, Unit.WEEK),)
        assert found.entries == tuple(entries)
    assert _match(TREE, ("k", "v"), ("e", ""), limit=LimitOverride(1, Unit.DAY)).metric_path == "d.k_v.e"


GLOBS = [
    ("*", ["", "a", "a/b_c"], []),
    ("foo*", ["foo", "foobar"], ["fo", "xfoo"]),
    ("*foo", ["foo", "xfoo"], ["foox"]),
    ("a*a", ["aa", "aba"], ["a"]),
    ("a*b*c", ["abc", "axxbxxc", "abcbc"], ["acb", "ac"]),
    ("a*bc*c", ["abcc", "a-bc-c"], ["abc"]),
    ("*ab*ab*", ["abab", "xabyabz"], ["ab", "aabb"]),
    ("**", ["", "x"], []),
    ("/api*v1", ["/apiv1", "/api/x/v1"], ["/api", "/apiv12"]),
]


@pytest.mark.parametrize(("pattern", "matching", "not_matching"), GLOBS)
def test_glob(pattern: str, matching: list[str], not_matching: list[str]) -> None:
    glob = Glob.of(pattern)

    assert [text for text in matching if not glob.matches(text)] == []
    assert [text for text in not_matching if glob.matches(text)] == []


LIMIT = "rate_limit: {unit: second, requests_per_unit: 1}"


def _nested(key: str, value: str, flags: str, below: str, flags_below: str) -> str:
    return f"[{{key: {key}, value: '{value}', {flags}, descriptors: [{{key: {below}, {flags_below}, {LIMIT}}}]}}]"


# Descriptors of the rules, entries of the request, metric path, and entries of the counter.
METRICS = {
    "the pattern of a wildcard": (
        f"[{{key: wild, value: foo*, {LIMIT}}}]",
        [("wild", "foobar")],
        "t.wild_foo*",
        [("wild", "foobar")],
    ),
    "a nested wildcard": (
        f"[{{key: nestedWild, value: val1, descriptors: [{{key: wild, value: goo*, {LIMIT}}}]}}]",
        [("nestedWild", "val1"), ("wild", "good")],
        "t.nestedWild_val1.wild_goo*",
        [("nestedWild", "val1"), ("wild", "good")],
    ),
    "a wildcard in the middle": (
        f"[{{key: midpath, value: /api*v1, {LIMIT}}}]",
        [("midpath", "/api/x/v1")],
        "t.midpath_/api*v1",
        [("midpath", "/api/x/v1")],
    ),
    "shared on two levels": (
        f"[{{key: files, value: top/*, share_threshold: y, descriptors: "
        f"[{{key: files, value: nested/*, share_threshold: y, {LIMIT}}}]}}]",
        [("files", "top/1"), ("files", "nested/2")],
        "t.files_top/*.files_nested/*",
        [("files", "top/*"), ("files", "nested/*")],
    ),
    "shared above a level that is not": (
        _nested("path", "path/*", "share_threshold: y", "type", "shadow_mode: n"),
        [("path", "path/1"), ("type", "x")],
        "t.path_path/*.type",
        [("path", "path/*"), ("type", "x")],
    ),
    "shared, where an exact sibling stays apart": (
        f"[{{key: f, value: a/*, share_threshold: y, {LIMIT}}}, {{key: f, value: a/1, {LIMIT}}}]",
        [("f", "a/1")],
        "t.f_a/1",
        [("f", "a/1")],
    ),
    "shared with value_to_metric": (
        _nested("route", "api/*", "share_threshold: y, value_to_metric: y", "method", "shadow_mode: n"),
        [("route", "api/1"), ("method", "GET")],
        "t.route_api/*.method",
        [("route", "api/*"), ("method", "GET")],
    ),
    "shared and detailed": (
        _nested("service", "svc/*", "share_threshold: y", "endpoint", "detailed_metric: y"),
        [("service", "svc/1"), ("endpoint", "get")],
        "t.service_svc/*.endpoint_get",
        [("service", "svc/*"), ("endpoint", "get")],
    ),
    "shared and detailed with an empty value": (
        _nested("service", "svc/*", "share_threshold: y", "endpoint", "detailed_metric: y"),
        [("service", "svc/1"), ("endpoint", "")],
        "t.service_svc/*.endpoint",
        [("service", "svc/*"), ("endpoint", "")],
    ),
    "wildcard with value_to_metric": (
        f"[{{key: wild, value: foo*, value_to_metric: y, {LIMIT}}}]",
        [("wild", "foobar")],
        "t.wild_foobar",
        [("wild", "foobar")],
    ),
}


@pytest.mark.parametrize(("descriptors", "entries", "path", "counted"), METRICS.values(), ids=METRICS.keys())
def test_metric_path_and_counter_entries(
    descriptors: str, entries: list[tuple[str, str]], path: str, counted: list[tuple[str, str]]
) -> None:
    tree = compile_documents({"f": f"domain: t\ndescriptors: {descriptors}".encode()}).tree

    found = _match(tree, *entries, domain="t")

    assert found.metric_path == path
    assert list(found.entries) == counted


ROUTES = """
domain: domain
descriptors:
  - key: route
    value_to_metric: {value_to_metric}
    descriptors:
      - key: http_method
        value_to_metric: {value_to_metric}
        descriptors:
          - key: subject_id
            detailed_metric: {detailed_metric}
            rate_limit: {{unit: minute, requests_per_unit: 60}}
"""

ROUTE_METRICS = [
    ("y", "n", "draw", "domain.route_draw.http_method_GET.subject_id"),
    ("n", "y", "draw", "domain.route_draw.http_method_GET.subject_id_123"),
    ("y", "y", "draw", "domain.route_draw.http_method_GET.subject_id_123"),
    ("n", "n", "draw", "domain.route.http_method.subject_id"),
    ("y", "n", "", "domain.route.http_method_GET.subject_id"),
    ("n", "y", "", "domain.route_.http_method_GET.subject_id_123"),
]


@pytest.mark.parametrize(("value_to_metric", "detailed_metric", "route", "path"), ROUTE_METRICS)
def test_values_in_metric_paths(value_to_metric: str, detailed_metric: str, route: str, path: str) -> None:
    rules = ROUTES.format(value_to_metric=value_to_metric, detailed_metric=detailed_metric)
    tree = compile_documents({"f": rules.encode()}).tree

    found = _match(tree, ("route", route), ("http_method", "GET"), ("subject_id", "123"), domain="domain")

    assert found.metric_path == path
