"""Detection of values that a source can never have: a rule with such a value can never match.

Only certain cases are reported. Regular expressions are only tested against sources with a short list of values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address, ip_network

from ratelimit_rls.core.pattern import Glob, PatternKind, parse_address
from ratelimit_rls.core.tree import Node
from ratelimit_rls.envoy_config.value_sources import (
    ActionSource,
    HeaderAction,
    HostAction,
    MaskedAddressAction,
    PathAction,
    RemoteAddressAction,
)

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE")
SCHEMES = ("http", "https")


def matches(node: Node, value: str) -> bool:
    """Return whether an entry with this value matches the node, as the service compares them."""
    if node.pattern is not None:
        return node.pattern.matches(value, parse_address(value))
    return not node.value or Glob.of(node.value).matches(value)


def unreachable_reason(node: Node, source: ActionSource) -> str:
    """Return why the source never has the node's value; "" if it may have it.

    The text completes a sentence that starts with the key, and says what would be right.
    """
    match source:
        case HeaderAction(":method"):
            return _method(node)
        case HeaderAction(":scheme"):
            return "" if any(matches(node, scheme) for scheme in SCHEMES) else possible_values(SCHEMES)
        case HostAction():
            return _host(node)
        case PathAction():
            return _path(node)
        case RemoteAddressAction():
            return _address(node)
        case MaskedAddressAction(v4_prefix, v6_prefix):
            return _network(node, v4_prefix, v6_prefix)
        case _:
            return ""


def possible_values(values: Iterable[str]) -> str:
    return f"comes as {' or '.join(map(repr, values))} only"


def _by_cidr(node: Node) -> bool:
    return node.pattern is not None and node.pattern.kind is PatternKind.CIDR


def _parts(node: Node) -> tuple[str, ...]:
    """Return the literal parts of the value, from its beginning to its end, with anything between two of them."""
    if node.pattern is None:
        return Glob.of(node.value).parts if node.value else ()
    return (node.pattern.text, "") if node.pattern.kind is PatternKind.PREFIX else ()


def _method(node: Node) -> str:
    """Check a method. Uncommon methods may have any spelling."""
    meant = [method for method in METHODS if matches(node, method.lower())]
    if not meant or any(matches(node, method) for method in METHODS):
        return ""
    return f"comes in capitals; write {meant[0]}"


def _host(node: Node) -> str:
    parts = _parts(node)
    if any(part != part.lower() for part in parts):
        return f"comes in lower case; write {_text(node).lower()}"
    if parts and (found := re.search(r":[0-9]*$|\.$", parts[-1])):
        return f"comes without a port and a dot at its end; write {_text(node)[: -len(found[0])]}"
    return ""


def _path(node: Node) -> str:
    parts = _parts(node)
    if _by_cidr(node):
        return "is a path and never an address"
    if parts and parts[0] and not parts[0].startswith("/"):
        return f"starts with a slash; write /{_text(node)}"
    if any(mark in part for part in parts for mark in "?#"):
        return f"comes without its query; write {re.split('[?#]', _text(node))[0]}, or use the source header::path"
    return ""


def _address(node: Node) -> str:
    parts = _parts(node)
    if len(parts) != 1:
        return "" if all(_may_be_of_addresses(part) for part in parts) else "is an IP address, in lower case"
    try:
        address = ip_address(node.value)
    except ValueError:
        if "/" not in node.value:
            return "is an IP address"
        return f"is one IP address and never a network; write match: {{cidr: {node.value}}}"
    return _canonical_spelling(node.value, address)


def _network(node: Node, v4_prefix: int, v6_prefix: int) -> str:
    parts = _parts(node)
    lengths = f"is a network with /{v4_prefix} of IPv4 or /{v6_prefix} of IPv6, as the mapping says"
    if _by_cidr(node):
        return f"{lengths}, and cidr compares addresses; give the network as 'value', or match remote_address"
    if len(parts) != 1:
        return "" if all(_may_be_of_addresses(part.replace("/", "")) for part in parts) else lengths
    try:
        network = ip_network(node.value, strict=False)
    except ValueError:
        return lengths
    right = v4_prefix if network.version == 4 else v6_prefix
    if "/" not in node.value or network.prefixlen != right:
        within = ip_network((network.network_address, right), strict=False)
        return f"{lengths}; write e.g. {within}"
    return "" if str(network) == node.value else f"comes as Envoy writes it; write {network}"


def _canonical_spelling(value: str, address: object) -> str:
    """Check the spelling of an address: of the many for IPv6, Envoy sends one."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return ""
    return "" if str(address) == value else f"comes as Envoy writes it; write {address}"


def _may_be_of_addresses(part: str) -> bool:
    return re.fullmatch(r"[0-9a-f:.]*", part) is not None


def _text(node: Node) -> str:
    """Return the value or pattern as written."""
    return node.pattern.text if node.pattern else node.value
