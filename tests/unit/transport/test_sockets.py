from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.tls.certificates import matches_dns_name
from ratelimit_rls.transport.sockets import check_target, listening_socket


@pytest.mark.parametrize("target", ["", "8081", "host:", ":8081", "host:http", "host:65536", "host:-1", "unix:@name"])
def test_malformed_target_is_rejected(target: str) -> None:
    with pytest.raises(SettingsError, match="cannot listen on"):
        check_target(target)


@pytest.mark.parametrize("target", ["0.0.0.0:8081", "[::]:0", "localhost:65535", "unix:/run/rls.sock"])
def test_valid_target_is_accepted(target: str) -> None:
    check_target(target)


def test_port_is_shared_only_with_reuse_port_on_both() -> None:
    with listening_socket("127.0.0.1:0", reuse_port=True) as first:
        target = f"127.0.0.1:{first.getsockname()[1]}"
        listening_socket(target, reuse_port=True).close()
        with pytest.raises(SettingsError, match="in use"):
            listening_socket(target)


def test_other_file_is_not_replaced_by_a_socket(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(SettingsError, match="in use"):
        listening_socket(f"unix:{precious}")
    assert precious.read_text() == "data"


def test_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/a.sock"
    listening_socket(target).close()
    with listening_socket(target), socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{tmp_path}/a.sock")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("envoy.test", "ENVOY.test", True),
        ("envoy.test", "other.envoy.test", False),
        ("*.envoy.test", "a.envoy.test", True),
        ("*.envoy.test", "a.b.envoy.test", False),
        ("*.envoy.test", "envoy.test", False),
        ("*.envoy.test", ".envoy.test", False),
        ("a*.envoy.test", "ab.envoy.test", False),
    ],
)
def test_certificate_name_matching(pattern: str, name: str, matches: bool) -> None:
    assert matches_dns_name(pattern, name) is matches
