"""Where one Redis server is and who we are to it, and which servers make up one Redis.

    host:port    /path/to.sock    redis://user:password@host:port/db    unix://user:password@/path/to.sock?db=1
                                  rediss://user:password@host:port/db

No message here repeats the URL: it may hold a password.
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
    """What a TLS connection to Redis is made of; the files are read at every connection."""

    ca_file: str = ""  # trusted beside the system's own
    certificate_file: str = ""
    key_file: str = ""
    check_hostname: bool = True  # whoever a trusted CA vouches for is believed anyhow


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One Redis server; safe to log, since its text never has the password."""

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""  # of the Unix socket; then host and port mean nothing
    database: int = 0
    username: str = ""
    password: SecretStr = field(default=SecretStr(""))
    auth_file: str = ""  # `password` or `user:password`, read at every connection; wins over the two above
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
    """One Redis, of whatever kind; safe to log."""

    kind: Literal["single", "sentinel", "cluster"]
    addresses: tuple[RedisAddress, ...]  # the server, the sentinels, or some nodes of the cluster
    master: str = ""  # the name under which the sentinels know it
    data: RedisAddress | None = None  # with sentinels: who we are to the master, whose place they tell

    def __str__(self) -> str:
        """As REDIS_URL would name it, without secrets."""
        return ",".join([*filter(None, [self.master]), *map(str, self.addresses)])


def parse_redis_address(url: str, *, is_path: bool = False) -> RedisAddress:
    """Raises ValueError with the rest of a sentence. `is_path`: text that names no port is a socket, not a mistake."""
    if "://" in url:
        return _from_url(url)
    if (is_path and ":" not in url) or url.startswith(("/", "./", "../")):
        return RedisAddress(path=url)
    return _from_host_port(url)


def parse_auth(auth: str) -> tuple[str, str]:
    """User and password of `password` or `user:password` (the reference splits at the first colon, too)."""
    user, colon, password = auth.partition(":")
    return (user, password) if colon else ("", auth)


def _from_url(url: str) -> RedisAddress:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"is not a URL that can be read; {_FORMS}") from None
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
