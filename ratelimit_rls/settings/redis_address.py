"""Addresses and credentials of Redis servers.

    host:port    /path/to.sock    redis://user:password@host:port/db    unix://user:password@/path/to.sock?db=1
                                  rediss://user:password@host:port/db

No error message quotes the URL, since it may contain a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import SecretStr

DEFAULT_PORT = 6379

_FORMS = "use host:port, a socket path, redis(s)://user:password@host:port/db or unix:///path/to.sock?db=0"
_SCHEMES = ("redis", "rediss", "unix")
_PARAMETERS = ("db", "username", "password")


@dataclass(frozen=True, slots=True)
class RedisTls:
    """TLS options for Redis. The files are read for each new connection."""

    ca_file: str = ""  # trusted in addition to the system's CAs
    certificate_file: str = ""
    key_file: str = ""
    check_hostname: bool = True  # False: accept any certificate of a trusted CA


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Address of one Redis server. Safe to log: its text never contains the password."""

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""  # Unix socket; if set, host and port are unused
    database: int = 0
    username: str = ""
    password: SecretStr = field(default=SecretStr(""))
    auth_file: str = ""  # `password` or `user:password`, read for each new connection; replaces the two above
    tls: RedisTls | None = None

    @property
    def network(self) -> Literal["tcp", "unix"]:
        return "unix" if self.path else "tcp"

    def __str__(self) -> str:
        user = f"{self.username}@" if self.username else ""
        if self.path:
            return f"unix://{user}{self.path}" + (f"?db={self.database}" if self.database else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{user}{host}:{self.port}" + (f"/{self.database}" if self.database else "")


@dataclass(frozen=True, slots=True)
class RedisServers:
    """Servers of one Redis deployment. Safe to log."""

    kind: Literal["single", "sentinel", "cluster"]
    addresses: tuple[RedisAddress, ...]  # the server, the sentinels, or seed nodes of the cluster
    master: str = ""  # name of the master, with sentinels
    data: RedisAddress | None = None  # with sentinels: credentials and TLS for the master

    def __str__(self) -> str:
        """Return the servers as in REDIS_URL, without secrets."""
        return ",".join([*filter(None, [self.master]), *map(str, self.addresses)])


def parse_redis_address(url: str, *, is_path: bool = False) -> RedisAddress:
    """Parse an address. Raises ValueError with the second half of a sentence.

    `is_path`: a text without a port is a socket path, not an error.
    """
    if "://" in url:
        return _from_url(url)
    if (is_path and ":" not in url) or url.startswith(("/", "./", "../")):
        return RedisAddress(path=url)
    return _from_host_port(url)


def parse_auth(auth: str) -> tuple[str, str]:
    """Return user and password of `password` or `user:password`, split at the first colon (as envoyproxy/ratelimit)."""
    user, colon, password = auth.partition(":")
    return (user, password) if colon else ("", auth)


def _from_url(url: str) -> RedisAddress:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"is not a valid URL; {_FORMS}") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"has a scheme other than redis, rediss or unix; {_FORMS}")
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    if any(name not in _PARAMETERS for name in parameters) or parts.fragment:
        raise ValueError(f"has a parameter that is not one of {', '.join(_PARAMETERS)}; {_FORMS}")
    address = RedisAddress(
        username=parameters.get("username", unquote(parts.username or "")),
        password=SecretStr(parameters.get("password", unquote(parts.password or ""))),
    )
    if parts.scheme == "unix":
        if parts.hostname or not parts.path.strip("/"):
            raise ValueError("names no socket; use unix:///path/to.sock, with three slashes")
        return replace(address, path=unquote(parts.path), database=_database(parameters.get("db", "")))
    database = _database(parameters.get("db", parts.path.strip("/")))
    tls = RedisTls() if parts.scheme == "rediss" else None
    return replace(address, host=_host(parts), port=DEFAULT_PORT if port is None else port, database=database, tls=tls)


def _host(parts: SplitResult) -> str:
    if not parts.hostname:
        raise ValueError("names no host; use redis://host:port")
    return parts.hostname


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError("has a database that is not a number; use redis://host:port/0")
    return int(text or "0")


def _from_host_port(text: str) -> RedisAddress:
    if "@" in text:
        raise ValueError("has credentials but no scheme; use redis://user:password@host:port")
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and 0 < int(port) <= 65_535):
        raise ValueError(f"has no port; {_FORMS}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("has an IPv6 address without brackets; use [::1]:6379")
    return RedisAddress(host=host or "localhost", port=int(port))
