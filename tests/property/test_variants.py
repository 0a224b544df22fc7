"""Repeated items in rules have the same meaning and diagnostics as if each were read alone."""

from __future__ import annotations

import random

import pytest

from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules import descriptor as descriptor_module
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.document import read_document
from ratelimit_rls.rules.source_document import SourceDocument, load
from ratelimit_rls.rules.stored_rule import Targeting
from ratelimit_rls.yaml import parser as load_module
from ratelimit_rls.yaml.findings import Findings

LIMIT = "{unit: day, requests_per_unit: 5}"
PLAIN_ITEMS = [
    f"- {{key: k, value: V, rate_limit: {LIMIT}}}",
    f"- {{key: k, value: 'V', rate_limit: {LIMIT}}}   # quoted",
    "- key: k\n  value: V\n  rate_limit:\n    unit: day\n    requests_per_unit: 5",
    f"-   value: V\n    key: l\n    rate_limit: {LIMIT}\n\n# a comment between",
    f"- {{key: k, value: V, on_store_failure: allow, rate_limit: {LIMIT}}}",
    f"- {{key: k, value: V, metadata: {{value: a, b: [c]}}, rate_limit: {LIMIT}}}",
    "- {key: k, value: V}",
]
ODD_ITEMS = [
    f"- {{key: k, metadata: {{value: V, b: [c]}}, value: V, rate_limit: {LIMIT}}}",
    f"- key: k\n  metadata:\n    value: V\n  rate_limit: {LIMIT}",
    "- {key: k, value: V, rate_limit: {unit: day, requests_per_unit: 0}}",
    "- {key: k, value: V, rate_limit: {unit: day, requests_per_unit: 5, name: n, replaces: [{name: m}]}}",
    "- {key: k, value: V, on_store_failure: deny}",
    "- key: k\n  value: V\n  shadow_mode: true",
    f"- {{key: k, value: V, unit: day, rate_limit: {LIMIT}}}",
    f"- {{value: b, key: k, value: V, rate_limit: {LIMIT}}}",
    f"- {{value: V, key: k, value: b, rate_limit: {LIMIT}}}",
    f"- {{key: k, value: V b, rate_limit: {LIMIT}}}",
    f"- {{key: k, value: V, rate_limit: {LIMIT}, descriptors: [{{key: m, rate_limit: {LIMIT}}}]}}",
    f"- {{key: k*, value: V, rate_limit: {LIMIT}}}",
    f"- {{key: k, value: V, rate_limit: {LIMIT}, descriptors: [{{key: m, value: V, rate_limit: {LIMIT}}}]}}",
    f"- key: k\n  value: V\n  descriptors:\n  - {{key: m, value: a, rate_limit: {LIMIT}}}",
]
WRONG_ITEMS = [
    f"- {{key: k, value: V, rate_limit: {LIMIT}, colour: red}}",
    "- {key: k, value: V, rate_limit: 5}",
    "- {key: k, value: V, rate_limit: {unit: fortnight, requests_per_unit: 5}}",
    f"- {{key: k, value: V, share_threshold: true, rate_limit: {LIMIT}}}",
    f"- {{key: k, value: V, match: {{prefix: a}}, rate_limit: {LIMIT}}}",
    "- {value: V}",
    f"- {{key: k, value: V, rate_limit: {LIMIT}, on_store_failure: sometimes}}",
    "- {key: k, value: V, hot: {lease: V}}",
    "- {key: k, value: V, action: 1.5}",
    "- {key: k, value: V, metadata: {a: .nan}}",
]
VALUES = [*(f"v{number}" for number in range(40)), "12", "0x1f", "true", "/a/b.c", "a@b.c", "a+b=c$d-e"]
ODD_VALUES = [
    "null",
    "1.5",
    "1e3",
    "99999999999999999999",
    "9223372036854775808",
    "a b",
    "v*",
    "~",
    "a,b",
    "é",
    ".5",
    "-",
]


def items(random_: random.Random, kinds: list[str], indent: str) -> str:
    """Return a list with some items of each kind."""
    values = VALUES if random_.random() < 0.7 else VALUES + ODD_VALUES
    some = random_.sample(values, k=12) if random_.random() < 0.8 else random_.choices(values, k=12)
    texts = [random_.choice(kinds).replace("V", value) for value in some]
    return "".join(f"{indent}{line}\n" for text in texts for line in text.split("\n"))


