"""Options of the generated configuration: the service's address, timeouts and failure behaviour."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from ratelimit_rls.core.duration import parse_duration_us


@dataclass(frozen=True, slots=True)
class UpstreamTls:
    """TLS files as Envoy will see them; they need not exist on this machine."""

    cacert: str
    cert: str = ""  # with `key`, for mutual TLS
    key: str = ""
    server_name: str = ""  # expected in the service's certificate


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Address of the rate limit service as Envoy reaches it."""

    host: str  # "": on the Unix socket
    port: int = 0
    unix_socket: str = ""
    tls: UpstreamTls | None = None
    health_check: bool = False

    @property
    def is_ip(self) -> bool:
        return is_ip(self.host)


@dataclass(frozen=True, slots=True)
class EnvoyConfigOptions:
    server: ServiceAddress
    cluster: str  # name of the service's cluster
    authority: str = ""  # of the calls; "": the cluster's name
    timeout_us: int | None = None  # None: DEFAULT_TIMEOUT_US plus the longest delay of the rules
    deny_on_failure: bool = False
    x_ratelimit_headers: bool = True


ADMIN_PORT = 9901

MIN_TIMEOUT_US = 1_000

_DNS_NAME = re.compile(r"\w(?:[\w.-]*[\w.])?", re.ASCII)

DEFAULT_TIMEOUT_US = 100_000
"""Default timeout. Envoy's own is 20 ms, so short that any pause lets requests pass uncounted."""


def parse_host_port(text: str) -> tuple[str, int]:
    """Parse HOST:PORT. Raise ValueError with a message that completes a sentence starting with the text."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("is not HOST:PORT")
    if not (is_ip(host) or _DNS_NAME.fullmatch(host)):
        raise ValueError(f"has the host {host!r}, which is neither a DNS name nor an IP address; use one HOST:PORT")
    return host, int(port)


def parse_listen(text: str) -> tuple[str, int]:
    """Parse HOST:PORT of an address that Envoy can listen on. Raise ValueError as `parse_host_port` does."""
    host, port = parse_host_port(text)
    if not is_ip(host):
        raise ValueError(
            f"has the host name {host!r}, but Envoy listens on IP addresses only; use e.g. 127.0.0.1:{port}"
        )
    if port == ADMIN_PORT:
        raise ValueError("uses the port of Envoy's admin page; use another")
    return host, port


def parse_timeout(text: str) -> int:
    """Parse a timeout to microseconds. Raise ValueError as `parse_host_port` does."""
    us = parse_duration_us(text)
    if us < MIN_TIMEOUT_US:
        raise ValueError("is less than 1ms, which Envoy treats as no timeout; use e.g. 100ms")
    return us


def is_ip(host: str) -> bool:
    """Return whether the host is an IP address, which Envoy need not resolve."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
