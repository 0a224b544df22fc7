"""How Envoy is to ask: where the service is, how long to wait for it, and what to do without it."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address


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


DEFAULT_TIMEOUT_US = 100_000
"""Envoy's own is 20 ms: so short that a pause anywhere lets requests through uncounted."""


def parse_host_port(text: str) -> tuple[str, int]:
    """Raises ValueError with the end of a sentence that starts with the text."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("is not HOST:PORT")
    return host, int(port)


def is_ip(host: str) -> bool:
    """Whether Envoy need not look it up."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
