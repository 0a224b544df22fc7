"""The file format of stored rules is lossless, and errors in its header are reported."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.names import MAX_ID_LENGTH
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.sources.database import check_rules
from ratelimit_rls.rules.sources.files import PlainPaths
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting
from ratelimit_rls.rules.stored_rule_format import (
    MAX_FILE_NAME_LENGTH,
    file_name,
    format_rule,
    format_rules,
    parse_rule,
    parse_rules,
)

names = st.text(min_size=1, max_size=MAX_ID_LENGTH).filter(str.isprintable)
some = st.lists(st.text(max_size=5), max_size=3).map(tuple)
rules = st.builds(
    StoredRule,
    rule_id=st.just(""),
    name=names,
    document=st.text(max_size=50) | st.just("# ratelimit-rls: {}\r\ndomain: x"),
    priority=st.integers(-(2**31), 2**31 - 1),
    enabled=st.booleans(),
    targeting=st.builds(Targeting, some, some, some, some, st.none() | st.sampled_from(CounterScope)),
)


def test_first_line_has_all_fields_but_the_document() -> None:
    targeting = Targeting(("free",), ("/v1/*",), ("GET",), ("10.0.0.0/8",), CounterScope.USER)
    rule = StoredRule("", "five", "# why\ndomain: x\n", 5, enabled=False, targeting=targeting)
    assert format_rule(rule) == (
        '# ratelimit-rls: {"name": "five", "priority": 5, "enabled": false, "targeting": {"tiers": ["free"], '
        '"endpoints": ["/v1/*"], "methods": ["GET"], "cidrs": ["10.0.0.0/8"], "scope": "user"}}\n# why\ndomain: x\n'
    )
    assert parse_rule(format_rule(rule), "f", "f.yaml") == rule


@pytest.mark.slow
@settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(rules)
def test_single_rule_round_trip_is_lossless(rule: StoredRule) -> None:
    text = format_rule(rule)
    again = parse_rule(text, "another name", "f.yaml")
    assert again == replace(rule, document=rule.document.removeprefix("\ufeff"))
    assert format_rule(again) == text


DOCUMENTS = (
    "domain: x\n",
    "domain: ü",  # without a final line break
    "domain: x\r\ndescriptors: []\r\n",
    "domain: x\r",
    "domain: x # why\n\n\n",
    "---\ndomain: x\n",
    "# why\r\n---\r\ndomain: x\r\n...\r\n",
    "domain: x\n---\n",
    "domain: x\n---",
    "domain: x\n...\n# why",
    "domain: x\ndeny:\n  body: |+\n    ---\n    # ratelimit-rls: {}\n\n\n",
    "# ratelimit-rls: {}\ndomain: x",
    "domain: x\u2028descriptors: []\x85",
    "",
)


def test_several_rules_round_trip_is_lossless() -> None:
    stored = [StoredRule("", f"r{number}", document) for number, document in enumerate(DOCUMENTS)]
    for order in (stored, stored[::-1]):
        text = format_rules(order)
        found = parse_rules(text, "f", "f.yaml")
        assert [one.rule for one in found] == order
        lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
        assert [lines[one.line - 1] for one in found] == [format_rule(rule).partition("\n")[0] for rule in order]
    for one in stored:
        assert [found.rule for found in parse_rules(format_rules([one]), "f", "f.yaml")] == [one]
    assert format_rules([]) == ""


@given(st.lists(rules.filter(lambda rule: "---" not in rule.document), min_size=1, max_size=5))
def test_random_rules_round_trip_is_lossless(some: list[StoredRule]) -> None:
    found = [one.rule for one in parse_rules(format_rules(some), "f", "f.yaml")]
    assert found == [replace(rule, document=rule.document.removeprefix("\ufeff")) for rule in some]


def test_only_the_first_rule_of_a_file_may_omit_the_header() -> None:
    text = 'domain: a\n---\n# ratelimit-rls: {"name": "b"}\ndomain: b\n'
    assert [(one.rule.name, one.line) for one in parse_rules(text, "f", "f.yaml")] == [("f", 1), ("b", 3)]
    text = '# all of them\n---\n# ratelimit-rls: {"priority": 5}\ndomain: a\n'
    assert [(one.rule.name, one.rule.priority, one.line) for one in parse_rules(text, "f", "f.yaml")] == [("f", 5, 3)]

    with pytest.raises(RulesError) as raised:
        parse_rules("domain: a\n---\ndomain: b\n--- {domain: c}\n", "f", "f.yaml")
    assert [(problem.line, problem.column) for problem in raised.value.problems] == [(2, 1), (4, 1)]
    assert 'without a name: write \'# ratelimit-rls: {"name": "…"}\' below this line' in str(raised.value)

    with pytest.raises(RulesError, match=r"^f\.yaml:3:18: error: the name of a rule has 1 to 255"):
        parse_rules('domain: a\n---\n# ratelimit-rls: {"priority": 5}\ndomain: b\n', "f", "f.yaml")


def test_rule_without_header_is_named_like_the_file() -> None:
    assert parse_rule("domain: x\n", "mine", "mine.yaml") == StoredRule("", "mine", "domain: x\n")
    assert format_rule(StoredRule("", "mine", "domain: x\n")) == '# ratelimit-rls: {"name": "mine"}\ndomain: x\n'


def test_byte_order_mark_is_dropped_on_export() -> None:
    assert format_rule(StoredRule("", "x", "\ufeffdomain: x")) == format_rule(StoredRule("", "x", "domain: x"))


@pytest.mark.parametrize(
    ("header", "column", "message"),
    [
        ('{"name"', 25, "what follows '# ratelimit-rls:' is not JSON: Expecting ':' delimiter"),
        ("[" * 100_000, 18, "is not JSON: "),
        ("[]", 18, "must be a mapping, e.g."),
        ('{"nmae": "x"}', 18, "unknown key 'nmae'; did you mean 'name'?"),
        ('{"name": ""}', 18, "the name of a rule has 1 to 255 characters"),
        ('{"name": "a\\u0000"}', 18, "that can be printed"),
        ('{"name": 5}', 18, "the name of a rule has"),
        ('{"priority": true}', 18, "'priority' is a whole number from -2147483648 to 2147483647"),
        ('{"priority": 2147483648}', 18, "'priority' is a whole number"),
        ('{"enabled": 1}', 18, "'enabled' is true or false"),
        ('{"targeting": []}', 18, "'targeting' is a mapping"),
        ('{"targeting": {"tier": []}}', 18, "unknown key 'tier'; did you mean 'tiers'?"),
        ('{"targeting": {"tiers": "free"}}', 18, "'targeting.tiers' is a list of texts"),
        ('{"targeting": {"scope": "usr"}}', 18, "scope 'usr' is not one of global, tenant, user"),
    ],
)
def test_invalid_header_is_rejected(header: str, column: int, message: str) -> None:
    with pytest.raises(RulesError) as raised:
        parse_rule(f"# ratelimit-rls: {header}\ndomain: x", "x", "x.yaml")
    (problem,) = raised.value.problems
    assert (problem.file, problem.line) == ("x.yaml", 1)
    assert message in problem.message
    assert problem.column == column or "nested" in problem.message or len(header) > 1000


ODD = [
    "a",
    "A",
    "..",
    ".",
    ".hidden",
    "x.test",
    "a/b",
    "a%2Fb",
    "../../etc/passwd",
    "ü" * 255,
    "ü" * 254 + "v",
    "a b",
    "~",
]


def test_file_names_are_unique_and_read_as_rules(tmp_path: Path) -> None:
    for name in ODD:
        (tmp_path / file_name(name)).write_text(name)
    assert sorted(path.read_text() for path in PlainPaths((tmp_path,)).files()) == sorted(ODD)
    assert len({file_name(name).lower() for name in ODD}) == len(ODD)
    assert all(len(file_name(name)) <= MAX_FILE_NAME_LENGTH + len(".yaml") for name in ODD)
    assert file_name("free_tier") == "free_tier.yaml"


def test_documented_stored_rule_is_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "stored_rules.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    rule = parse_rule(block, "page", "page.yaml")
    (found,) = check_rules([rule]).tree.rules()
    assert (rule.name, found.path) == ("free_tier", "edge.tier_free.user")
