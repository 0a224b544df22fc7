from __future__ import annotations

import sys
from hashlib import blake2b

import pytest

from ratelimit_rls.core.keys import LONGEST_TAG_BYTES, encode_tag, storage_key
from ratelimit_rls.core.model import Algorithm, Entry, Limit, Unit

TAGS = {
    "plain": ("edge", [("plan", "free"), ("user", "alice")], b"edge/plan=free/user=alice"),
    "empty value": ("edge", [("user", "")], b"edge/user="),
    "no entries": ("edge", [], b"edge"),
    "separators": ("a/b", [("c=d", "e/f")], b"a%2Fb/c%3Dd=e%2Ff"),
    "the hash tag's braces": ("edge", [("k", "{x}")], b"edge/k=%7Bx%7D"),
    "the escape and the mark of a digest": ("edge", [("k", "%~")], b"edge/k=%25%7E"),
    "what would break a line": ("edge", [("k", "a b\n\0")], b"edge/k=a%20b%0A%00"),
    "other scripts as they are": ("edge", [("k", "é")], "edge/k=é".encode()),
}


@pytest.mark.parametrize(("domain", "entries", "tag"), TAGS.values(), ids=TAGS.keys())
def test_a_tag_is_readable_and_escapes_only_what_it_must(
    domain: str, entries: list[tuple[str, str]], tag: bytes
) -> None:
    assert encode_tag(domain, [Entry(*entry) for entry in entries]) == tag


def test_descriptors_that_the_reference_confuses_have_different_tags() -> None:
    assert encode_tag("d", [Entry("a", "b_c")]) != encode_tag("d", [Entry("a_b", "c")])


def test_a_long_tag_keeps_its_beginning_and_stays_short() -> None:
    long = encode_tag("edge", [Entry("k", "x" * 10_000)])

    assert long.startswith(b"edge/k=xxx")
    assert len(long) < LONGEST_TAG_BYTES
    assert long != encode_tag("edge", [Entry("k", "x" * 10_001)])


def test_the_digest_is_of_the_tag_as_it_would_have_been() -> None:
    """Or what was counted for long values would be forgotten with the next version."""
    escaped = b"edge/k%3D=" + b"%3D%2F%25a\xc3\xb6%00%7F" * 100

    long = encode_tag("edge", [Entry("k=", "=/%aö\0\x7f" * 100)])

    assert long == escaped[:128] + b"~" + blake2b(escaped, digest_size=20).hexdigest().encode()


@pytest.mark.parametrize("unit", ["=", "=a", "ö=", "/={}~% \n\0"])
def test_no_value_costs_more_than_to_run_over_it(unit: str) -> None:
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: events.append(event))
    try:
        encode_tag("edge", [Entry("k", unit * 10_000)])
    finally:
        sys.setprofile(None)
    assert len(events) < 100


def test_the_key_names_the_algorithm_and_the_window_but_not_the_limit() -> None:
    one = storage_key("", b"t", Limit(5, Unit.HOUR, Algorithm.GCRA, 9))

    assert one == b"rl:{t}:gcra:3600"
    assert storage_key("", b"t", Limit(6, Unit.HOUR, Algorithm.GCRA, 1)) == one
    assert storage_key("p:", b"t", Limit(5, Unit.HOUR)) == b"p:rl:{t}:fixed_window:3600"
