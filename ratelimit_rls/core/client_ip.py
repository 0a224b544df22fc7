"""Client address behind trusted proxies, in one canonical spelling.

Every proxy appends the address of its peer to X-Forwarded-For. So the list is read from the right, and only as far as
there are trusted proxies; everything further left can be forged.

    X-Forwarded-For: 203.0.113.9, 198.51.100.7, 192.0.2.1          two trusted proxies before Envoy
                     anything     the client    the first proxy     the connection comes from the second

Alternatively proxies are trusted by network: the client is then the first address from the right outside of them.

With `use_remote_address: true` Envoy also appends its peer before this service sees the list, so the last entry is the
address of the connection (or an address of the machine, if the connection is a loopback one).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

MAX_ADDRESS_LENGTH = 128
"""Maximum characters of an address with brackets, port and zone. Longer texts are not parsed."""

MAX_TRUSTED_PROXIES = 16
MAX_TRUSTED_NETWORKS = 64

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class ClientIp:
    trusted_proxies: int = 0  # number before Envoy; 0: the client is the peer of the connection
    use_remote_address: bool = (
        False  # as in Envoy's connection manager; never guessed, since a wrong guess can be forged
    )
    ipv6_prefix: int = 128  # addresses in one network of this length are one client
    trusted_networks: tuple[Network, ...] = ()  # networks of the proxies, instead of their number

    @property
    def is_behind_proxies(self) -> bool:
        """True if X-Forwarded-For is used; otherwise only the connection identifies the client."""
        return bool(self.trusted_proxies or self.trusted_networks)

    def of(self, peer: str, forwarded_for: str) -> str | None:
        """Return the client's canonical address; None if there is none, as on a Unix socket.

        An inconsistent list (too short, or no address at the client's position) is ignored: the client is then the
        peer of the connection.
        """
        connection = canonical(peer, self.ipv6_prefix)
        if self.trusted_networks:
            return self._first_untrusted(peer, forwarded_for)
        if not self.trusted_proxies or not forwarded_for:
            return connection
        skipped = self._entries_added_by_envoy(peer, forwarded_for)
        if skipped is None:
            return connection
        at = self.trusted_proxies + skipped
        entries = forwarded_for.rsplit(",", at)  # do not split the untrusted rest
        if len(entries) < at:
            return connection
        return canonical(entries[-at], self.ipv6_prefix) or connection

    def _first_untrusted(self, peer: str, forwarded_for: str) -> str | None:
        """Return the first address from the right that is not a trusted proxy."""
        nearest = peer
        for entry in reversed(forwarded_for.rsplit(",", MAX_TRUSTED_PROXIES)):
            address = canonical(nearest)
            if address is None or not self._is_trusted(address) or canonical(entry) is None:
                break
            nearest = entry
        return canonical(nearest, self.ipv6_prefix)

    def _is_trusted(self, address: str) -> bool:
        parsed = ip_address(address)
        return any(parsed in network for network in self.trusted_networks if network.version == parsed.version)

    def _entries_added_by_envoy(self, peer: str, forwarded_for: str) -> int | None:
        """Return how many entries at the end Envoy added; None if the list contradicts `use_remote_address`."""
        address = canonical(peer)
        if not self.use_remote_address or address is None:
            return 0
        is_last = canonical(forwarded_for.rpartition(",")[2]) == address
        return 1 if is_last or _is_loopback(address) else None


DIRECT = ClientIp()
"""No proxies: the client is the peer of the connection."""


@lru_cache(8192)
def canonical(text: str, ipv6_prefix: int = 128) -> str | None:
    """Return an address in RFC 5952 form, without brackets, port and zone; None if the text is not an address.

    IPv4-mapped IPv6 addresses become IPv4. If an IPv6 network counts as one client, its first address is returned, so
    that `match: {cidr: …}` works as for any other address.
    """
    if len(text) > MAX_ADDRESS_LENGTH:
        return None
    try:
        address = ip_address(_strip_port_and_zone(text.strip(" \t")))
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    if ipv6_prefix < address.max_prefixlen:
        return str(ip_network((int(address), ipv6_prefix), strict=False).network_address)
    return str(IPv6Address(int(address)))


def _strip_port_and_zone(text: str) -> str:
    """Return the address alone: `[2001:db8::1%eth0]:443` is 2001:db8::1, and `192.0.2.1:443` is 192.0.2.1."""
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