def rules(random_: random.Random) -> str:
    pool = random_.choice((PLAIN_ITEMS, PLAIN_ITEMS, PLAIN_ITEMS + ODD_ITEMS, PLAIN_ITEMS + ODD_ITEMS + WRONG_ITEMS))
    kinds = random_.choices(pool, k=random_.choice((1, 2, 3)))
    text = random_.choice(("", "on_store_failure: deny\n", "charge: admitted\n")) + "domain: d\ndescriptors:\n"
    for key in random_.sample("pqr", k=random_.choice((0, 1, 2))):
        failing = random_.choice(("", "    on_store_failure: allow\n"))
        text += f"  - key: {key}\n{failing}    descriptors:\n{items(random_, kinds, '      ')}"
    return text + items(random_, kinds, "  ")


def meaning(sources: list[SourceDocument]) -> tuple[str, ...]:
    """Return everything observable of the rules, including the order of lookups."""
    try:
        compiled = compile_documents(sources, merge_domains=True)
    except RulesError as error:
        return tuple(map(str, error.problems))
    return (repr(compiled.tree), *map(str, compiled.warnings))


@pytest.mark.parametrize("seed", range(8))
def test_repeated_items_compile_as_if_read_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(seed)
    for _ in range(40):
        sources = [SourceDocument("f", rules(random_).encode(), lines_above=3)]
        if random_.random() < 0.3:
            sources.append(SourceDocument("g", rules(random_).encode()))
        if random_.random() < 0.3:
            sources.append(SourceDocument("s", rules(random_).encode(), rank=7, targeting=Targeting()))
        with_variants = meaning(sources)
        with monkeypatch.context() as patched:
            patched.setattr(load_module, "read_fast", lambda *_: None)
            assert with_variants == meaning(sources), sources


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths of descriptors that were compiled individually."""
    paths: list[str] = []
    original = descriptor_module.compile_rule  # type: ignore[attr-defined]

    def compile_rule(path: str, *others: object) -> object:
        paths.append(path)
        return original(path, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(descriptor_module, "compile_rule", compile_rule)
    return paths


@pytest.mark.parametrize("key", ["", "- key: w\n  descriptors:\n", "- key: w\n  value: x\n  descriptors:\n"])
@pytest.mark.parametrize("item", PLAIN_ITEMS)
def test_few_of_repeated_items_are_compiled(key: str, item: str, compiled: list[str]) -> None:
    lines = [line for number in range(100) for line in item.replace("V", f"v{number}").split("\n")]
    text = f"domain: d\ndescriptors:\n{key}" + "".join(f"{'  ' if key else ''}{line}\n" for line in lines)

    tree = compile_documents({"f": text.encode()}).tree

    assert sum(len(level.exact) for level in tree.levels()) >= 100
    assert len(compiled) < 5


def test_repeated_items_need_not_be_adjacent(compiled: list[str]) -> None:
    branches = [f"- key: w{number}\n  descriptors:\n  - {{key: k, value: v}}\n" for number in range(100)]

    compile_documents({"f": ("domain: d\ndescriptors:\n" + "".join(branches)).encode()})

    assert len([path for path in compiled if path.endswith(".k_v")]) < 5


def test_each_invalid_item_is_reported() -> None:
    found = Findings("f")
    text = "domain: d\ndescriptors:\n" + "".join(
        f"- {{key: k, value: v{number}, metadata: {{a: .nan}}}}\n" for number in range(5)
    )

    read_document(load(SourceDocument("f", text.encode())), found)

    assert [problem.line for problem in found.errors] == [3, 4, 5, 6, 7]


def test_repeated_items_may_differ_in_nested_values() -> None:
    text = "domain: d\ndescriptors:\n" + "".join(
        f"- key: p{number}\n  descriptors:\n"
        f"  - {{key: k, metadata: {{value: v{number}}}, value: v0, rate_limit: {LIMIT}}}\n"
        for number in range(5)
    )

    tree = compile_documents({"f": text.encode()}).tree

    assert [(rule.path, rule.metadata) for rule in tree.rules()] == [
        (f"d.p{number}.k_v0", {"value": f"v{number}"}) for number in range(5)
    ]
