"""Servers of one Redis deployment, from the REDIS_… or the REDIS_PERSECOND_… variables.

    host:port or any one address    one server
    host:port,host:port,…           seed nodes of a cluster
    name,host:port,host:port,…      name of a master and the sentinels that monitor it

The type determines the form if it is set; otherwise the form of the URL does. Errors are ValueErrors with a whole
sentence.
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


class RedisVariables(NamedTuple):
    """Values of the variables with one prefix. None: not set."""

    prefix: str
    url: str
    type: str | None
    socket_type: str | None
    auth: str
    auth_file: str
    sentinel_auth: str
    tls: bool
    tls_files: RedisTls  # used if TLS is on


def parse_redis_servers(variables: RedisVariables) -> RedisServers:
    if variables.socket_type is not None and variables.socket_type not in SOCKET_TYPES:
        networks = f"{', '.join(SOCKET_TYPES[:-1])} or {SOCKET_TYPES[-1]}"
        raise ValueError(f"{variables.prefix}SOCKET_TYPE={variables.socket_type!r} is not a network; use {networks}")
    kind = deployment_kind(variables)
    elements = [element.strip() for element in variables.url.split(",")]
    if kind == "single":
        return RedisServers("single", (_single_server(variables, elements),))
    if variables.socket_type == "unix":
        listed = "the nodes of a cluster" if kind == "cluster" else "sentinels"
        raise ValueError(
            f"{variables.prefix}SOCKET_TYPE=unix is not valid for {listed}, which need host:port; unset it"
        )
    if kind == "cluster":
        nodes = _with_shared_credentials(
            variables, [_list_element(variables, place, text) for place, text in enumerate(elements, 1)]
        )
        if any(node.database for node in nodes):
            raise ValueError(f"{variables.prefix}URL names a database, but a cluster has only database 0; remove it")
        return RedisServers("cluster", tuple(_with_auth(node, variables) for node in nodes))
    if len(elements) < 2:
        raise ValueError(f"{variables.prefix}URL: {_SENTINELS}")
    return _sentinels(variables, elements[0], elements[1:])


def deployment_kind(variables: RedisVariables) -> Kind:
    """Return the kind of deployment: by the type if it is set, otherwise by the form of the URL."""
    if variables.type is None:
        first, comma, _ = variables.url.partition(",")
        if not comma:
            return "single"
        return "cluster" if ":" in first or first.startswith(("/", "./", "../")) else "sentinel"
    kind = variables.type.lower()
    if kind not in ("single", "sentinel", "cluster"):
        raise ValueError(
            f"{variables.prefix}TYPE={variables.type!r}: Unrecognized redis type {variables.type}; "
            "use SINGLE, CLUSTER or SENTINEL"
        )
    return cast("Kind", kind)


def _single_server(variables: RedisVariables, elements: Sequence[str]) -> RedisAddress:
    if len(elements) > 1:
        raise ValueError(
            f"{variables.prefix}URL is a list, but {variables.prefix}TYPE={variables.type}; use CLUSTER or SENTINEL, "
            "or name one server (a comma in a password is written %2C)"
        )
    try:
        address = parse_redis_address(elements[0], is_path=variables.socket_type == "unix")
    except ValueError as error:
        raise ValueError(f"{variables.prefix}URL {error}") from None
    network = "unix" if address.path else "tcp"
    if variables.socket_type is not None and network not in variables.socket_type:
        form = "a socket path" if address.path else "host:port"
        raise ValueError(
            f"{variables.prefix}URL is {form}, but {variables.prefix}SOCKET_TYPE={variables.socket_type}; "
            f"make them agree or unset {variables.prefix}SOCKET_TYPE"
        )
    if address.path and variables.tls:
        raise ValueError(f"{variables.prefix}TLS=true is not valid for a Unix socket; unset it or use host:port")
    return _with_auth(_with_shared_credentials(variables, [address])[0], variables)


def _list_element(variables: RedisVariables, place: int, text: str) -> RedisAddress:
    try:
        if not text:
            raise ValueError("is empty; use host:port,host:port,…")
        address = parse_redis_address(text)
        if address.path:
            raise ValueError("is a socket path; in a list, use host:port")
    except ValueError as error:
        raise ValueError(f"{variables.prefix}URL: element {place} {error}") from None
    return address


def _with_shared_credentials(variables: RedisVariables, addresses: Sequence[RedisAddress]) -> list[RedisAddress]:
    """Return the addresses with the same TLS and credentials, which servers discovered later need too."""
    known = {(one.username, one.password.get_secret_value()) for one in addresses} - {("", "")}
    if len(known) > 1:
        raise ValueError(f"{variables.prefix}URL has more than one user or password; use the same for all elements")
    username, password = known.pop() if known else ("", "")
    with_tls = variables.tls or any(one.tls for one in addresses)
    tls = variables.tls_files if with_tls else None
    return [replace(one, username=username, password=SecretStr(password), tls=tls) for one in addresses]


def _sentinels(variables: RedisVariables, master: str, elements: Sequence[str]) -> RedisServers:
    if not master or ":" in master:
        raise ValueError(f"{variables.prefix}URL: {_SENTINELS}")
    sentinels = _with_shared_credentials(
        variables, [_list_element(variables, place, text) for place, text in enumerate(elements, 2)]
    )
    if any(sentinel.database for sentinel in sentinels):
        raise ValueError(f"{variables.prefix}URL names a database, but sentinels have none; remove it, 0 is used")
    if variables.sentinel_auth:
        username, password = parse_auth(variables.sentinel_auth)
        sentinels = [replace(one, username=username, password=SecretStr(password)) for one in sentinels]
    data = _with_auth(RedisAddress(tls=sentinels[0].tls), variables)
    return RedisServers("sentinel", tuple(sentinels), master, data)


def _with_auth(address: RedisAddress, variables: RedisVariables) -> RedisAddress:
    """Apply REDIS_AUTH or REDIS_AUTH_FILE, which replace the credentials of the URL, as in envoyproxy/ratelimit."""
    if variables.auth_file:
        return replace(address, username="", password=SecretStr(""), auth_file=variables.auth_file)
    if not variables.auth:
        return address
    username, password = parse_auth(variables.auth)
    return replace(address, username=username, password=SecretStr(password))
