"""Values met by what they are rather than by what they read: a network, a prefix, a regular expression.

Each is linear in the value, whatever the pattern: values come from strangers. So regular expressions are RE2's, which
has no back-references and no look-around, and never goes back over what it has read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

_MAPPED_PREFIX = 96
"""Of ::ffff:0:0/96, which is IPv4 in IPv6's clothes."""


class Way(IntEnum):
    """In the order they are tried."""

    CIDR = 0
    PREFIX = 1
    REGEX = 2


@dataclass(frozen=True, slots=True)
class Pattern:
    """`subject` is the network, the prefix or the compiled expression."""

    way: Way
    text: str  # as written
    subject: Any

    @property
    def label(self) -> str:
        """As it stands in metric names and storage keys, where no value of a client can be mistaken for it."""
        return f"{self.way.name.lower()}({self.text})"

    @property
    def precedence(self) -> tuple[int, int]:
        """The more a pattern says, the earlier it is tried; expressions say what they say in the order of the file."""
        if self.way is Way.CIDR:
            return self.way, -self.subject.prefixlen
        return self.way, -len(self.subject) if self.way is Way.PREFIX else 0

    def is_same(self, other: Pattern) -> bool:
        """Whether both say the same. One network can be written in several ways; of the rest, the text is all."""
        if self.way is Way.CIDR and other.way is Way.CIDR:
            return bool(self.subject == other.subject)
        return self.label == other.label

    def contains(self, other: Pattern) -> bool:
        """Of networks: whether whatever meets the other would meet this one."""
        if self.way is not Way.CIDR or other.way is not Way.CIDR or self.subject.version != other.subject.version:
            return False
        return bool(other.subject.subnet_of(self.subject))

    def matches(self, value: str, address: IPv4Address | IPv6Address | None) -> bool:
        """`address` is the value as an address, if it is one."""
        if self.way is Way.CIDR:
            return address is not None and address in self.subject
        if self.way is Way.PREFIX:
            return value.startswith(self.subject)
        return self.subject.fullmatch(value) is not None


def parse_address(value: str) -> IPv4Address | IPv6Address | None:
    """IPv4 in IPv6's clothes is IPv4, and a zone is no part of an address."""
    try:
        address = ip_address(value.partition("%")[0])
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def parse_network(text: str) -> IPv4Network | IPv6Network:
    """Likewise, where all of its addresses are IPv4: else it could meet none. Raises ValueError."""
    network = ip_network(text)
    if isinstance(network, IPv6Network) and network.prefixlen >= _MAPPED_PREFIX:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            return IPv4Network((mapped, network.prefixlen - _MAPPED_PREFIX))
    return network
