"""Patterns of `reset --match`."""

from __future__ import annotations

import pytest

from ratelimit_rls.cli.key_patterns import parse_pattern, scan_pattern
from ratelimit_rls.core.model import Entry, Limit, Unit
from ratelimit_rls.core.storage_key_parser import ParsedKey, parse_key
from ratelimit_rls.core.storage_keys import encode_tag, key_suffix, storage_key

LIMIT = Limit(10, Unit.MINUTE)


def key_of(*entries: tuple[str, str]) -> bytes:
    return storage_key(b"p:", encode_tag("edge", [Entry(*entry) for entry in entries]), key_suffix(LIMIT))


def text_of(*entries: tuple[str, str]) -> ParsedKey:
    text = parse_key(key_of(*entries).decode(), "p:")
    assert text is not None
    return text


ALICE = text_of(("user", "alice"))
FREE_ALICE = text_of(("plan", "free"), ("user", "alice"))
STARS = text_of(("user", "a*b[c]/d=e%41,f"))
LONG = text_of(("user", "x" * 600))


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("user=*", ALICE, True),
        ("user=a?ice", ALICE, True),
        ("user=[ab]*", ALICE, True),
        ("*=*", ALICE, True),
        ("user=Alice", ALICE, False),
        ("user=alic", ALICE, False),
        ("use?=lice", ALICE, False),
        ("user=*", FREE_ALICE, False),  # another number of entries is another descriptor
        ("plan=*", FREE_ALICE, False),
        ("plan=*,**", FREE_ALICE, True),
        ("plan=*,user=al*", FREE_ALICE, True),
        ("user=al*,plan=*", FREE_ALICE, False),
        ("plan=*,user=*,**", FREE_ALICE, True),
        ("plan=*,user=*,path=*,**", FREE_ALICE, False),
        ("**", ALICE, True),
        ("user=a[*]b[[]c]/d=e%41?f", STARS, True),  # as it was sent: not as it is escaped in the key
        ("user=a%2Ab*", STARS, False),
        ("user=aXb*", STARS, False),
        ("user=*", LONG, False),
        ("user=x*,**", LONG, True),
        ("user=y*,**", LONG, False),
    ],
)
def test_pattern_matches_descriptors(pattern: str, text: ParsedKey, matches: bool) -> None:
    assert parse_pattern(pattern).matches(text) is matches


@pytest.mark.parametrize("pattern", ["", "user", "=a", "user=a,", "**,user=a"])
def test_invalid_pattern_is_rejected(pattern: str) -> None:
    with pytest.raises(ValueError, match="must be key=value"):
        parse_pattern(pattern)


def test_scan_pattern_escapes_prefix_and_domain() -> None:
    assert scan_pattern("", "edge") == b"rl:{edge[/}]*"
    assert scan_pattern("p*[x]:", r"e\g?/d") == rb"p\*\[x\]:rl:{e\\g\?%2Fd[/}]*"
