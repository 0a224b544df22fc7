"""The compiled patterns of a level select the same child as trying all of them in order."""

from __future__ import annotations

import json
import re
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.model import Entry
from ratelimit_rls.core.pattern import Glob, parse_address, parse_network
from ratelimit_rls.core.pattern_index import PatternIndex, Wildcard
from ratelimit_rls.core.tree import Node, find_child
from ratelimit_rls.rules.compile import compile_documents

# No deadline: the machine may be busy.
patiently = settings(deadline=None, database=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])

# Two letters and short texts, so that patterns overlap and match often.
keys = st.sampled_from(["a", "a", "a", "b", "a*", "*a", "*"])
values = st.text("a*", max_size=4) | st.text("ab*", max_size=5)
prefixes = st.text("ab", min_size=1, max_size=4)
expressions = st.sampled_from(["a", "a*", "[ab]+", "(ab)*", "a.*b", "b|ab", "::.*"])

# Addresses whose bits are mostly alike, so that networks contain each other.
ipv4_bits = st.sampled_from([0, 1, 0x0A000000, 0x0A000001, 0x0A800000, 0x0AFFFFFF, 0x80000000, 0xFFFFFFFF])
ipv6_bits = st.sampled_from([0, 1, 0x20010DB8 << 96, (0x20010DB8 << 96) + 1, 0xFFFE << 32, 2**128 - 1])
mapped_bits = ipv4_bits.map(lambda bits: (0xFFFF << 32) + bits)


def _network(bits: int, length: int, width: int) -> str:
    address = IPv4Address if width == 32 else IPv6Address
    return f"{address(bits >> (width - length) << (width - length))}/{length}"


networks = st.one_of(
    st.builds(_network, ipv4_bits, st.integers(0, 32), st.just(32)),
    st.builds(_network, ipv6_bits | mapped_bits, st.integers(0, 128), st.just(128)),
)
addresses = st.one_of(
    ipv4_bits.map(lambda bits: str(IPv4Address(bits))),
    (ipv6_bits | mapped_bits).map(lambda bits: str(IPv6Address(bits))),
    st.just("2001:db8::1%eth0"),
)
pattern_keys = st.sampled_from(["a", "a", "b"])


def _patterns(kind: str, texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"key": pattern_keys, "match": st.fixed_dictionaries({kind: texts})})


wildcards: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries({"key": keys, "value": values})
of_network, of_prefix = _patterns("cidr", networks), _patterns("prefix", prefixes)
descriptors = st.one_of(wildcards, wildcards, of_network, of_prefix, _patterns("regex", expressions))


def _identity(descriptor: dict[str, Any]) -> tuple[Any, ...]:
    match = descriptor.get("match", {})
    network = parse_network(match["cidr"]) if "cidr" in match else None
    return descriptor["key"], descriptor.get("value"), network, match.get("prefix"), match.get("regex")


# Some levels have one kind only: among many kinds, few of one kind match the same value.
levels = st.one_of(
    *(
        st.lists(kind, min_size=1, max_size=12, unique_by=_identity)
        for kind in (wildcards, of_network, of_prefix, descriptors)
    )
)
requested_values = st.one_of(st.text("a", max_size=4), st.text("ab", max_size=6), addresses)
entries = st.builds(Entry, st.sampled_from(["a", "a", "a", "b", "aa"]), requested_values)


def _glob(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None


def _wildcard_matches(descriptor: dict[str, Any], entry: Entry) -> bool:
    return _glob(descriptor["key"], entry.key) and _glob(descriptor["value"] or "*", entry.value)


def _network_length(text: str, value: str) -> int:
    """Return the length of the network if it contains the address; -1 if not."""
    address, network = parse_address(value), parse_network(text)
    return network.prefixlen if address is not None and address in network else -1


def first_in_order(level: list[dict[str, Any]], entry: Entry) -> dict[str, Any] | None:
    """Return the descriptor that `entry` selects, by trying all of them in order: the oracle of this module."""
    written = [one for one in level if "value" in one]
    same = [one for one in written if one["value"] and (one["key"], one["value"]) == entry]
    wild = [one for one in written if "*" in one["key"] + one["value"] and _wildcard_matches(one, entry)]
    patterns = [one["match"] | {"of": one} for one in level if "match" in one and one["key"] == entry.key]
    inside = [one for one in patterns if "cidr" in one and _network_length(one["cidr"], entry.value) >= 0]
    inside.sort(key=lambda one: -_network_length(one["cidr"], entry.value))
    begun = [one for one in patterns if "prefix" in one and entry.value.startswith(one["prefix"])]
    begun.sort(key=lambda one: -len(one["prefix"]))
    expressed = [one for one in patterns if "regex" in one and re.fullmatch(one["regex"], entry.value)]
    alone = [one for one in written if not one["value"] and one["key"] == entry.key]
    by_pattern = [one["of"] for one in (*inside, *begun, *expressed)]
    return next(iter([*same, *wild, *by_pattern, *alone]), None)


def _compiled(level: list[dict[str, Any]]) -> Node:
    """Compile the level. The line of each descriptor is its number, from 3."""
    lines = "".join(f"- {json.dumps(descriptor)}\n" for descriptor in level)
    return compile_documents({"f": f"domain: d\ndescriptors:\n{lines}".encode()}).tree.domains["d"]


@patiently
@given(levels, st.lists(entries, min_size=1, max_size=8))
def test_index_agrees_with_trying_all_in_order(level: list[dict[str, Any]], requested: list[Entry]) -> None:
    root = _compiled(level)

    for entry in requested:
        found, _ = find_child(root, entry)

        expected = first_in_order(level, entry)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.position is not None
            assert level[found.position.line - 3] == expected


@patiently
@given(
    st.lists(values.filter(lambda text: "*" in text), min_size=1, max_size=6, unique=True),
    st.text("a", max_size=3) | st.text("ab", max_size=5),
)
def test_first_wildcard_of_one_key(texts: list[str], value: str) -> None:
    index = PatternIndex.of([Wildcard(Glob.of("k"), Glob.of(text), Node("k", text)) for text in texts], {})
    assert index is not None

    found = index.first_wildcard("k", value)

    assert (found.value if found else None) == next((text for text in texts if _glob(text, value)), None)


@patiently
@given(st.lists(networks, min_size=1, max_size=12, unique_by=parse_network), st.data())
def test_longest_network_at_the_ends_of_every_network(texts: list[str], data: st.DataObject) -> None:
    """The first and the last address of a network, and those beside it."""
    level = [{"key": "a", "match": {"cidr": text}} for text in texts]
    root = _compiled(level)
    network = ip_network(data.draw(st.sampled_from(texts)))
    first, last = int(network.network_address), int(network.broadcast_address)
    address = type(network.network_address)

    for number in (first - 1, first, last, last + 1):
        if 0 <= number < 2**network.max_prefixlen:
            entry = Entry("a", str(address(number)))
            found, _ = find_child(root, entry)

            expected = first_in_order(level, entry)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert found.position is not None
                assert level[found.position.line - 3] == expected
