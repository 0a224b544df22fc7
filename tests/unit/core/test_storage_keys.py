from __future__ import annotations

import sys
from hashlib import blake2b

import pytest

from ratelimit_rls.core.model import Algorithm, Entry, Limit, Penalty, Unit, WarnAt
from ratelimit_rls.core.storage_keys import (
    MAX_TAG_BYTES,
    ShardBy,
    ShardByKey,
    Sharding,
    encode_tag,
    key_suffix,
    storage_key,
)

# Domain, entries, and the tag in both forms.
TAGS = {
    "plain": (
        "edge",
        [("plan", "free"), ("user", "alice")],
        b"{edge/plan=free/user=alice}",
        b"{edge}/plan=free/user=alice",
    ),
    "empty value": ("edge", [("user", "")], b"{edge/user=}", b"{edge}/user="),
    "no entries": ("edge", [], b"{edge}", b"{edge}/"),
    "separators": ("a/b", [("c=d", "e/f")], b"{a%2Fb/c%3Dd=e%2Ff}", b"{a%2Fb}/c%3Dd=e%2Ff"),
    "colons, which end a tag after its braces": ("a:b", [("c:", "::1")], b"{a:b/c:=::1}", b"{a:b}/c%3A=%3A%3A1"),
    "the hash tag's braces": ("{e}", [("k", "{x}")], b"{%7Be%7D/k=%7Bx%7D}", b"{%7Be%7D}/k=%7Bx%7D"),
    "escape character and digest marker": ("edge", [("k", "%~")], b"{edge/k=%25%7E}", b"{edge}/k=%25%7E"),
    "line breaks": ("edge", [("k", "a b\n\0")], b"{edge/k=a%20b%0A%00}", b"{edge}/k=a%20b%0A%00"),
    "non-ASCII is kept": ("edge", [("k", "é")], "{edge/k=é}".encode(), "{edge}/k=é".encode()),
}


@pytest.mark.parametrize(("domain", "entries", "by_descriptor", "by_domain"), TAGS.values(), ids=TAGS.keys())
def test_tag_escapes_only_unsafe_characters(
    domain: str, entries: list[tuple[str, str]], by_descriptor: bytes, by_domain: bytes
) -> None:
    of = [Entry(*entry) for entry in entries]

    assert encode_tag(domain, of) == encode_tag(domain, of, ShardBy.DESCRIPTOR) == by_descriptor
    assert encode_tag(domain, of, ShardBy.DOMAIN) == by_domain


def test_tags_are_unambiguous_where_ratelimit_joins_with_underscores() -> None:
    assert encode_tag("d", [Entry("a", "b_c")]) != encode_tag("d", [Entry("a_b", "c")])


def test_long_tag_is_truncated_with_a_digest() -> None:
    long = encode_tag("edge", [Entry("k", "x" * 10_000)])

    assert long.startswith(b"{edge/k=xxx")
    assert len(long) < MAX_TAG_BYTES
    assert long != encode_tag("edge", [Entry("k", "x" * 10_001)])


def test_slot_depends_on_domain_only_for_long_entries() -> None:
    for domain in ("edge", "d" * MAX_TAG_BYTES, "d" * (MAX_TAG_BYTES + 1), "{" * 10_000):
        tags = [encode_tag(domain, [Entry("k", "x" * length)], ShardBy.DOMAIN) for length in (1, 400, 10_000, 10_001)]

        assert len({tag.partition(b"}")[0] for tag in tags}) == 1
        assert len(set(tags)) == len(tags)
        assert all(len(tag) < 2 * MAX_TAG_BYTES for tag in tags)
    assert encode_tag("edge", [Entry("k", "x" * 10_000)], ShardBy.DOMAIN).startswith(b"{edge}/k=xxx")


def test_long_domains_with_common_prefix_have_different_hash_tags() -> None:
    one, other = (encode_tag("d" * length, [], ShardBy.DOMAIN).partition(b"}")[0] for length in (10_000, 10_001))

    assert one != other


def test_digest_of_long_tag_is_stable() -> None:
    """Otherwise counters of long values would be lost with the next version."""
    escaped = b"edge/k%3D=" + b"%3D%2F%25a\xc3\xb6%00%7F" * 100

    long = encode_tag("edge", [Entry("k=", "=/%aö\0\x7f" * 100)])

    digest = blake2b(escaped, digest_size=20).hexdigest().encode()
    assert long == b"{" + escaped[:128] + b"~" + digest + b"}"
    by_domain = encode_tag("edge", [Entry("k=", "=/%aö\0\x7f" * 100)], ShardBy.DOMAIN)
    assert by_domain == b"{edge}/" + escaped[5:133] + b"~" + digest
    by_key = encode_tag("edge", [Entry("k=", "=/%aö\0\x7f" * 100), Entry("org", "acme")], ShardByKey("org"))
    digest = blake2b(escaped + b"/org=acme", digest_size=20).hexdigest().encode()
    assert by_key == b"{edge/org=acme}/" + escaped[5:133] + b"~" + digest
    by_key = encode_tag("edge", [Entry("k=", "=/%aö\0\x7f" * 100), Entry("org", "acme")], ShardByKey("k="))
    digest = blake2b(escaped, digest_size=20).hexdigest().encode()
    assert by_key == b"{" + escaped[:128] + b"~" + digest + b"}//org=acme"


@pytest.mark.parametrize("shard_by", [*ShardBy, ShardByKey("k")])
@pytest.mark.parametrize("unit", ["=", "=a", "ö=", ":", "/={}~% \n\0"])
def test_encoding_takes_linear_time(unit: str, shard_by: Sharding) -> None:
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: events.append(event))
    try:
        encode_tag("edge", [Entry("k", unit * 10_000)], shard_by)
    finally:
        sys.setprofile(None)
    assert len(events) < 100


def test_key_has_algorithm_and_window_but_no_limit() -> None:
    one = storage_key(b"", b"{t}", key_suffix(Limit(5, Unit.HOUR, Algorithm.GCRA, 9)))

    assert one == b"rl:{t}:gcra:3600"
    assert storage_key(b"", b"{t}", key_suffix(Limit(6, Unit.HOUR, Algorithm.GCRA, 1))) == one
    assert storage_key(b"p:", b"{t}/k=", key_suffix(Limit(5, Unit.HOUR))) == b"p:rl:{t}/k=:fixed_window:3600"


def test_watchers_have_keys_of_their_own() -> None:
    assert storage_key(b"p:", b"{t}", key_suffix(Penalty(1, 1, (1,)))) == b"p:rl:{t}:penalty"
    assert storage_key(b"", b"{t}/k=", key_suffix(WarnAt(800))) == b"rl:{t}/k=:warning"
