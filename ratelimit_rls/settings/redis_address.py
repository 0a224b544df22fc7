"""Where Redis is and who we are to it, from REDIS_URL, REDIS_SOCKET_TYPE and REDIS_AUTH.

    host:port    /path/to.sock    redis://user:password@host:port/db    unix://user:password@/path/to.sock?db=1

No message here repeats the URL: it may hold a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import SecretStr

DEFAULT_PORT = 6379

_FORMS = "use host:port, a socket path, redis://user:password@host:port/db or unix:///path/to.sock?db=0"
_PARAMETERS = ("db", "username", "password")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One Redis server; safe to log, since its text never has the password."""

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""  # of the Unix socket; then host and port mean nothing
    database: int = 0
    username: str = ""
    password: SecretStr = field(default=SecretStr(""))

    @property
    def network(self) -> Literal["tcp", "unix"]:
        return "unix" if self.path else "tcp"

    def __str__(self) -> str:
        user = f"{self.username}@" if self.username else ""
        if self.path:
            return f"unix://{user}{self.path}" + (f"?db={self.database}" if self.database else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis://{user}{host}:{self.port}" + (f"/{self.database}" if self.database else "")


def parse_redis_address(url: str, socket_type: str | None, auth: str) -> RedisAddress:
    """Raises ValueError with a sentence. `socket_type` is None when REDIS_SOCKET_TYPE was not given."""
    if "://" in url:
        address = _from_url(url)
    elif (socket_type == "unix" and ":" not in url) or url.startswith(("/", "./", "../")):
        address = RedisAddress(path=url)
    else:
        address = _from_host_port(url)
    if socket_type is not None and socket_type != address.network:
        what = "a socket path" if address.path else "host:port"
        raise ValueError(f"is {what}, but REDIS_SOCKET_TYPE={socket_type}; make them agree or unset REDIS_SOCKET_TYPE")
    return _with_auth(address, auth)


def _from_url(url: str) -> RedisAddress:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"is not a URL that can be read; {_FORMS}") from None
    if parts.scheme not in ("redis", "unix"):
        raise ValueError(f"has a scheme other than redis or unix; {_FORMS}")
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
    return replace(address, host=_host(parts), port=DEFAULT_PORT if port is None else port, database=database)


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


def _with_auth(address: RedisAddress, auth: str) -> RedisAddress:
    """REDIS_AUTH, `password` or `user:password`, wins over the URL (reference behaviour)."""
    if not auth:
        return address
    user, colon, password = auth.partition(":")
    if not colon:
        return replace(address, username="", password=SecretStr(auth))
    return replace(address, username=user, password=SecretStr(password))
