"""Listening sockets, opened by us wherever a library would not let us choose how."""

from __future__ import annotations

import os
import socket
import stat
from typing import Any

from ratelimit_rls.errors import SettingsError

BACKLOG = 1024


def listening_socket(target: str, *, reuse_port: bool = False) -> socket.socket:
    """A socket that listens on "host:port", "[v6]:port" or "unix:/path"; raises SettingsError if it cannot."""
    try:
        if target.startswith("unix:"):
            return _unix(target.removeprefix("unix:"))
        return _tcp(*_host_port(target), reuse_port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {target}: {error.strerror or error}") from error


def host_port(host: str, port: int) -> str:
    """As one target; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_target(target: str) -> None:
    """Raises SettingsError if the target is not written as one, or is a socket that somebody listens on.

    Libraries differ in what they make of a wrong one, and take a live server's socket away from it without a word.
    """
    if target.startswith("unix:@"):
        raise SettingsError(f"cannot listen on {target}: abstract sockets are not supported; name a path")
    if target.startswith("unix:"):
        _refuse_live(target.removeprefix("unix:"))
    else:
        _host_port(target)


def _refuse_live(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:  # nobody is there: a socket left behind by an earlier process, another file, or none
            return
    raise SettingsError(f"cannot listen on unix:{path}: another process does; stop it, or name another path")


def _host_port(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"cannot listen on {target!r}: write host:port, [IPv6 address]:port or unix:/path")
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
        return _listen(listening, address)
    except BaseException:
        listening.close()
        raise


def _unix(path: str) -> socket.socket:
    """A socket left behind by an earlier process is taken over; any other file is not touched."""
    _refuse_live(path)
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
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening
