from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Entry, Limit, Rule, Unit
from ratelimit_rls.core.tree import find_child
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules import document as document_module
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.diagnostics import MAX_EXPRESSIONS
from ratelimit_rls.rules.document import DescriptorDocument, RateLimitDocument
from ratelimit_rls.rules.grammar import DESCRIPTOR_KEYS, RATE_LIMIT_KEYS
from ratelimit_rls.rules.source_document import SourceDocument

REPOSITORY = Path(__file__).parents[3]


def _rules(text: str, **options: bool) -> dict[str, Rule]:
    return {rule.path: rule for rule in compile_documents({"f.yaml": text.encode()}, **options).tree.rules()}


def _rule(limit: str, beside: str = "", **options: bool) -> Rule:
    (rule,) = _rules(
        f"domain: d\ndescriptors:\n  - key: k\n    rate_limit: {{{limit}}}\n    {beside}\n", **options
    ).values()
    return rule


def test_examples_load_together_without_warnings() -> None:
    files = {str(path): path.read_bytes() for path in (REPOSITORY / "descriptors").glob("*.yaml")}

    compiled = compile_documents({name: text for name, text in files.items() if ".test." not in name})

    assert compiled.warnings == ()
    demo, _ = find_child(compiled.tree.domains["demo"], Entry("user", "anybody"))
    assert demo is not None
    assert demo.rule is not None
    assert demo.rule.limits == (Limit(5, Unit.MINUTE),)


def test_every_key_of_envoyproxy_ratelimit_is_compiled() -> None:
    text = """
domain: d
descriptors:
  - key: k
    value: v
    shadow_mode: true
    quota_mode: true
    detailed_metric: true
    value_to_metric: true
    metadata: {a: 1}
    rate_limit: {unit: WEEK, requests_per_unit: 7, name: mine, replaces: [{name: x}, {name: y}]}
"""
    tree = compile_documents({"f.yaml": text.encode()}).tree
    node = tree.domains["d"].exact["k", "v"]

    assert node.value_to_metric
    assert str(node.position) == "f.yaml:4:5"
    assert node.rule == Rule(
        path="d.k_v",
        limits=(Limit(7, Unit.WEEK, name="mine"),),
        replaces=frozenset({"x", "y"}),
        charge=Charge.ALWAYS,
        shadow_mode=True,
        quota_mode=True,
        detailed_metric=True,
        metadata={"a": 1},
        position=node.position,
    )


@pytest.mark.parametrize("unit", [unit for unit in Unit if unit is not Unit.UNKNOWN])
def test_unit_is_case_insensitive(unit: Unit) -> None:
    for text in (unit.name, unit.name.lower(), unit.name.title()):
        assert _rule(f"unit: {text}, requests_per_unit: 1").limits == (Limit(1, unit),)


def test_unlimited_ignores_unknown_unit_and_requests_per_unit() -> None:
    assert _rule("unlimited: true, unit: fortnight, requests_per_unit: 3").unlimited


def test_key_with_underscore_differs_from_key_with_value() -> None:
    rules = _rules("domain: d\ndescriptors: [{key: a, value: b_c}, {key: a_b, value: c}, {key: a_b_c}]")

    assert rules == {}


def test_wildcards_keep_file_order() -> None:
    text = b"domain: d\ndescriptors: [{key: k, value: b*}, {key: k, value: c}, {key: '*'}, {key: k, value: '*a*'}]"

    root = compile_documents({"f": text}).tree.domains["d"]

    assert [wildcard.node.label for wildcard in root.wildcards] == ["k_b*", "*", "k_*a*"]
    assert set(root.exact) == {("k", "b*"), ("k", "c"), ("k", "*a*")}
    assert set(root.by_key) == {"*"}


