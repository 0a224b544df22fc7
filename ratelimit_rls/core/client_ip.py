"""Who is calling, by address: behind how many trusted proxies, and one spelling for each client.

Every proxy on the way adds the address it was called from at the end of X-Forwarded-For, so the list is to be read from
the right, and only as far as there are proxies one trusts; everything further left is what a stranger wrote.

    X-Forwarded-For: 203.0.113.9, 198.51.100.7, 192.0.2.1          two trusted proxies before Envoy
                     anything     the client    the first proxy     the connection comes from the second

Or proxies are trusted by where they are: the client is then the first from the right that is none of them.

With `use_remote_address: true` Envoy is one more that adds what it was called from, before anybody here sees the list:
then the connection's own address stands at its end (the machine's own, if the connection is a loopback one).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

LONGEST_ADDRESS = 128
"""Characters. No address with its brackets, port and zone is longer, so anything longer is not looked at."""

MOST_TRUSTED_PROXIES = 16
MOST_TRUSTED_NETWORKS = 64

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class ClientIp:
    trusted_proxies: int = 0  # before Envoy; 0: the client is whoever the connection comes from
    use_remote_address: bool = False  # as in Envoy's connection manager. Never guessed: a wrong guess can be forged
    ipv6_prefix: int = 128  # addresses of one such network are one client
    trusted_networks: tuple[Network, ...] = ()  # where proxies are, in place of how many there are

    @property
    def is_behind_proxies(self) -> bool:
        """Else nothing but the connection says who the client is."""
        return bool(self.trusted_proxies or self.trusted_networks)

    def of(self, peer: str, forwarded_for: str) -> str | None:
        """The client's address in its one spelling; None when there is none, as on a Unix socket.

        What does not add up (a list that is too short, something that is not an address where the client's should be)
        is not believed at all: then the client is whoever the connection comes from.
        """
        connection = canonical(peer, self.ipv6_prefix)
        if self.trusted_networks:
            return self._first_stranger(peer, forwarded_for)
        if not self.trusted_proxies or not forwarded_for:
            return connection
        skipped = self._added_by_envoy(peer, forwarded_for)
        if skipped is None:
            return connection
        at = self.trusted_proxies + skipped
        entries = forwarded_for.rsplit(",", at)  # split no further than trusted: what is left of it stays one piece
        if len(entries) < at:
            return connection
        return canonical(entries[-at], self.ipv6_prefix) or connection

    def _first_stranger(self, peer: str, forwarded_for: str) -> str | None:
        """What a proxy that is trusted says of who called it is believed; at the first that is not, the walk ends."""
        nearest = peer
        for entry in reversed(forwarded_for.rsplit(",", MOST_TRUSTED_PROXIES)):
            address = canonical(nearest)
            if address is None or not self._is_trusted(address) or canonical(entry) is None:
                break
            nearest = entry
        return canonical(nearest, self.ipv6_prefix)

    def _is_trusted(self, address: str) -> bool:
        told = ip_address(address)
        return any(told in network for network in self.trusted_networks if network.version == told.version)

    def _added_by_envoy(self, peer: str, forwarded_for: str) -> int | None:
        """How many entries at the end of the list are Envoy's own, or None if it is not what it was said to be."""
        address = canonical(peer)
        if not self.use_remote_address or address is None:
            return 0
        is_last = canonical(forwarded_for.rpartition(",")[2]) == address
        return 1 if is_last or _is_loopback(address) else None


DIRECT = ClientIp()
"""Nobody stands between: the client is whoever the connection comes from."""


@lru_cache(8192)
def canonical(text: str, ipv6_prefix: int = 128) -> str | None:
    """An address as RFC 5952 writes it, without brackets, port and zone; None if it is not one.

    IPv4 in IPv6's clothes is IPv4. Of an IPv6 network that counts as one client it is the first address, so that
    `match: {cidr: …}` reads it like any other.
    """
    if len(text) > LONGEST_ADDRESS:
        return None
    try:
        address = ip_address(_bare(text.strip(" \t")))
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    if ipv6_prefix < address.max_prefixlen:
        return str(ip_network((int(address), ipv6_prefix), strict=False).network_address)
    return str(IPv6Address(int(address)))


def _bare(text: str) -> str:
    """`[2001:db8::1%eth0]:443` is 2001:db8::1, and `192.0.2.1:443` is 192.0.2.1."""
    if text.startswith("["):
        inside, closed, after = text[1:].partition("]")
        text = inside if closed and (not after or _is_port(after)) else ""
    elif text.count(":") == 1:
        text, _, port = text.partition(":")
        text = text if _is_port(":" + port) else ""
    return text.partition("%")[0]


def _is_port(text: str) -> bool:
    return text[0] == ":" and text[1:].isascii() and text[1:].isdigit()


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback
