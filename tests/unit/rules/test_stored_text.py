"""A stored rule as a file and back: nothing is lost, and what is wrong in the first line is told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.accounts import LONGEST_ID, Scope, StoredRule, Targeting
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.sources.database import check_rule
from ratelimit_rls.rules.sources.files import PlainPaths
from ratelimit_rls.rules.stored_text import LONGEST_FILE_NAME, file_name, joined, rule_of, rules_of, text_of

names = st.text(min_size=1, max_size=LONGEST_ID).filter(str.isprintable)
some = st.lists(st.text(max_size=5), max_size=3).map(tuple)
rules = st.builds(
    StoredRule,
    rule_id=st.just(""),
    name=names,
    document=st.text(max_size=50) | st.just("# ratelimit-rls: {}\r\ndomain: x"),
    priority=st.integers(-(2**31), 2**31 - 1),
    enabled=st.booleans(),
    targeting=st.builds(Targeting, some, some, some, some, st.none() | st.sampled_from(Scope)),
)


def test_everything_but_the_document_is_in_the_first_line() -> None:
    targeting = Targeting(("free",), ("/v1/*",), ("GET",), ("10.0.0.0/8",), Scope.USER)
    rule = StoredRule("", "five", "# why\ndomain: x\n", 5, enabled=False, targeting=targeting)
    assert text_of(rule) == (
        '# ratelimit-rls: {"name": "five", "priority": 5, "enabled": false, "targeting": {"tiers": ["free"], '
        '"endpoints": ["/v1/*"], "methods": ["GET"], "cidrs": ["10.0.0.0/8"], "scope": "user"}}\n# why\ndomain: x\n'
    )
    assert rule_of(text_of(rule), "f", "f.yaml") == rule


@pytest.mark.slow
@settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(rules)
def test_a_rule_comes_back_and_its_text_is_the_same_again(rule: StoredRule) -> None:
    text = text_of(rule)
    again = rule_of(text, "another name", "f.yaml")
    assert again == replace(rule, document=rule.document.removeprefix("\ufeff"))
    assert text_of(again) == text


DOCUMENTS = (
    "domain: x\n",
    "domain: ü",  # without an end
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


def test_several_rules_in_one_text_come_back_as_they_were() -> None:
    stored = [StoredRule("", f"r{number}", document) for number, document in enumerate(DOCUMENTS)]
    for order in (stored, stored[::-1]):
        text = joined(order)
        found = rules_of(text, "f", "f.yaml")
        assert [one.rule for one in found] == order
        lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
        assert [lines[one.line - 1] for one in found] == [text_of(rule).partition("\n")[0] for rule in order]
    for one in stored:
        assert [found.rule for found in rules_of(joined([one]), "f", "f.yaml")] == [one]
    assert joined([]) == ""


@given(st.lists(rules.filter(lambda rule: "---" not in rule.document), min_size=1, max_size=5))
def test_whatever_is_joined_is_parted_again(some: list[StoredRule]) -> None:
    found = [one.rule for one in rules_of(joined(some), "f", "f.yaml")]
    assert found == [replace(rule, document=rule.document.removeprefix("\ufeff")) for rule in some]


def test_the_first_rule_of_a_file_needs_no_line_of_its_own_and_the_others_do() -> None:
    text = 'domain: a\n---\n# ratelimit-rls: {"name": "b"}\ndomain: b\n'
    assert [(one.rule.name, one.line) for one in rules_of(text, "f", "f.yaml")] == [("f", 1), ("b", 3)]
    text = '# all of them\n---\n# ratelimit-rls: {"priority": 5}\ndomain: a\n'
    assert [(one.rule.name, one.rule.priority, one.line) for one in rules_of(text, "f", "f.yaml")] == [("f", 5, 3)]

    with pytest.raises(RulesError) as refused:
        rules_of("domain: a\n---\ndomain: b\n--- {domain: c}\n", "f", "f.yaml")
    assert [(problem.line, problem.column) for problem in refused.value.problems] == [(2, 1), (4, 1)]
    assert 'nothing names it: write \'# ratelimit-rls: {"name": "…"}\' below this line' in str(refused.value)

    with pytest.raises(RulesError, match=r"^f\.yaml:3:18: error: the name of a rule has 1 to 255"):
        rules_of('domain: a\n---\n# ratelimit-rls: {"priority": 5}\ndomain: b\n', "f", "f.yaml")


def test_a_file_without_a_first_line_of_ours_is_called_like_the_file() -> None:
    assert rule_of("domain: x\n", "mine", "mine.yaml") == StoredRule("", "mine", "domain: x\n")
    assert text_of(StoredRule("", "mine", "domain: x\n")) == '# ratelimit-rls: {"name": "mine"}\ndomain: x\n'


def test_a_mark_of_byte_order_does_not_end_up_on_a_second_line() -> None:
    assert text_of(StoredRule("", "x", "\ufeffdomain: x")) == text_of(StoredRule("", "x", "domain: x"))


@pytest.mark.parametrize(
    ("header", "column", "says"),
    [
        ('{"name"', 25, "what follows '# ratelimit-rls:' is not JSON: Expecting ':' delimiter"),
        ("[" * 100_000, 18, "is not JSON: "),
        ("[]", 18, "it is a mapping, e.g."),
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
def test_a_first_line_that_says_nothing_sensible_is_refused(header: str, column: int, says: str) -> None:
    with pytest.raises(RulesError) as refused:
        rule_of(f"# ratelimit-rls: {header}\ndomain: x", "x", "x.yaml")
    (problem,) = refused.value.problems
    assert (problem.file, problem.line) == ("x.yaml", 1)
    assert says in problem.message
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


def test_every_name_has_a_file_of_its_own_that_is_read_as_rules(tmp_path: Path) -> None:
    for name in ODD:
        (tmp_path / file_name(name)).write_text(name)
    assert sorted(path.read_text() for path in PlainPaths((tmp_path,)).files()) == sorted(ODD)
    assert len({file_name(name).lower() for name in ODD}) == len(ODD)
    assert all(len(file_name(name)) <= LONGEST_FILE_NAME + len(".yaml") for name in ODD)
    assert file_name("free_tier") == "free_tier.yaml"


def test_the_page_shows_a_rule_that_means_what_it_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "stored_rules.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    rule = rule_of(block, "page", "page.yaml")
    (found,) = check_rule([rule]).tree.rules()
    assert (rule.name, found.path) == ("free_tier", "edge.tier_free.user")
