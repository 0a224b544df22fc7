"""Conversion of RateLimitConfig to rules text: same meaning, same errors, and all text escaped."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import Descriptor, Entry, Request, Rule, Unit
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.compile import CompiledRules, compile_documents, digest
from ratelimit_rls.rules.source_document import MAX_BYTES
from ratelimit_rls.rules.sources.xds import documents as xds
from ratelimit_rls.rules.sources.xds.documents import (
    MAX_DESCRIPTOR_DEPTH,
    MAX_EXPLAINED,
    MAX_NAME_LENGTH,
    explain_problems,
    to_documents,
)
from ratelimit_rls.yaml import parser

LIMIT = {"unit": "DAY", "requests_per_unit": 5}


def compiled(*configs: dict[str, Any], merge_domains: bool = False) -> CompiledRules:
    return compile_documents(to_documents(configs), merge_domains=merge_domains)


def only_rule(**descriptor: Any) -> Rule:
    (rule,) = compiled({"name": "n", "domain": "d", "descriptors": [{"key": "k", **descriptor}]}).tree.rules()
    return rule


def first_errors(*configs: dict[str, Any]) -> str:
    with pytest.raises(RulesError) as raised:
        compiled(*configs)
    return str(explain_problems(raised.value, configs))


def test_every_xds_field_means_the_same_as_in_a_file() -> None:
    rule = only_rule(
        value="v",
        rate_limit={**LIMIT, "name": "a", "replaces": [{"name": "b"}, {"name": "c"}]},
        shadow_mode=True,
        detailed_metric=True,
        quota_mode=True,
        metadata={"plan": "free", "caps": {"burst": 5.0, "ratio": 0.5}, "list": [1.0, None, True, "x"], "no": False},
    )

    (limit,) = rule.limits
    assert (rule.path, limit.unit, limit.requests_per_unit, limit.name) == ("d.k_v", Unit.DAY, 5, "a")
    assert rule.replaces == {"b", "c"}
    assert (rule.shadow_mode, rule.detailed_metric, rule.quota_mode) == (True, True, True)
    assert rule.metadata == {
        "plan": "free",
        "caps": {"burst": 5, "ratio": 0.5},
        "list": [1, None, True, "x"],
        "no": False,
    }


@pytest.mark.parametrize("unit", [unit for unit in Unit if unit is not Unit.UNKNOWN])
def test_every_unit_is_compiled(unit: Unit) -> None:
    (limit,) = only_rule(rate_limit={"unit": unit.name, "requests_per_unit": 2**32 - 1}).limits
    assert (limit.unit, limit.requests_per_unit) == (unit, 2**32 - 1)


def test_limit_without_a_number_denies_everything() -> None:
    (limit,) = only_rule(rate_limit={"unit": "SECOND"}).limits
    assert limit.requests_per_unit == 0


@pytest.mark.parametrize("beside", [{}, {"requests_per_unit": 7}])
def test_unlimited_is_compiled(beside: dict[str, int]) -> None:
    rule = only_rule(rate_limit={"unlimited": True, "replaces": [{"name": "b"}], **beside})
    assert (rule.limits, rule.replaces) == ((), {"b"})


def test_nested_descriptors_are_compiled() -> None:
    inner = {"key": "c", "value": "1", "rate_limit": LIMIT}
    tree = compiled({"domain": "d", "descriptors": [{"key": "a", "descriptors": [{"key": "b"}, inner]}]}).tree
    assert [rule.path for rule in tree.rules()] == ["d.a.c_1"]


_YAML = ["007", "true", "~", "null", "1.5", "1e3", "10:30", "y", "<<", "*", "&a", "!!int 1", "- x", "{a: b}", "["]
_QUOTES = ["'", '"', "a: b # c", "\\n", " ", "\t x ", "x" * 3000]
_BREAKS = ["\n", "\r", "\0", "\x7f", "\x85", "\u2028", "\ufeff"]


@pytest.mark.parametrize("text", [*_YAML, *_QUOTES, *_BREAKS, "é", "日本", "😀"])
def test_text_is_escaped_without_loss(text: str) -> None:
    tree = compiled(
        {
            "name": text,
            "domain": text,
            "descriptors": [
                {"key": text, "value": text, "rate_limit": {**LIMIT, "name": text}, "metadata": {text: text}}
            ],
        }
    ).tree

    (found,) = match(tree, Request(text, (Descriptor((Entry(text, text),)),)))
    assert found.rule is not None
    assert found.rule.limits[0].name == text
    assert found.rule.metadata == {text: text}


def test_metadata_numbers_are_exact() -> None:
    numbers = [0.1, -0.0, 2.0**53, 1e22, 1e300, -1e-300, 2.0**63]
    rule = only_rule(rate_limit=LIMIT, metadata={"numbers": numbers})
    assert rule.metadata == {"numbers": numbers}


def test_metadata_integers_are_written_as_such_up_to_2_53() -> None:
    rule = only_rule(rate_limit=LIMIT, metadata={"numbers": [2.0**53 - 1, 1 - 2.0**53, 2.0**53, 1e300]})
    assert rule.metadata is not None
    assert [type(number) for number in rule.metadata["numbers"]] == [int, int, float, float]


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        ({"rate_limit": {"requests_per_unit": 1}}, "invalid rate limit unit 'UNKNOWN'"),
        ({"rate_limit": {"unit": "UNKNOWN"}}, "invalid rate limit unit 'UNKNOWN'"),
        ({"rate_limit": {"unit": 99}}, "invalid rate limit unit '99'"),
        ({"rate_limit": {**LIMIT, "unlimited": True}}, "should not specify rate limit unit when unlimited"),
        ({"rate_limit": {**LIMIT, "replaces": [{}]}}, "should not have an empty replaces entry"),
        (
            {"rate_limit": {**LIMIT, "name": "a", "replaces": [{"name": "a"}]}},
            "replaces should not contain name of same",
        ),
        ({"key": ""}, "descriptor has empty key"),
        ({"descriptors": [{"key": "x"}, {"key": "x"}]}, "duplicate descriptor composite key 'd.first.k_v.x'"),
    ],
)
def test_error_names_resource_and_descriptor(descriptor: dict[str, Any], message: str) -> None:
    first = {"key": "first", "descriptors": [{"key": "k", "value": "v", **descriptor}]}
    config = {"name": "gateway/http", "domain": "d", "descriptors": [{"key": "zeroth"}, first]}

    problems = first_errors(config)

    assert problems.startswith("gateway/http:")
    assert message in problems
    assert "d.first." in problems


def test_empty_domain_is_rejected() -> None:
    assert first_errors({"name": "n"}).startswith("n:1:12: error: config file cannot have empty domain")


def test_duplicate_domain_is_rejected_unless_merging() -> None:
    configs = [{"name": name, "domain": "d", "descriptors": [{"key": name, "rate_limit": LIMIT}]} for name in "ba"]
    assert first_errors(*configs).startswith("b:1:12: error: duplicate domain 'd' in config file")
    merged = compiled(*configs, merge_domains=True).tree
    assert [rule.path for rule in merged.rules()] == ["d.a", "d.b"]


def test_resource_order_does_not_change_the_digest() -> None:
    one: dict[str, Any] = {"name": "a", "domain": "x", "descriptors": [{"key": "k", "metadata": {"m": 1, "n": 2}}]}
    same: dict[str, Any] = {"name": "a", "domain": "x", "descriptors": [{"key": "k", "metadata": {"n": 2, "m": 1}}]}
    two = {"name": "b", "domain": "y"}
    assert digest(to_documents([one, two])) == digest(to_documents([two, same]))


def test_resource_name_falls_back_to_domain_then_index() -> None:
    configs = [{"name": "one\ntwo", "domain": "a"}, {"domain": "b"}, {}, {"name": "x" * 1000}]
    assert {source.name for source in to_documents(configs)} == {
        r"one\ntwo",
        "b",
        "resources[2]",
        "x" * MAX_NAME_LENGTH,
    }


SAME_NAMES = [
    {"name": "n", "domain": "x", "descriptors": [{"key": "innocent"}]},
    {"name": "n", "domain": "y", "descriptors": [{"key": "bad", "rate_limit": {}}]},
    {"name": "n (2)", "domain": "z", "descriptors": [{"key": "innocent"}, {"key": "worse", "rate_limit": {}}]},
]


@pytest.mark.parametrize("configs", [SAME_NAMES, SAME_NAMES[::-1]])
def test_resources_of_equal_name_are_numbered(configs: list[dict[str, Any]]) -> None:
    bad, worse = first_errors(*configs).splitlines()
    assert bad.startswith("n (2):2:")
    assert bad.endswith("(in y.bad)")
    assert worse.startswith("n (2) (2):3:")
    assert worse.endswith("(in z.worse)")
    assert digest(to_documents(configs)) == digest(to_documents(SAME_NAMES))  # type: ignore[arg-type]


def test_each_descriptor_starts_a_line() -> None:
    inner = [{"key": "c"}, {"key": "d", "value": "1", "descriptors": [{"key": "e"}]}]
    config = {
        "name": "n",
        "domain": "x",
        "descriptors": [{"key": "a"}, {"key": "b", "descriptors": inner}, {"key": "f"}],
    }
    error = RulesError(Problem("n", line, 1, "wrong") for line in range(1, 9))
    problems = [problem.message.removeprefix("wrong") for problem in explain_problems(error, [config]).problems]
    paths = ["x.a", "x.b", "x.b.c", "x.b.d_1", "x.b.d_1.e", "x.f"]
    assert problems == ["", *(f" (in {path})" for path in paths), ""]


def test_explaining_problems_walks_descriptors_once() -> None:
    class Counted(dict[str, Any]):
        looked_at = 0

        def get(self, key: str, default: Any = None) -> Any:
            Counted.looked_at += key == "key"
            return super().get(key, default)

    many = MAX_EXPLAINED * 5
    config = {"name": "n", "domain": "x", "descriptors": [Counted(key=f"k{at}") for at in range(many)]}
    error = RulesError(Problem("n", line, 1, "wrong") for line in range(2, many + 2))

    problems = explain_problems(error, [config])

    assert Counted.looked_at == many + MAX_EXPLAINED  # once for the text, and for the paths
    assert [problem.message for problem in problems.problems] == [
        *(f"wrong (in x.k{at})" for at in range(MAX_EXPLAINED)),
        *["wrong"] * (many - MAX_EXPLAINED),
    ]


def nested(levels: int) -> dict[str, Any]:
    level: dict[str, Any] = {"key": "k", "rate_limit": LIMIT}
    for _ in range(levels - 1):
        level = {"key": "k", "descriptors": [level]}
    return {"name": "deep", "domain": "d", "descriptors": [level]}


def test_depth_limit_is_enforced_exactly() -> None:
    assert len(compiled(nested(MAX_DESCRIPTOR_DEPTH)).tree.rules()) == 1
    assert "nested too deep: 48 levels of descriptors may have limits (in d.k." in first_errors(
        nested(MAX_DESCRIPTOR_DEPTH + 1)
    )


def test_size_errors_speak_of_resources() -> None:
    of_files = [
        diagnostics.too_many_nodes(parser.MAX_NODES),
        diagnostics.too_large(MAX_BYTES),
    ]
    error = RulesError(Problem("n", line, 1, message) for line, message in enumerate(of_files, 1))
    descriptors, size = (problem.message for problem in explain_problems(error, []).problems)
    assert "too many descriptors: as text the resource has more than 1,000,000 nodes" in descriptors
    assert "so that 90,908 fit" in descriptors
    assert size.startswith("the resource is larger than 16 MiB as text")


def test_nodes_per_rule_matches_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"key": "k", "rate_limit": LIMIT}
    config = {"name": "n", "domain": "d", "descriptors": [{**rule, "value": str(at)} for at in range(10)]}
    nodes = xds.NODES_PER_RESOURCE + 10 * xds.NODES_PER_RULE
    monkeypatch.setattr(parser, "MAX_NODES", nodes)
    assert len(compiled(config).tree.rules()) == 10
    monkeypatch.setattr(parser, "MAX_NODES", nodes - 1)
    with pytest.raises(RulesError, match="nodes"):
        compiled(config)
