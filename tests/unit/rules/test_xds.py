"""RateLimitConfig as the text of a rules file: same meaning, same errors, and no text taken for anything else."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import Descriptor, Entry, Request, Rule, Unit
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import load
from ratelimit_rls.rules.compile import Compiled, compile_documents, digest
from ratelimit_rls.rules.sources import xds
from ratelimit_rls.rules.sources.xds import DEEPEST_RULE, LONGEST_NAME, MOST_EXPLAINED, documents, explained

LIMIT = {"unit": "DAY", "requests_per_unit": 5}


def compiled(*configs: dict[str, Any], merge_domains: bool = False) -> Compiled:
    return compile_documents(documents(configs), merge_domains=merge_domains)


def only_rule(**descriptor: Any) -> Rule:
    (rule,) = compiled({"name": "n", "domain": "d", "descriptors": [{"key": "k", **descriptor}]}).tree.rules()
    return rule


def refusal(*configs: dict[str, Any]) -> str:
    with pytest.raises(RulesError) as refused:
        compiled(*configs)
    return str(explained(refused.value, configs))


def test_every_field_means_what_it_means_in_a_file() -> None:
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
def test_every_unit(unit: Unit) -> None:
    (limit,) = only_rule(rate_limit={"unit": unit.name, "requests_per_unit": 2**32 - 1}).limits
    assert (limit.unit, limit.requests_per_unit) == (unit, 2**32 - 1)


def test_a_limit_without_a_number_refuses_everything() -> None:
    (limit,) = only_rule(rate_limit={"unit": "SECOND"}).limits
    assert limit.requests_per_unit == 0


@pytest.mark.parametrize("beside", [{}, {"requests_per_unit": 7}])
def test_unlimited(beside: dict[str, int]) -> None:
    rule = only_rule(rate_limit={"unlimited": True, "replaces": [{"name": "b"}], **beside})
    assert (rule.limits, rule.replaces) == ((), {"b"})


def test_descriptors_nest() -> None:
    inner = {"key": "c", "value": "1", "rate_limit": LIMIT}
    tree = compiled({"domain": "d", "descriptors": [{"key": "a", "descriptors": [{"key": "b"}, inner]}]}).tree
    assert [rule.path for rule in tree.rules()] == ["d.a.c_1"]


_YAML = ["007", "true", "~", "null", "1.5", "1e3", "10:30", "y", "<<", "*", "&a", "!!int 1", "- x", "{a: b}", "["]
_QUOTES = ["'", '"', "a: b # c", "\\n", " ", "\t x ", "x" * 3000]
_BREAKS = ["\n", "\r", "\0", "\x7f", "\x85", "\u2028", "\ufeff"]


@pytest.mark.parametrize("text", [*_YAML, *_QUOTES, *_BREAKS, "é", "日本", "😀"])
def test_a_text_stays_the_text_that_it_is(text: str) -> None:
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


def test_large_and_small_numbers_of_metadata() -> None:
    numbers = [0.1, -0.0, 2.0**53, 1e22, 1e300, -1e-300, 2.0**63]
    rule = only_rule(rate_limit=LIMIT, metadata={"numbers": numbers})
    assert rule.metadata == {"numbers": numbers}


def test_numbers_that_a_float_counts_exactly_are_whole_and_larger_ones_are_not_drawn_out() -> None:
    rule = only_rule(rate_limit=LIMIT, metadata={"numbers": [2.0**53 - 1, 1 - 2.0**53, 2.0**53, 1e300]})
    assert rule.metadata is not None
    assert [type(number) for number in rule.metadata["numbers"]] == [int, int, float, float]


@pytest.mark.parametrize(
    ("descriptor", "why"),
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
def test_the_reference_s_errors_with_the_resource_and_the_descriptor(descriptor: dict[str, Any], why: str) -> None:
    first = {"key": "first", "descriptors": [{"key": "k", "value": "v", **descriptor}]}
    config = {"name": "gateway/http", "domain": "d", "descriptors": [{"key": "zeroth"}, first]}

    told = refusal(config)

    assert told.startswith("gateway/http:")
    assert why in told
    assert "d.first." in told


def test_an_empty_domain_is_refused() -> None:
    assert refusal({"name": "n"}).startswith("n:1:12: error: config file cannot have empty domain")


def test_two_resources_of_one_domain_are_refused_unless_domains_are_merged() -> None:
    configs = [{"name": name, "domain": "d", "descriptors": [{"key": name, "rate_limit": LIMIT}]} for name in "ba"]
    assert refusal(*configs).startswith("b:1:12: error: duplicate domain 'd' in config file")
    merged = compiled(*configs, merge_domains=True).tree
    assert [rule.path for rule in merged.rules()] == ["d.a", "d.b"]


def test_the_order_on_the_wire_is_no_change() -> None:
    one: dict[str, Any] = {"name": "a", "domain": "x", "descriptors": [{"key": "k", "metadata": {"m": 1, "n": 2}}]}
    same: dict[str, Any] = {"name": "a", "domain": "x", "descriptors": [{"key": "k", "metadata": {"n": 2, "m": 1}}]}
    two = {"name": "b", "domain": "y"}
    assert digest(documents([one, two])) == digest(documents([two, same]))


def test_a_resource_is_called_by_its_name_else_its_domain_else_its_place() -> None:
    configs = [{"name": "one\ntwo", "domain": "a"}, {"domain": "b"}, {}, {"name": "x" * 1000}]
    assert {source.name for source in documents(configs)} == {r"one\ntwo", "b", "resources[2]", "x" * LONGEST_NAME}


NAMED_ALIKE = [
    {"name": "n", "domain": "x", "descriptors": [{"key": "innocent"}]},
    {"name": "n", "domain": "y", "descriptors": [{"key": "bad", "rate_limit": {}}]},
    {"name": "n (2)", "domain": "z", "descriptors": [{"key": "innocent"}, {"key": "worse", "rate_limit": {}}]},
]


@pytest.mark.parametrize("configs", [NAMED_ALIKE, NAMED_ALIKE[::-1]])
def test_resources_of_one_name_are_not_taken_for_each_other(configs: list[dict[str, Any]]) -> None:
    bad, worse = refusal(*configs).splitlines()
    assert bad.startswith("n (2):2:")
    assert bad.endswith("(in y.bad)")
    assert worse.startswith("n (2) (2):3:")
    assert worse.endswith("(in z.worse)")
    assert digest(documents(configs)) == digest(documents(NAMED_ALIKE))


def test_every_line_is_that_of_its_descriptor() -> None:
    inner = [{"key": "c"}, {"key": "d", "value": "1", "descriptors": [{"key": "e"}]}]
    config = {
        "name": "n",
        "domain": "x",
        "descriptors": [{"key": "a"}, {"key": "b", "descriptors": inner}, {"key": "f"}],
    }
    error = RulesError(Problem("n", line, 1, "wrong") for line in range(1, 9))
    told = [problem.message.removeprefix("wrong") for problem in explained(error, [config]).problems]
    paths = ["x.a", "x.b", "x.b.c", "x.b.d_1", "x.b.d_1.e", "x.f"]
    assert told == ["", *(f" (in {path})" for path in paths), ""]


def test_descriptors_are_gone_through_once_for_all_problems_and_only_the_first_are_explained() -> None:
    class Counted(dict[str, Any]):
        looked_at = 0

        def get(self, key: str, default: Any = None) -> Any:
            Counted.looked_at += key == "key"
            return super().get(key, default)

    many = MOST_EXPLAINED * 5
    config = {"name": "n", "domain": "x", "descriptors": [Counted(key=f"k{at}") for at in range(many)]}
    error = RulesError(Problem("n", line, 1, "wrong") for line in range(2, many + 2))

    told = explained(error, [config])

    assert Counted.looked_at == many + MOST_EXPLAINED  # the text once more, and the paths
    assert [problem.message for problem in told.problems] == [
        *(f"wrong (in x.k{at})" for at in range(MOST_EXPLAINED)),
        *["wrong"] * (many - MOST_EXPLAINED),
    ]


def nested(levels: int) -> dict[str, Any]:
    level: dict[str, Any] = {"key": "k", "rate_limit": LIMIT}
    for _ in range(levels - 1):
        level = {"key": "k", "descriptors": [level]}
    return {"name": "deep", "domain": "d", "descriptors": [level]}


def test_more_levels_than_may_be_are_refused_and_as_many_are_not() -> None:
    assert len(compiled(nested(DEEPEST_RULE)).tree.rules()) == 1
    assert "nested too deep: 48 levels of descriptors may have limits (in d.k." in refusal(nested(DEEPEST_RULE + 1))


def test_too_much_is_told_in_words_of_resources() -> None:
    of_files = [
        load.offences.too_many_nodes(load.MOST_NODES),
        load.offences.too_large(load.MOST_BYTES),
    ]
    error = RulesError(Problem("n", line, 1, message) for line, message in enumerate(of_files, 1))
    descriptors, size = (problem.message for problem in explained(error, []).problems)
    assert "too many descriptors: as text the resource has more than 1,000,000 nodes" in descriptors
    assert "so that 90,908 fit" in descriptors
    assert size.startswith("the resource is larger than 16 MiB as text")


def test_a_descriptor_with_a_limit_has_as_many_nodes_as_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"key": "k", "rate_limit": LIMIT}
    config = {"name": "n", "domain": "d", "descriptors": [{**rule, "value": str(at)} for at in range(10)]}
    nodes = xds.NODES_AROUND + 10 * xds.NODES_OF_A_RULE
    monkeypatch.setattr(load, "MOST_NODES", nodes)
    assert len(compiled(config).tree.rules()) == 10
    monkeypatch.setattr(load, "MOST_NODES", nodes - 1)
    with pytest.raises(RulesError, match="nodes"):
        compiled(config)
