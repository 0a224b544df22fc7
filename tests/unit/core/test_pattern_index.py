"""Lookups among the wildcards and patterns of a level: what wins where several match."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Entry
from ratelimit_rls.core.pattern_index import PrefixTree
from ratelimit_rls.core.tree import Node, find_child
from ratelimit_rls.rules.compile import compile_documents


def _level(*descriptors: str) -> Node:
    lines = "".join(f"  - {{{descriptor}}}\n" for descriptor in descriptors)
    return compile_documents({"f": f"domain: d\ndescriptors:\n{lines}".encode()}).tree.domains["d"]


def _wildcards(*values: str) -> Node:
    return _level(*(f"key: k, value: '{value}'" for value in values))


def _found(level: Node, value: str, key: str = "k") -> str | None:
    child, _ = find_child(level, Entry(key, value))
    return None if child is None else child.label


FIRST_WILDCARDS = {
    "a shorter head that comes first": (["/a*", "/a/b*"], "/a/b/c", "/a*"),
    "a longer head that comes first": (["/a/b*", "/a*"], "/a/b/c", "/a/b*"),
    "a shorter tail that comes first": (["*.com", "*.example.com"], "x.example.com", "*.com"),
    "a longer tail that comes first": (["*.example.com", "*.com"], "x.example.com", "*.example.com"),
    "a head before a tail": (["/a*", "*.png"], "/a/x.png", "/a*"),
    "a tail before a head": (["*.png", "/a*"], "/a/x.png", "*.png"),
    "several stars before one": (["/a*b*c", "/a*c"], "/a-b-c", "/a*b*c"),
    "one star before several": (["/a*c", "/a*b*c"], "/a-b-c", "/a*c"),
    "the first of those with several stars": (["/*x*", "/*y*", "/*z*"], "/yz", "/*y*"),
    "any value": (["/a*", "*"], "", "*"),
    "head and tail may touch": (["ab*ba"], "abba", "ab*ba"),
    "head and tail may not overlap": (["ab*ba"], "aba", None),
    "parts of several stars may not overlap": (["a*ab*b"], "aabb", "a*ab*b"),
    "a value shorter than the longest tail": (["*-long-tail", "*b"], "ab", "*b"),
    "beyond the basic multilingual plane": (["😀*", "*😀"], "x😀", "*😀"),
}


@pytest.mark.parametrize(("values", "value", "expected"), FIRST_WILDCARDS.values(), ids=FIRST_WILDCARDS.keys())
def test_first_wildcard_in_file_order_is_selected(values: list[str], value: str, expected: str | None) -> None:
    assert _found(_wildcards(*values), value) == (None if expected is None else f"k_{expected}")


def test_wildcards_with_a_star_in_their_key_keep_their_place() -> None:
    level = _level(
        "key: k, value: '1*'", "key: 'k*', value: '*9'", "key: k, value: '*5*'", "key: '*', value: '5'", "key: 'k*'"
    )

    assert _found(level, "19") == "k_1*"
    assert _found(level, "29") == "k*_*9"
    assert _found(level, "59") == "k*_*9"
    assert _found(level, "25") == "k_*5*"
    assert _found(level, "5") == "k_*5*"
    assert _found(level, "5", key="x") == "*_5"
    assert _found(level, "55", key="x") is None
    assert _found(level, "2") == "k*"
    assert _found(level, "2", key="kk") == "k*"


def test_wildcard_key_is_selected_before_patterns_of_the_key() -> None:
    level = _level("key: k, match: {prefix: a}", "key: 'k*', value: 'ab*'")

    assert _found(level, "abc") == "k*_ab*"
    assert _found(level, "acc") == "k_prefix(a)"


NETWORKS = ("10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/24", "10.1.255.0/24", "10.2.0.0/16", "255.255.255.255", "::/0")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("9.255.255.255", None),
        ("10.0.0.0", "10.0.0.0/8"),
        ("10.0.255.255", "10.0.0.0/8"),
        ("10.1.0.0", "10.1.0.0/24"),  # three networks begin here
        ("10.1.0.255", "10.1.0.0/24"),
        ("10.1.1.0", "10.1.0.0/16"),
        ("10.1.255.255", "10.1.255.0/24"),  # two networks end here
        ("10.2.0.0", "10.2.0.0/16"),  # and the next begins
        ("10.3.0.0", "10.0.0.0/8"),
        ("11.0.0.0", None),
        ("255.255.255.254", None),
        ("255.255.255.255", "255.255.255.255"),
        ("::1", "::/0"),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "::/0"),
        ("not an address", None),
    ],
)
def test_longest_network_is_selected(address: str, network: str | None) -> None:
    level = _level(*(f"key: k, match: {{cidr: '{one}'}}" for one in NETWORKS))

    assert _found(level, address) == (None if network is None else f"k_cidr({network})")


def test_longest_prefix_is_selected_among_thousands_that_contain_each_other() -> None:
    texts = ["a" * length for length in range(1, 3001)]
    tree = PrefixTree.of({text: len(text) for text in texts})

    assert tree.prefixes_of("b") == []
    assert tree.prefixes_of("a" * 2000 + "b") == list(range(1, 2001))
    assert tree.prefixes_of("a" * 4000) == list(range(1, 3001))


def test_key_globs_are_announced() -> None:
    literal, glob = _wildcards("a*").pattern_index, _level("key: 'k*'").pattern_index

    assert literal is not None
    assert not literal.has_key_globs
    assert glob is not None
    assert glob.has_key_globs


def test_level_without_patterns_has_no_index() -> None:
    level = _level("key: k, value: a", "key: k")

    assert level.pattern_index is None
    assert (level.wildcards, dict(level.patterns)) == ((), {})
