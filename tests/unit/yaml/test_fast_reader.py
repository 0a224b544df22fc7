"""The fast reader equals the parser on its YAML subset, and leaves everything else to the parser."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from time import process_time

import pytest

from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.source_document import SourceDocument, load
from ratelimit_rls.yaml.fast_reader import MAX_FAST_DEPTH, read_fast
from ratelimit_rls.yaml.nodes import YamlNode
from ratelimit_rls.yaml.parser import FASTEST_PARSER

LINES_ABOVE = 3
PLENTY = 1_000_000

BLOCKS = """\
domain: edge  # who: everybody
descriptors:
  - key: plan
    value: "free # of charge: 'really'"
    rate_limit: {unit: day, requests_per_unit: 5}   # a day
    descriptors:
    - key: user
      rate_limit:
        unit: minute

        requests_per_unit: 10
  # more of them — and a comment in any script
  - {key: path, value: /v1/*, limits: [{unit: day, x: 1}, { unit: 'hour' , y: 0x10 }], deny: {}, none: []}
  - key:   a
    list:
          - one  two
          - [a, b c, "d", [e], {f: g}]
    time: 10:30
    path: /a/{id}/[x],y
"""
LISTS = "---\na: b\nc:\n- d: e\n  f: g:h\n- i: yes\n-   j\nk: l\n"
SCALARS = "a: ~\nb: null\nyes: 1_000\nc: .5\nd: 0o17\ne: 1e3\nf: \"\"\ng: ''\nh: on\ni: .nan\nj: +5\nk: a'b\"c\\d\n"
VARIANTS = """\
a:
  - {key: b, value: c, rate_limit: {unit: day}}
  - {key: b, value: d, rate_limit: {unit: day}}
  - {key: b, value: e, rate_limit: {unit: day}}
  - key: b
    value: "c"  # of them
    rate_limit:
      unit: day
  - key: b
    value: "d"  # of them
    rate_limit:
      unit: day

  - key: b
    value: "e"  # of them
    rate_limit:
      unit: day
f:
- value: g
- value: h
  # i
- value: j
"""
ITEMS = '- a: 1\n  b: 2\n- c\n- {}\n- []\n- "x"\n'

BEYOND = {
    "nothing": "",
    "only a comment": "# a\n",
    "a scalar": "a\n",
    "brackets alone": "{a: b}\n",
    "an anchor": "a: &b c\n",
    "an alias": "a: *b\n",
    "a tag": "a: !!str b\n",
    "a merge": "a: {<<: b}\n",
    "an escape": 'a: "b\\n"\n',
    "a doubled quote": "a: 'b''c'\n",
    "a block of text": "a: |\n  b\n",
    "nothing for a value": "a:\nb: c\n",
    "nothing for the last value": "a:\n",
    "nothing in a list": "a:\n- \n",
    "a value that goes on": "a: b\n  c\n",
    "brackets that go on": "a: {b: c,\n  d: e}\n",
    "a comma before the end": "a: [b, ]\n",
    "a key alone": "a: {b, c: d}\n",
    "a pair in a list": "a: [b: c]\n",
    "a colon within brackets": "a: {b: c:d}\n",
    "a question mark within brackets": "a: {b: c?d}\n",  # parsers differ on this one
    "brackets in disorder": "a: [b}\n",
    "something behind brackets": "a: {b: c} d\n",
    "a comment too near": "a: {b: c}# d\n",
    "a colon and a space in a value": "a: b: c\n",
    "a list in a list": "- - a\n",
    "a key that is quoted": '"a": b\n',
    "a deeper key": "a: b\n  c: d\n",
    "a key between": "a:\n    b: c\n  d: e\n",
    "a key to the left of all": "  a: b\nc: d\n",
    "a key in a list": "- a\nb: c\n",
    "an item in a map": "a: b\n- c\n",
    "a tab": "a:\tb\n",
    "a carriage return": "a: b\r\n",
    "a break of another kind": "a: b\u2028c\n",
    "a second document": "a: b\n---\nc: d\n",
    "the end of the document": "a: b\n...\n",
    "a directive": "%YAML 1.1\n---\na: b\n",
    "a long key": f"{'a' * 101}: b\n",
    "too many brackets": f"a: {'[' * (MAX_FAST_DEPTH + 1)}{']' * (MAX_FAST_DEPTH + 1)}\n",
    "too deep": "".join(f"{' ' * depth}a:\n" for depth in range(MAX_FAST_DEPTH + 2)) + f"{' ' * 99}a: b\n",
}

EDITS = [
    *" \n:-,{}[]#'\"&*!|>%@`?<~.ab1_/\t\\=+$^()é\u2028",
    *("\n  ", "\n- ", ": ", " #", "  ", "- ", "---\n", "...\n", "\n\n", "{a: b}", "[a]", "<<: ", "null"),
]


def parsed(text: str) -> YamlNode | str | None:
    """Return the parser's result, or the text of its error."""
    try:
        return load(SourceDocument("f", text.encode(), lines_above=LINES_ABOVE), FASTEST_PARSER)
    except RulesError as error:
        return str(error)


@pytest.mark.parametrize(
    "text", [BLOCKS, LISTS, SCALARS, ITEMS, VARIANTS], ids=["blocks", "lists", "scalars", "items", "alike"]
)
def test_fast_reader_equals_the_parser(text: str) -> None:
    plain = read_fast(text, LINES_ABOVE, PLENTY)
    assert plain is not None
    assert plain == parsed(text)


@pytest.mark.parametrize("text", BEYOND.values(), ids=BEYOND.keys())
def test_unsupported_yaml_is_left_to_the_parser(text: str) -> None:
    assert read_fast(text, 0, PLENTY) is None


def test_fast_reader_enforces_the_node_limit() -> None:
    text = "a: b\nc: [d, {e: f}]\n"
    assert read_fast(text, 0, 9) == load(SourceDocument("f", text.encode()), FASTEST_PARSER)
    assert read_fast(text, 0, 8) is None
    assert read_fast("a: b\nc: d\n", 0, 5) is not None
    assert read_fast("a: b\nc: d\n", 0, 4) is None
    assert read_fast("a: b\n\n\n", 0, 3) is not None
    assert read_fast("a: b\n\n\n\n", 0, 3) is None
    assert read_fast("a:\n" + "- {value: b}\n" * 3, 0, 12) is not None
    assert read_fast("a:\n" + "- {value: b}\n" * 3, 0, 11) is None


def test_fast_reader_reads_all_shipped_rules_but_one() -> None:
    texts = {path.name: path.read_text() for path in Path("descriptors").rglob("*.yaml")}
    read = {name: read_fast(text, LINES_ABOVE, PLENTY) for name, text in texts.items()}
    assert [name for name, plain in read.items() if plain is None] == ["answers.yaml"]  # it has a multi-line text
    assert all(plain == parsed(texts[name]) for name, plain in read.items() if plain is not None)


def test_oversized_flow_line_is_abandoned_early() -> None:
    text = f"a: [{'b, ' * 1_000_000}c]"
    tracemalloc.start()
    assert read_fast(text, 0, 10_000) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * len(text)


def test_item_with_many_values_takes_linear_time() -> None:
    text = "a:\n- " + "value: b, " * 50_000 + "\n\n  c: d\n"
    begun = process_time()
    assert read_fast(text, 0, PLENTY) is None
    assert process_time() - begun < 2


def test_fast_reader_equals_the_parser_on_random_edits() -> None:
    random_ = random.Random(1)
    were_plain = 0
    for _ in range(8_000):
        text = edited(list(random_.choice([BLOCKS, LISTS, ITEMS, VARIANTS])), random_)
        plain = read_fast(text, LINES_ABOVE, PLENTY)
        if plain is not None:
            were_plain += 1
            assert plain == parsed(text), text
    assert were_plain > 500


def edited(text: list[str], random_: random.Random) -> str:
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        at = random_.randrange(len(text) + 1)
        choice = random_.random()
        if choice < 0.75:  # insert or replace
            text[at : at + (choice > 0.45)] = [random_.choice(EDITS)]
        elif choice < 0.9:
            del text[at : at + random_.choice((1, 1, 2, 4, 8))]
        else:
            start = random_.randrange(len(text) + 1)
            text[at:at] = text[start : start + random_.randrange(1, 30)]
    return "".join(text)
