"""Listening sockets, created here because libraries do not expose all the options."""

from __future__ import annotations

import os
import socket
import stat
import sys
from typing import Any

from ratelimit_rls.errors import SettingsError

LISTEN_BACKLOG = 1024

KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 15
KEEPALIVE_PROBES = 4
USER_TIMEOUT_MS = 60_000
"""A peer that vanished is detected after two minutes, or after one minute if something was sent to it."""


def listening_socket(target: str, *, reuse_port: bool = False) -> socket.socket:
    """Return a socket that listens on "host:port", "[v6]:port" or "unix:/path". Raises SettingsError."""
    try:
        if target.startswith("unix:"):
            return _unix(target.removeprefix("unix:"))
        return _tcp(*_host_port(target), reuse_port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {target}: {error.strerror or error}") from error


def host_port(host: str, port: int) -> str:
    """Join host and port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_target(target: str) -> None:
    """Raise SettingsError if the target is malformed, or is a Unix socket that another process listens on.

    Libraries differ in how they treat a malformed target, and silently replace the socket of a live server.
    """
    if target.startswith("unix:@"):
        raise SettingsError(f"cannot listen on {target}: abstract sockets are not supported; use a path")
    if target.startswith("unix:"):
        _reject_live_socket(target.removeprefix("unix:"))
    else:
        _host_port(target)


def _reject_live_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:  # no listener: a stale socket, another kind of file, or no file
            return
    raise SettingsError(f"cannot listen on unix:{path}: another process listens there; stop it, or use another path")


def _host_port(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"cannot listen on {target!r}: it must be host:port, [IPv6 address]:port or unix:/path")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _tcp(host: str, port: int, reuse_port: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _keep_alive(listening)
        return _listen(listening, address)
    except BaseException:
        listening.close()
        raise


def _keep_alive(listening: socket.socket) -> None:
    """Enable TCP keepalive. Accepted sockets inherit these options on Linux, the only system that has all of them."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def _unix(path: str) -> socket.socket:
    """Listen on a Unix socket. Replaces a stale socket of an earlier process, but no other kind of file."""
    _reject_live_socket(path)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        return _listen(listening, path)
    except BaseException:
        listening.close()
        raise


def _listen(listening: socket.socket, address: tuple[Any, ...] | str) -> socket.socket:
    listening.bind(address)
    listening.listen(LISTEN_BACKLOG)
    listening.setblocking(False)
    return listening
