"""docs/descriptors.md: every example loads without a warning and behaves as described, and every key has an example."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratelimit_rls.core.model import Algorithm, OnStoreFailure, Unit
from ratelimit_rls.core.response_policy import BodyFormat, HeaderFamily
from ratelimit_rls.core.storage_keys import ShardBy
from ratelimit_rls.core.template import Placeholder
from ratelimit_rls.rules import ext_authz, identity
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.grammar import CONTEXTS
from ratelimit_rls.rules.penalties import PENALTY_KEYS
from ratelimit_rls.rules.responses import ANSWER_KEYS, DENY_KEYS
from ratelimit_rls.rules.rule import HOT_KEYS, Action
from ratelimit_rls.rules.source_document import SourceDocument, load
from ratelimit_rls.simulation.runner import run_suite
from ratelimit_rls.simulation.suite import read_suite
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar

PAGE = (Path(__file__).parents[3] / "docs" / "descriptors.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
RULES = [block for block in BLOCKS if block.startswith("domain:")]
PLAYED = [pair for pair in itertools.pairwise(BLOCKS) if pair[1].startswith("tests:")]


def domain(rules: str) -> str:
    return rules.split()[1]


def test_every_yaml_block_is_rules_or_tests_of_the_rules_above() -> None:
    assert len(RULES) + len(PLAYED) == len(BLOCKS)
    assert all(rules in RULES for rules, _ in PLAYED)
    assert len(RULES) > 15
    assert len(PLAYED) > 10


@pytest.mark.parametrize("rules", RULES, ids=domain)
def test_documented_example_loads_without_warnings(rules: str) -> None:
    assert compile_documents({"example.yaml": rules.encode()}).warnings == ()


@pytest.mark.parametrize(("rules", "tests"), PLAYED, ids=[domain(rules) for rules, _ in PLAYED])
async def test_documented_example_behaves_as_described(rules: str, tests: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rules)
    file = tmp_path / "example.test.yaml"
    file.write_text(f"descriptors: rules.yaml\ndomain: {domain(rules)}\n{tests}")

    outcomes = await run_suite(read_suite(file))

    assert [difference for outcome in outcomes for difference in outcome.differences] == []


def written_keys(node: YamlNode | None, place: str) -> Iterator[tuple[str, str]]:
    """Yield every key of an example with the kind of mapping that contains it."""
    if isinstance(node, YamlList):
        for item in node.items:
            yield from written_keys(item, place)
    elif isinstance(node, YamlMap):
        for key, value in node.fields():
            assert isinstance(key, YamlScalar)
            yield place, key.text
            yield from written_keys(value, INSIDE.get((place, key.text), key.text))


# The kind of mapping under a key, where it differs from the key.
INSIDE = {
    ("file", "descriptors"): "descriptor",
    ("descriptor", "descriptors"): "descriptor",
    ("descriptor", "limits"): "rate_limit",
    ("descriptor", "metadata"): "anything",
    ("ext_authz", "descriptors"): "mapped descriptor",
    ("mapped descriptor", "entries"): "mapped entry",
    ("mapped entry", "metadata"): "mapped metadata",
    ("identity", "credentials"): "credential place",
    ("identity", "entries"): "credential entry",
    ("answer", "headers"): "families",
    ("deny", "headers"): "names",
    ("ext_authz", "upstream_headers"): "names",
}
KEYS = {
    **{place: set(keys) for place, keys in CONTEXTS.items()},
    "penalty": set(PENALTY_KEYS),
    "hot": set(HOT_KEYS),
    "answer": set(ANSWER_KEYS),
    "deny": set(DENY_KEYS),
    "ext_authz": set(ext_authz.MAPPING_KEYS),
    "mapped descriptor": set(ext_authz.DESCRIPTOR_KEYS),
    "mapped entry": set(ext_authz.ENTRY_KEYS),
    "mapped metadata": set(ext_authz.METADATA_KEYS),
    "identity": set(identity.IDENTITY_KEYS),
    "credential place": set(identity.LOCATION_KEYS),
    "credential entry": set(identity.ENTRY_KEYS),
}


def test_every_grammar_key_has_a_documented_example() -> None:
    written = {found for rules in RULES for found in written_keys(load(SourceDocument("f", rules.encode())), "file")}

    missing = {(place, key) for place, keys in KEYS.items() for key in keys} - written

    assert missing == set()


WORDS = [
    *(action.value for action in Action),
    *(algorithm.value for algorithm in Algorithm),
    *(policy.value for policy in OnStoreFailure),
    *(shard_by.value for shard_by in ShardBy),
    *(family.value for family in HeaderFamily),
    *(body.value for body in BodyFormat if body is not BodyFormat.TEXT),
    *(f"${{{hole.value}}}" for hole in Placeholder),
]


@pytest.mark.parametrize("word", WORDS)
def test_every_enum_value_is_documented(word: str) -> None:
    assert re.search(rf"`[^`\n]*{re.escape(word)}[^`\n]*`", PAGE)


def test_every_unit_is_documented() -> None:
    assert all(unit.name.lower() in PAGE for unit in Unit if unit is not Unit.UNKNOWN)