class TestDomainsInSeveralFiles:
    FIRST = b"domain: d\ndescriptors: [{key: k, value: a*}, {key: x}]"
    SECOND = b"domain: d\ndescriptors: [{key: k, value: '*'}]"

    def test_domain_in_two_files_is_an_error_naming_both(self) -> None:
        with pytest.raises(RulesError) as raised:
            compile_documents({"b.yaml": self.FIRST, "a.yaml": self.SECOND})

        (problem,) = raised.value.problems
        assert problem.file == "b.yaml"
        assert "duplicate domain 'd' in config file" in problem.message
        assert "a.yaml:1:9" in problem.message
        assert "MERGE_DOMAIN_CONFIG=true" in problem.message

    @pytest.mark.parametrize("turn", [1, -1])
    def test_merged_files_are_processed_in_name_order(self, turn: int) -> None:
        sources = [SourceDocument("a.yaml", self.FIRST), SourceDocument("b.yaml", self.SECOND)][::turn]

        root = compile_documents(sources, merge_domains=True).tree.domains["d"]

        assert [wildcard.node.value for wildcard in root.wildcards] == ["a*", "*"]
        assert set(root.by_key) == {"x"}

    def test_descriptor_in_two_files_is_an_error_naming_both(self) -> None:
        with pytest.raises(RulesError) as raised:
            compile_documents({"a.yaml": self.FIRST, "b.yaml": self.FIRST}, merge_domains=True)

        assert [problem.file for problem in raised.value.problems] == ["b.yaml", "b.yaml"]
        assert "duplicate descriptor composite key 'd.k_a*'; the same descriptor is at a.yaml:2:15" in str(raised.value)

    def test_file_with_duplicate_domain_is_still_checked(self) -> None:
        with pytest.raises(RulesError, match="descriptor has empty key"):
            compile_documents({"a.yaml": b"domain: d", "b.yaml": b"domain: d\ndescriptors: [{value: x}]"})

    def test_domain_charge_applies_to_all_its_files(self) -> None:
        files = {
            "a.yaml": b"domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}]",
            "b.yaml": b"domain: d\ncharge: admitted",
        }

        (rule,) = compile_documents(files, merge_domains=True).tree.rules()

        assert rule.charge is Charge.ADMITTED

    def test_conflicting_domain_charges_are_an_error(self) -> None:
        with pytest.raises(RulesError, match=r"b\.yaml:2:9: .*different charge at a\.yaml:2:9"):
            compile_documents(
                {"a.yaml": b"domain: d\ncharge: admitted", "b.yaml": b"domain: d\ncharge: always"}, merge_domains=True
            )


class TestAlgorithms:
    def test_default_algorithm_is_fixed_window_without_burst(self) -> None:
        assert _rule("unit: minute, requests_per_unit: 5").limits == (Limit(5, Unit.MINUTE, Algorithm.FIXED_WINDOW, 0),)

    @pytest.mark.parametrize("algorithm", [algorithm for algorithm in Algorithm if algorithm.has_burst])
    def test_burst_defaults_to_the_limit(self, algorithm: Algorithm) -> None:
        limit = f"unit: minute, requests_per_unit: 5, algorithm: {algorithm.value}"

        assert _rule(limit).limits == (Limit(5, Unit.MINUTE, algorithm, 5),)
        assert _rule(f"{limit}, burst: 9").limits == (Limit(5, Unit.MINUTE, algorithm, 9),)

    @pytest.mark.parametrize("algorithm", Algorithm)
    def test_zero_limit_compiles_to_a_fixed_window(self, algorithm: Algorithm) -> None:
        rule = _rule(f"unit: minute, requests_per_unit: 0, algorithm: {algorithm.value}")

        assert rule.limits == (Limit(0, Unit.MINUTE, Algorithm.FIXED_WINDOW),)

    def test_values_at_the_bounds_are_allowed(self) -> None:
        assert _rule("unit: year, requests_per_unit: 10000, algorithm: sliding_log").limits
        assert _rule("unit: year, requests_per_unit: 1, algorithm: gcra, burst: 71").limits
        assert _rule("unit: year, requests_per_unit: 4294967295, algorithm: gcra, burst: 4294967295").limits

    def test_burst_that_refills_too_slowly_is_rejected(self) -> None:
        with pytest.raises(RulesError, match="years to refill"):
            _rule("unit: second, requests_per_unit: 1, algorithm: gcra, burst: 4294967295")


CHARGES = [
    # the rule's grammar, the rule's charge, the domain's charge, STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT, expected
    # charge
    ("", "", "", False, Charge.ALWAYS),
    ("", "", "", True, Charge.ADMITTED),
    (", algorithm: fixed_window", "", "", False, Charge.ADMITTED),
    (", algorithm: gcra, burst: 2", "", "", False, Charge.ADMITTED),
    ("", "", "charge: admitted", False, Charge.ADMITTED),
    (", algorithm: gcra", "", "charge: always", False, Charge.ALWAYS),
    ("", "", "charge: always", True, Charge.ALWAYS),
    ("", "charge: admitted", "charge: always", False, Charge.ADMITTED),
    (", algorithm: gcra", "charge: always", "charge: admitted", True, Charge.ALWAYS),
]


