"""Storage keys parsed back, in both forms of a tag."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Entry, Limit, Penalty, Unit, WarnAt
from ratelimit_rls.core.storage_key_parser import parse_key
from ratelimit_rls.core.storage_keys import ShardBy, ShardByKey, Sharding, encode_tag, key_suffix, storage_key

GCRA = Limit(10, Unit.MINUTE, Algorithm.GCRA, burst=5)
BERLIN = Limit(10, Unit.MONTH, timezone="Europe/Berlin")

ENTRIES = [
    (Entry("user", "alice"),),
    (Entry("plan", "free"), Entry("user", "a/b=c{d}~e%2Fgcra:60:penalty")),
    (Entry("a=b/c", ""), Entry("ip", "2001:db8::1")),
    (Entry("user", "\r\nrl:{edge}:gcra:60 *?[x]\\"),),
    (Entry("用户", "愛"),),
]


@pytest.mark.parametrize("shard_by", [*ShardBy, *map(ShardByKey, ["plan", "user", "a=b/c", "none"])])
@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("domain", ["edge", "e:d/g}e*"])
def test_parsed_key_has_domain_and_entries(domain: str, entries: tuple[Entry, ...], shard_by: Sharding) -> None:
    tag = encode_tag(domain, entries, shard_by)
    states = {
        "gcra:60": storage_key(b"p:", tag, key_suffix(GCRA)),
        "fixed_window:month@Europe/Berlin": storage_key(b"p:", tag, key_suffix(BERLIN)),
        "penalty": storage_key(b"p:", tag, key_suffix(Penalty(1, 1, (1,)))),
        "warning": storage_key(b"p:", tag, key_suffix(WarnAt(800))),
    }
    for state, key in states.items():
        for prefix in ("p:", None):
            assert parse_key(key.decode(), prefix) == (domain, entries, False, state)
        assert parse_key(key.decode(), "q:") is None


@pytest.mark.parametrize("shard_by", [*ShardBy, ShardByKey("plan"), ShardByKey("user")])
def test_truncated_key_keeps_its_beginning(shard_by: Sharding) -> None:
    tag = encode_tag("edge", [Entry("plan", "free"), Entry("user", "x" * 600)], shard_by)
    text = parse_key(storage_key(b"", tag, key_suffix(GCRA)).decode(), "")
    assert text is not None
    assert text.is_cut
    assert (text.domain, text.entries[0]) == ("edge", ("plan", "free"))
    assert text.entries[1].value != "x" * 600
    assert ("x" * 600).startswith(text.entries[1].value)
    assert text.descriptor.startswith("plan=free,user=xxx")
    assert text.descriptor.endswith("x…")


@pytest.mark.parametrize("length", [123, 124, 125, 126])
def test_entry_in_braces_is_omitted_if_its_place_was_cut_off(length: int) -> None:
    entries = [Entry("a", "x" * length), Entry("b", "y" * 400), Entry("org", "acme")]
    tag = encode_tag("edge", entries, ShardByKey("org"))

    parsed = parse_key(storage_key(b"", tag, b"penalty").decode())

    assert parsed is not None
    assert parsed.is_cut
    assert [entry.key for entry in parsed.entries if entry.key] == (["a", "b"] if length <= 124 else ["a"])


@pytest.mark.parametrize(
    "key",
    ["", "rl:", "rl:{edge", "rl:{edge/user=a}:once:00", "rl:{edge}:once:00", "rl:{edge/user=a}:gcra:60:x", "session:7"],
)
def test_other_keys_are_not_parsed(key: str) -> None:
    assert parse_key(key) is None
