"""`show --format yaml` writes equivalent rules, for any texts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ratelimit_rls.cli.canonical_yaml import canonical_documents
from ratelimit_rls.cli.yaml_text import yaml_text
from ratelimit_rls.core.model import OnStoreFailure
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.source_document import SourceDocument, load
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar

# No deadline: the machine may be busy.
patiently = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

NUMBERS = ["1e3", "12e5", "1E3", "1.e3", "+1.5e-3", ".5", "1_000", "0x1F", "0b1", "0o17", "-.inf", ".nan", "1" * 30]
WORDS = ["y", "No", "~", "null", "<<", "=", "-", "?", "1:30", "2001-01-01", "---", "...", "&a", "*a", "!!str a", "# a"]
texts = st.one_of(
    st.sampled_from(NUMBERS + WORDS + ["\x85", "a\x85b", "a\u2028", "\u2029a", "a\r\nb", "\ufeff", "\x00", "\x7f"]),
    st.text("0123456789eE.+-_xXobn", max_size=8),
    st.text("a \n\t\r\x85\u2028:#-'\"\\,[]{}", max_size=12),
    st.text(max_size=12),
    st.text("ab ", min_size=120, max_size=200),  # longer than a line
)


def plain(node: YamlNode | None) -> Any:
    """Return the values of a node, with the types of its scalars."""
    if isinstance(node, YamlList):
        return [plain(item) for item in node.items]
    if isinstance(node, YamlMap):
        return {plain(key): plain(value) for key, value in node.fields()}
    assert isinstance(node, YamlScalar)
    return node.value


@pytest.mark.parametrize("parser", [yaml.CSafeLoader, yaml.SafeLoader], ids=["libyaml", "python"])
@patiently
@given(texts, texts, texts)
def test_every_text_round_trips(parser: type[yaml.SafeLoader], key: str, value: str, inner: str) -> None:
    document = {"domain": value, key: [value, {inner: key, "a": [inner]}], "number": 5, "part": 0.25, "yes": True}
    assert plain(load(SourceDocument("f", yaml_text([document]).encode()), parser)) == document


def escaped(text: str) -> str:
    """Return the text with every character escaped."""
    return '"' + "".join(f"\\U{ord(character):08X}" for character in text) + '"'


@patiently
@given(texts.filter(bool), texts.filter(bool), texts, texts, texts)
@example("edge", "1e3", "12e5", "1E3", "1.e3")
@example("1e3", "\x85", "a\x85", "\x85a", "a\u2028b")
def test_rules_round_trip(domain: str, key: str, value: str, name: str, text: str) -> None:
    limit = f"{{unit: minute, requests_per_unit: 5, name: {escaped(name)}}}"
    text = escaped(text.replace("$", ""))
    written = (
        f"domain: {escaped(domain)}\n"
        f"deny: {{body: {text}}}\n"
        f"ext_authz: {{descriptors: [{{entries: [{{key: {escaped(key)}, query: {escaped(key)}}}]}}]}}\n"
        f"descriptors:\n"
        f"- {{key: {escaped(key)}, value: {escaped(value)}, rate_limit: {limit}, metadata: {{{text}: {text}}}}}\n"
    )
    try:
        before = compile_documents({"f": written.encode()})
    except RulesError:
        assume(False)
    again = compile_documents({"f": yaml_text(canonical_documents(before, with_places=False)).encode()})
    assert canonical_documents(again, with_places=False) == canonical_documents(before, with_places=False)
    assert again.tree.mappings == before.tree.mappings


words = st.none() | st.sampled_from([policy.value for policy in OnStoreFailure])
limits = st.none() | st.sampled_from([{"unlimited": True}, {"unit": "minute", "requests_per_unit": 5}])


@st.composite
def levels(draw: st.DrawFn, depth: int = 3) -> list[dict[str, Any]]:
    """Draw the descriptors of one level, with inherited settings and nested descriptors."""
    level: list[dict[str, Any]] = []
    for key in draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3 if depth else 0)):
        limit, lease, word = draw(limits), draw(st.sampled_from([None, "1ms", "10s"])), draw(words)
        descriptor: dict[str, Any] = {"key": key, "rate_limit": limit, "on_store_failure": word}
        if lease and limit and "unit" in limit:  # type: ignore[operator]
            descriptor["hot"] = {"lease": lease}
        below = draw(levels(depth - 1))
        written = {name: value for name, value in descriptor.items() if value is not None}
        level.append({**written, "descriptors": below} if below else written)
    return level


def meaning(tree: Tree) -> list[object]:
    """Return everything in a tree except positions."""
    (root,) = tree.domains.values()
    return [root.on_store_failure, root.shard_by, *(rule._replace(position=None) for rule in tree.rules())]


@pytest.mark.slow
@patiently
@given(words, st.sampled_from(["descriptor", "domain", {"key": "a"}]), levels())
def test_inherited_settings_round_trip(
    word: str | None, shard_by: str | dict[str, str], level: list[dict[str, Any]]
) -> None:
    of_domain = {"domain": "d", "shard_by": shard_by, **({"on_store_failure": word} if word else {})}
    before = compile_documents({"f": yaml_text([{**of_domain, "descriptors": level}]).encode()})

    written = canonical_documents(before, with_places=False)

    again = compile_documents({"f": yaml_text(written).encode()})
    assert meaning(again.tree) == meaning(before.tree)
    assert canonical_documents(again, with_places=False) == written
