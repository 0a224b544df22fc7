"""Hostile rules files are rejected with a message, quickly and in bounded memory."""

from __future__ import annotations

import tracemalloc
from time import process_time

import pytest
import yaml

from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.source_document import MAX_BYTES, SourceDocument, load
from ratelimit_rls.yaml import parser as load_module
from ratelimit_rls.yaml.parser import MAX_DEPTH


def _billion_laughs() -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    return "\n".join(lines)


def _ladder() -> str:
    return "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))


def _staircase() -> str:
    return "domain: d\n" + "".join(f"{'  ' * n}descriptors:\n{'  ' * n}- key: a\n" for n in range(120))


def _merge_bomb() -> str:
    wide = "&w {" + ", ".join(f"k{n}: 1" for n in range(2000)) + "}"
    return f"metadata: {wide}\ndescriptors:\n" + "  - {<<: *w}\n" * 1000


HOSTILE = {
    "billion laughs": (_billion_laughs(), "excessive aliasing"),
    "aliases deeper than the text": (_ladder(), "levels deep"),
    "merged without end": (_merge_bomb(), "excessive aliasing"),
    "flow lists in lists": ("[" * 200_000, "levels deep"),
    "flow maps in maps": ("{a: " * 200_000, "levels deep"),
    "block lists in lists": ("- " * 100_000 + "x", "levels deep"),
    "keys in keys": ("? " * 100_000 + "x", "levels deep"),
    "descriptors in descriptors": (_staircase(), "levels deep"),
    "too large": ("#" * (MAX_BYTES + 1), "larger than 16 MiB"),
    "python object": ("!!python/object/apply:os.system ['exit 1']", "has no meaning here"),
    "python name": ("domain: !!python/name:os.system x", "has no meaning here"),
    "own tag": ("domain: !secret x", "tag '!secret' has no meaning"),
    "escape beyond unicode": ('domain: "\\UFFFFFFFF"', "error loading config file"),
    "half a surrogate": ('domain: "\\ud800"', "error loading config file"),
    "nul": ("domain: a\n  \0", "control characters are not allowed: U+0000"),
}


@pytest.mark.parametrize("parser", [None, yaml.CSafeLoader, yaml.SafeLoader], ids=["plain first", "libyaml", "python"])
@pytest.mark.parametrize(("text", "sentence"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_yaml_is_rejected(text: str, sentence: str, parser: type[yaml.SafeLoader] | None) -> None:
    with pytest.raises(RulesError, match="error loading config file") as raised:
        load(SourceDocument("f", text.encode()), parser)

    assert sentence in str(raised.value)


def test_node_limit_is_enforced_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MAX_NODES", 1000)

    assert load(SourceDocument("f", b"[" + b"a," * 999 + b"]")) is not None
    assert load(SourceDocument("f", b"a: [" + b"a," * 996 + b"a]")) is not None
    for too_many in (b"[" + b"a," * 1000 + b"]", b"a: [" + b"a," * 997 + b"a]"):
        with pytest.raises(RulesError, match="more than 1,000 nodes"):
            load(SourceDocument("f", too_many))


LONG_BLOCKS = {
    "one family again and again": f"answer: {{headers: [{'ietf, ' * 20_000}]}}",
    "one key again and again": f"penalty: {{{'after: 1, ' * 10_000}}}",
    "a list without end": f"penalty: {{multipliers: [{'1, ' * 20_000}]}}",
    "headers without end": f"deny: {{headers: {{{', '.join(f'x-{n}: a' for n in range(10_000))}}}}}",
    "a body of holes": f"deny: {{body: '{'${rule}' * 1_000_000}'}}",
    "a header of holes": f"deny: {{headers: {{x-a: '{'${rule}' * 1_000_000}'}}}}",
}


@pytest.mark.slow
@pytest.mark.parametrize("block", LONG_BLOCKS.values(), ids=LONG_BLOCKS.keys())
def test_unclosed_block_is_rejected_with_a_short_message(block: str) -> None:
    with pytest.raises(RulesError) as raised:
        compile_documents({"f": f"domain: d\ndescriptors:\n  - key: k\n    {block}\n".encode()})

    assert len(raised.value.problems) < 10


def test_alias_bomb_is_rejected_in_bounded_time_and_memory() -> None:
    bomb = _billion_laughs().encode()
    tracemalloc.start()
    began = process_time()

    with pytest.raises(RulesError):
        compile_documents({"f": bomb})

    spent, (_, peak) = process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent < 2
    assert peak < 20 * 2**20


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"domain: \xff\xfe", (1, 9)),
        (b"a: 1\nb: \xc3(", (2, 4)),
        (b"\xff\xfe\x00", (1, 3)),
        (b"\x7fELF\x02\x01", (1, 1)),
    ],
)
def test_binary_content_is_rejected_at_its_first_bad_byte(content: bytes, place: tuple[int, int]) -> None:
    with pytest.raises(RulesError, match=r"UTF-8|control characters") as raised:
        load(SourceDocument("f", content))

    (problem,) = raised.value.problems
    assert (problem.line, problem.column) == place


def test_maximum_depth_still_compiles() -> None:
    levels = MAX_DEPTH // 2 - 1
    text = "domain: d\n" + "descriptors: [{key: a, " * levels + "value: b" + "}]" * levels

    node = compile_documents({"f": text.encode()}).tree.domains["d"]

    for _ in range(levels - 1):
        node = node.by_key["a"]
    assert ("a", "b") in node.exact


@pytest.mark.slow
def test_many_duplicate_keys_take_linear_time() -> None:
    text = "domain: d\ndescriptors:\n  - key: a\n" + "    rate_limit: {unit: second, requests_per_unit: 1}\n" * 5_000
    began = process_time()

    compile_documents({"f": text.encode()})

    assert process_time() - began < 5
