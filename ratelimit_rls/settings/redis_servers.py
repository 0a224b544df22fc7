"""The servers of one Redis, from the family of variables that names it: REDIS_… or REDIS_PERSECOND_….

    host:port or any one address    one server
    host:port,host:port,…           some nodes of a cluster
    name,host:port,host:port,…      the sentinels that know where the master of that name is

The type decides if it is given; else the form does. Whatever is wrong is a ValueError with a whole sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, cast

from pydantic import SecretStr

from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers, RedisTls, parse_auth, parse_redis_address

Kind = Literal["single", "sentinel", "cluster"]

SOCKET_TYPES = ("tcp", "tcp4", "tcp6", "unix")

_SENTINELS = (
    "Expected master name and a list of urls for the sentinels, in the format: "
    "<redis master name>,<sentinel1>,...,<sentineln>"
)


class Family(NamedTuple):
    """What one family of variables says; None: nobody did."""

    prefix: str
    url: str
    type: str | None
    socket_type: str | None
    auth: str
    auth_file: str
    sentinel_auth: str
    tls: bool
    tls_files: RedisTls  # what TLS is made of, should there be any


def parse_redis_servers(said: Family) -> RedisServers:
    if said.socket_type is not None and said.socket_type not in SOCKET_TYPES:
        networks = f"{', '.join(SOCKET_TYPES[:-1])} or {SOCKET_TYPES[-1]}"
        raise ValueError(f"{said.prefix}SOCKET_TYPE={said.socket_type!r} is not a network; use {networks}")
    kind = kind_of(said)
    elements = [element.strip() for element in said.url.split(",")]
    if kind == "single":
        return RedisServers("single", (_only(said, elements),))
    if said.socket_type == "unix":
        listed = "the nodes of a cluster" if kind == "cluster" else "sentinels"
        raise ValueError(f"{said.prefix}SOCKET_TYPE=unix is not for {listed}, which are reached by host:port; unset it")
    if kind == "cluster":
        nodes = _alike(said, [_listed(said, place, text) for place, text in enumerate(elements, 1)])
        if any(node.database for node in nodes):
            raise ValueError(f"{said.prefix}URL names a database, but a cluster has none except 0; leave it out")
        return RedisServers("cluster", tuple(_as_user(node, said) for node in nodes))
    if len(elements) < 2:
        raise ValueError(f"{said.prefix}URL: {_SENTINELS}")
    return _sentinels(said, elements[0], elements[1:])


def kind_of(said: Family) -> Kind:
    """The type decides if it is given; else the form of the URL does."""
    if said.type is None:
        first, comma, _ = said.url.partition(",")
        if not comma:
            return "single"
        return "cluster" if ":" in first or first.startswith(("/", "./", "../")) else "sentinel"
    kind = said.type.lower()
    if kind not in ("single", "sentinel", "cluster"):
        raise ValueError(
            f"{said.prefix}TYPE={said.type!r}: Unrecognized redis type {said.type}; use SINGLE, CLUSTER or SENTINEL"
        )
    return cast("Kind", kind)


def _only(said: Family, elements: Sequence[str]) -> RedisAddress:
    if len(elements) > 1:
        raise ValueError(
            f"{said.prefix}URL is a list, but {said.prefix}TYPE={said.type}; use CLUSTER or SENTINEL, "
            "or name one server (a comma in a password is written %2C)"
        )
    try:
        address = parse_redis_address(elements[0], is_path=said.socket_type == "unix")
    except ValueError as fault:
        raise ValueError(f"{said.prefix}URL {fault}") from None
    network = "unix" if address.path else "tcp"
    if said.socket_type is not None and network not in said.socket_type:
        what = "a socket path" if address.path else "host:port"
        raise ValueError(
            f"{said.prefix}URL is {what}, but {said.prefix}SOCKET_TYPE={said.socket_type}; "
            f"make them agree or unset {said.prefix}SOCKET_TYPE"
        )
    if address.path and said.tls:
        raise ValueError(f"{said.prefix}TLS=true is not for a socket of the same machine; unset it or use host:port")
    return _as_user(_alike(said, [address])[0], said)


def _listed(said: Family, place: int, text: str) -> RedisAddress:
    try:
        if not text:
            raise ValueError("is empty; use host:port,host:port,…")
        address = parse_redis_address(text)
        if address.path:
            raise ValueError("is a socket path; in a list, use host:port")
    except ValueError as fault:
        raise ValueError(f"{said.prefix}URL: element {place} {fault}") from None
    return address


def _alike(said: Family, addresses: Sequence[RedisAddress]) -> list[RedisAddress]:
    """All with the same TLS and credentials: others will be found that nobody has listed, and need them too."""
    known = {(one.username, one.password.get_secret_value()) for one in addresses} - {("", "")}
    if len(known) > 1:
        raise ValueError(f"{said.prefix}URL has more than one user or password; give all elements the same")
    username, password = known.pop() if known else ("", "")
    with_tls = said.tls or any(one.tls for one in addresses)
    tls = said.tls_files if with_tls else None
    return [replace(one, username=username, password=SecretStr(password), tls=tls) for one in addresses]


def _sentinels(said: Family, master: str, elements: Sequence[str]) -> RedisServers:
    if not master or ":" in master:
        raise ValueError(f"{said.prefix}URL: {_SENTINELS}")
    sentinels = _alike(said, [_listed(said, place, text) for place, text in enumerate(elements, 2)])
    if any(sentinel.database for sentinel in sentinels):
        raise ValueError(f"{said.prefix}URL names a database, but sentinels have none; leave it out, 0 is used")
    if said.sentinel_auth:
        username, password = parse_auth(said.sentinel_auth)
        sentinels = [replace(one, username=username, password=SecretStr(password)) for one in sentinels]
    data = _as_user(RedisAddress(tls=sentinels[0].tls), said)
    return RedisServers("sentinel", tuple(sentinels), master, data)


def _as_user(address: RedisAddress, said: Family) -> RedisAddress:
    """REDIS_AUTH wins over the URL (reference behaviour), and so does the file that stands for it."""
    if said.auth_file:
        return replace(address, username="", password=SecretStr(""), auth_file=said.auth_file)
    if not said.auth:
        return address
    username, password = parse_auth(said.auth)
    return replace(address, username=username, password=SecretStr(password))
