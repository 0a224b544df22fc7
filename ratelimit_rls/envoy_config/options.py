"""How Envoy is to ask: where the service is, how long to wait for it, and what to do without it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from ratelimit_rls.core.span import parse_span


@dataclass(frozen=True, slots=True)
class Tls:
    """Files as Envoy will see them; they need not exist here."""

    cacert: str
    cert: str = ""  # with its key: mutual TLS
    key: str = ""
    server_name: str = ""  # that the service's certificate must have


@dataclass(frozen=True, slots=True)
class Server:
    """The rate limit service as Envoy reaches it."""

    host: str  # empty: on the Unix socket
    port: int = 0
    unix_socket: str = ""
    tls: Tls | None = None
    health_check: bool = False

    @property
    def is_ip(self) -> bool:
        return is_ip(self.host)


@dataclass(frozen=True, slots=True)
class Options:
    server: Server
    cluster: str  # its name
    authority: str = ""  # of the calls; empty: the cluster's name
    timeout_us: int | None = None  # None: DEFAULT_TIMEOUT_US, and as much more as the rules may hold an answer
    deny_on_failure: bool = False
    x_ratelimit_headers: bool = True


ADMIN_PORT = 9901

SHORTEST_TIMEOUT_US = 1_000

_DNS_NAME = re.compile(r"\w(?:[\w.-]*[\w.])?", re.ASCII)

DEFAULT_TIMEOUT_US = 100_000
"""Envoy's own is 20 ms: so short that a pause anywhere lets requests through uncounted."""


def parse_host_port(text: str) -> tuple[str, int]:
    """Raises ValueError with the end of a sentence that starts with the text."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("is not HOST:PORT")
    if not (is_ip(host) or _DNS_NAME.fullmatch(host)):
        raise ValueError(f"has the host {host!r}, which is neither a name nor an IP address; use one HOST:PORT")
    return host, int(port)


def parse_listen(text: str) -> tuple[str, int]:
    """Likewise, of an address that Envoy can listen on."""
    host, port = parse_host_port(text)
    if not is_ip(host):
        raise ValueError(f"has the name {host!r}, and Envoy listens on IP addresses; use e.g. 127.0.0.1:{port}")
    if port == ADMIN_PORT:
        raise ValueError("has the port of Envoy's admin page; use another")
    return host, port


def parse_timeout(text: str) -> int:
    """Likewise, in microseconds."""
    us = parse_span(text)
    if us < SHORTEST_TIMEOUT_US:
        raise ValueError("is less than 1ms, which Envoy takes for no limit at all; use e.g. 100ms")
    return us


def is_ip(host: str) -> bool:
    """Whether Envoy need not look it up."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
