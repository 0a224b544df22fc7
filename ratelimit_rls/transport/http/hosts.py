"""Checks against requests that web pages make a browser send: cross-origin requests and DNS rebinding.

A browser declares the origin of a request (Origin, Sec-Fetch-Site); programs such as curl and Envoy do not. With DNS
rebinding, a page has the same origin as the server it attacks, because its own name resolves to this address. Only the
Host header reveals that, so names that anyone can register are rejected where a request needs no credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

Fields = Iterable[tuple[bytes, bytes]]
"""Header fields with lower-case names."""

_AUTHORITY = re.compile(r"(\[[0-9a-z:.%]+\]|[^\s:/@?#\[\]\\,]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_ORIGIN = re.compile(r"(https?)://(.*)", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}

INTERNAL_DOMAINS = ("localhost", "local", "internal", "home.arpa", "test", "svc")
"""Domains in which the public cannot register names: reserved ones, and those of Kubernetes (also `.cluster.local`)."""

_SAME_ORIGIN = (b"same-origin", b"none")
"""Allowed values of Sec-Fetch-Site: from this origin, or not from a page."""


def is_cross_origin(fields: Fields) -> bool:
    """Return whether the request comes from a page of another or of an unknown origin."""
    origins, hosts = [], []
    for name, value in fields:
        if name == b"sec-fetch-site" and value.strip().lower() not in _SAME_ORIGIN:
            return True
        if name == b"origin":
            origins.append(value)
        elif name == b"host":
            hosts.append(value)
    if not origins:
        return False
    if len(origins) != 1 or len(hosts) != 1:
        return True
    found = _ORIGIN.fullmatch(origins[0].decode("latin-1").strip())
    if found is None:
        return True
    default = _DEFAULT_PORTS[found[1].lower()]
    origin = _parse_authority(found[2], default)
    return origin is None or origin != _parse_authority(hosts[0].decode("latin-1"), default)


class AllowedHosts:
    """Allowed values of the Host header: addresses, names without a dot, INTERNAL_DOMAINS, and configured names."""

    def __init__(self, listed: Sequence[str] = ()) -> None:
        """`listed` contains names, "*.domain" for all names in a domain, or "*" for all names."""
        names = [name.lower().removesuffix(".") for name in listed if name]
        self._all = "*" in names
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(f".{domain}" for domain in INTERNAL_DOMAINS)
        self._suffixes += tuple(name[1:] for name in names if name.startswith("*."))

    def allow(self, fields: Fields) -> bool:
        """Return whether Host is allowed. It may be missing, as in HTTP/1.0, because browsers always send it."""
        hosts = [value.decode("latin-1") for name, value in fields if name == b"host"]
        return not hosts or (len(hosts) == 1 and self._allows(hosts[0]))

    def _allows(self, host: str) -> bool:
        authority = _parse_authority(host, 0)
        if self._all:
            return True
        if authority is None:
            return False
        name = authority[0]
        return "." not in name or name in self._names or name.endswith(self._suffixes) or _is_address(name)


def _parse_authority(text: str, default_port: int) -> tuple[str, int] | None:
    """Return the normalised name and the port, or None. `host.` with a trailing dot is the same as `host`."""
    found = _AUTHORITY.fullmatch(text.strip())
    if found is None:
        return None
    name = found[1].lower().removesuffix(".").removeprefix("[").removesuffix("]")
    return (name, int(found[2] or default_port)) if name else None


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