@pytest.mark.parametrize(("grammar", "rule_charge", "domain_charge", "stop_increment", "expected"), CHARGES)
def test_charge_comes_from_rule_then_domain_then_grammar(
    grammar: str, rule_charge: str, domain_charge: str, stop_increment: bool, expected: Charge
) -> None:
    text = f"""
domain: d
{domain_charge}
descriptors:
  - key: k
    {rule_charge}
    rate_limit: {{unit: minute, requests_per_unit: 5{grammar}}}
"""
    (rule,) = _rules(text, default_admitted=stop_increment).values()

    assert rule.charge is expected


def test_count_rules_counts_all_levels() -> None:
    text = """
domain: d
descriptors:
  - {key: k, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: k, value: v, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: k, value: w*, descriptors: [{key: l, rate_limit: {unit: day, requests_per_unit: 1}}]}
  - key: k
    match: {prefix: x}
    rate_limit: {unit: day, requests_per_unit: 1}
    descriptors:
      - key: l
        value: m
        descriptors: [{key: n, match: {prefix: o}, rate_limit: {unit: day, requests_per_unit: 1}}]
"""
    tree = compile_documents({"f.yaml": text.encode(), "g.yaml": b"domain: e"}).tree

    paths = ["d.k", "d.k_prefix(x)", "d.k_prefix(x).l_m.n_prefix(o)", "d.k_v", "d.k_w*.l"]
    assert [rule.path for rule in tree.rules()] == paths
    assert tree.count_rules() == 5


def test_digest_depends_on_ordered_text_not_on_names() -> None:
    def digest(**files: str) -> str:
        return compile_documents({name: text.encode() for name, text in files.items()}).digest

    assert digest(a="domain: x", b="domain: y") == digest(c="domain: x", d="domain: y")
    assert digest(a="domain: x", b="domain: y") != digest(a="domain: y", b="domain: x")
    assert digest(a="domain: x") != digest(a="domain: x ")


def test_no_files_compile_to_no_domains() -> None:
    compiled = compile_documents({})

    assert (compiled.tree.domains, compiled.files) == ({}, 0)


def test_every_grammar_key_has_a_reader_and_a_field() -> None:
    for readers, keys, document in (
        (document_module._DESCRIPTOR_READERS, DESCRIPTOR_KEYS, DescriptorDocument),
        (document_module._LIMIT_READERS, RATE_LIMIT_KEYS, RateLimitDocument),
    ):
        assert readers.keys() == keys.keys()
        assert {field.name for field in fields(document)} == {*keys, "position", "is_broken"}


def _expressions(key: str, number: int) -> str:
    return "".join(f"  - key: {key}\n    match: {{regex: a{index}}}\n" for index in range(number))


def test_expressions_of_a_key_at_one_level_are_bounded() -> None:
    within = _expressions("a", MAX_EXPRESSIONS) + _expressions("b", MAX_EXPRESSIONS) + "  - key: a\n"
    compile_documents({"f.yaml": f"domain: d\ndescriptors:\n{within}".encode()})

    with pytest.raises(RulesError) as caught:
        compile_documents({"f.yaml": f"domain: d\ndescriptors:\n{_expressions('a', MAX_EXPRESSIONS + 9)}".encode()})

    (problem,) = caught.value.problems  # one, not one for each
    assert (problem.line, problem.column) == (2 + 2 * MAX_EXPRESSIONS + 2, 12)
    assert f"key 'a' has more than {MAX_EXPRESSIONS} regular expressions at this level" in problem.message
    assert "join some with '|', or use prefix, cidr" in problem.message


def test_other_patterns_are_not_bounded() -> None:
    lines = "".join(f"  - {{key: a, match: {{prefix: 'a{index}'}}}}\n" for index in range(MAX_EXPRESSIONS + 1))

    compiled = compile_documents({"f.yaml": f"domain: d\ndescriptors:\n{lines}".encode()})

    assert len(compiled.tree.domains["d"].patterns["a"]) == MAX_EXPRESSIONS + 1
