"""Patterns for values: a text with `*`, a network, a prefix or a regular expression.

Matching is linear in the length of the value for every pattern, since values come from clients. So regular expressions
are RE2's, which has no backreferences, no lookaround and no backtracking.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

WILDCARD = "*"

_MAPPED_PREFIX = 96
"""Prefix length of ::ffff:0:0/96, the IPv4-mapped IPv6 addresses."""


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern anchored at both ends, in which each `*` matches zero or more characters."""

    pattern: str
    parts: tuple[str, ...]

    @classmethod
    def of(cls, pattern: str) -> Glob:
        return cls(pattern, tuple(pattern.split(WILDCARD)))

    @property
    def is_literal(self) -> bool:
        """Return whether it has no `*`, so that it matches one text only."""
        return len(self.parts) == 1

    @property
    def ends(self) -> tuple[str, str]:
        """Return the text before the first `*` and the text after the last. Without a `*`: the text and nothing."""
        return self.parts[0], "" if self.is_literal else self.parts[-1]

    def matches(self, text: str) -> bool:
        """Return whether the pattern matches, in time linear in the text.

        Taking each middle part at its first occurrence never misses a match.
        """
        first, *middle = self.parts
        if not middle:
            return text == first
        last = middle.pop()
        if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
            return False
        at, end = len(first), len(text) - len(last)
        for part in middle:
            found = text.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True


class PatternKind(IntEnum):
    """Kinds of pattern, in the order they are tried."""

    CIDR = 0
    PREFIX = 1
    REGEX = 2


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern for values. `subject` is the network, the prefix or the compiled expression."""

    kind: PatternKind
    text: str  # as written
    subject: Any

    @property
    def label(self) -> str:
        """Text in metric names and storage keys. No value sent by a client can be mistaken for it."""
        return f"{self.kind.name.lower()}({self.text})"

    @property
    def precedence(self) -> tuple[int, int]:
        """Sort key: more specific patterns are tried first; expressions keep their order in the file."""
        if self.kind is PatternKind.CIDR:
            return self.kind, -self.subject.prefixlen
        return self.kind, -len(self.subject) if self.kind is PatternKind.PREFIX else 0

    @property
    def identity(self) -> Hashable:
        """Return what equal patterns have in common: the network, or the text of other patterns."""
        return self.subject if self.kind is PatternKind.CIDR else self.label

    def contains(self, other: Pattern) -> bool:
        """Return whether this network contains the other. False if either is not a network."""
        if (
            self.kind is not PatternKind.CIDR
            or other.kind is not PatternKind.CIDR
            or self.subject.version != other.subject.version
        ):
            return False
        return bool(other.subject.subnet_of(self.subject))

    def matches(self, value: str, address: IPv4Address | IPv6Address | None) -> bool:
        """Return whether the pattern matches. `address` is the value parsed as an address, if it is one."""
        if self.kind is PatternKind.CIDR:
            return address is not None and address in self.subject
        if self.kind is PatternKind.PREFIX:
            return value.startswith(self.subject)
        return self.subject.fullmatch(value) is not None


def parse_address(value: str) -> IPv4Address | IPv6Address | None:
    """Parse an address; None if the value is not one. Unwraps IPv4-mapped IPv6 addresses and ignores zone ids."""
    try:
        address = ip_address(value.partition("%")[0])
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def parse_network(text: str) -> IPv4Network | IPv6Network:
    """Parse a network. Raises ValueError.

    A network of IPv4-mapped IPv6 addresses becomes an IPv4 network; otherwise it could never match.
    """
    network = ip_network(text)
    if isinstance(network, IPv6Network) and network.prefixlen >= _MAPPED_PREFIX:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            return IPv4Network((mapped, network.prefixlen - _MAPPED_PREFIX))
    return network
