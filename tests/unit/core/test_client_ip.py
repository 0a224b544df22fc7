"""Client addresses: X-Forwarded-For is trusted only as far as configured."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from ratelimit_rls.core.client_ip import MAX_ADDRESS_LENGTH, ClientIp, canonical

LB = "10.0.0.2"  # address of the trusted proxy, the peer of the connection


@pytest.mark.parametrize(
    "spelling",
    [
        "2001:db8::1",
        "2001:DB8::1",
        "2001:0db8:0000:0000:0000:0000:0000:0001",
        "2001:db8:0:0::1",
        "[2001:db8::1]",
        "[2001:db8::1]:443",
        "2001:db8::1%eth0",
        "[2001:db8::1%25eth0]:443",
        " 2001:db8::1\t",
        "2001:db8::0.0.0.1",
    ],
)
def test_ipv6_address_is_canonicalized(spelling: str) -> None:
    assert canonical(spelling) == "2001:db8::1"


@pytest.mark.parametrize("spelling", ["192.0.2.1", "192.0.2.1:80", "::ffff:192.0.2.1", "[::ffff:c000:201]:80"])
def test_ipv4_and_mapped_ipv4_addresses_are_canonicalized(spelling: str) -> None:
    assert canonical(spelling) == "192.0.2.1"


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        " ",
        "unknown",
        "_hidden",
        "192.0.2",
        "192.0.2.256",
        "192.000.002.001",
        "1e3",
        "3232235777",
        "0x7f000001",
        "192.0.2.1:",
        "192.0.2.1:port",
        "192.0.2.1:١",
        "[2001:db8::1",
        "[2001:db8::1]443",
        "[2001:db8::1]x",
        "2001:db8::1::",
        "192.0.2.1, 192.0.2.2",
        "%eth0",
        "1" * (MAX_ADDRESS_LENGTH + 1),
    ],
)
def test_invalid_address_is_none(garbage: str) -> None:
    assert canonical(garbage) is None


def test_ipv6_addresses_of_one_network_are_one_client() -> None:
    client_ip = ClientIp(ipv6_prefix=64)
    first, second = (client_ip.of(peer, "") for peer in ("2001:db8:1:2::a", "2001:db8:1:2:ffff::b"))
    assert first == second == "2001:db8:1:2::"
    assert client_ip.of("2001:db8:1:3::a", "") == "2001:db8:1:3::"
    assert client_ip.of("192.0.2.1", "") == "192.0.2.1", "the prefix applies to IPv6 only"
    assert client_ip.of("::ffff:192.0.2.1", "") == "192.0.2.1"


def test_forwarded_for_is_ignored_without_trusted_proxies() -> None:
    assert ClientIp().of("192.0.2.1", "203.0.113.9") == "192.0.2.1"


@pytest.mark.parametrize(
    ("trusted_proxies", "forwarded_for", "client"),
    [
        (1, "192.0.2.7", "192.0.2.7"),
        (1, "6.6.6.6, 192.0.2.7", "192.0.2.7"),  # entries forged by the client are further left
        (1, "6.6.6.6,7.7.7.7,192.0.2.7", "192.0.2.7"),
        (2, "6.6.6.6, 192.0.2.7, 10.0.0.1", "192.0.2.7"),
        (2, "192.0.2.7, 10.0.0.1", "192.0.2.7"),
        (2, "192.0.2.7", LB),  # too short for the configured number of proxies
        (1, "", LB),
        (1, ",", LB),
        (1, "6.6.6.6, unknown", LB),  # no address at the client's position
        (1, "6.6.6.6,", LB),
        (1, "6.6.6.6, 192.0.2.7:1234", "192.0.2.7"),
    ],
)
@pytest.mark.parametrize("envoy_adds", [False, True])
def test_forwarded_for_is_read_from_the_right_through_trusted_proxies(
    trusted_proxies: int, forwarded_for: str, client: str, envoy_adds: bool
) -> None:
    client_ip = ClientIp(trusted_proxies, use_remote_address=envoy_adds)
    if envoy_adds:
        forwarded_for = f"{forwarded_for},{LB}" if forwarded_for else LB
    assert client_ip.of(LB, forwarded_for) == client


def test_forwarded_for_without_the_peer_at_its_end_is_ignored() -> None:
    client_ip = ClientIp(1, use_remote_address=True)
    assert client_ip.of(LB, "6.6.6.6, 192.0.2.7") == LB


def test_last_entry_is_skipped_for_a_loopback_connection() -> None:
    client_ip = ClientIp(1, use_remote_address=True)
    assert client_ip.of("127.0.0.1", "6.6.6.6, 192.0.2.7, 172.17.0.4") == "192.0.2.7"
    assert client_ip.of("::1", "192.0.2.7, 172.17.0.4") == "192.0.2.7"


def test_unix_socket_client_comes_from_trusted_proxy_only() -> None:
    assert ClientIp().of("", "6.6.6.6") is None
    assert ClientIp(1).of("", "6.6.6.6, 192.0.2.7") == "192.0.2.7"
    assert ClientIp(1, use_remote_address=True).of("", "6.6.6.6, 192.0.2.7") == "192.0.2.7"
    assert ClientIp(1).of("", "") is None


def test_spellings_in_forwarded_for_are_one_client() -> None:
    client_ip = ClientIp(1, ipv6_prefix=56)
    lists = ("2001:db8:0:1::1", "[2001:DB8:0:1::2]:9", "x, 2001:0db8:0000:0002::3%eth0")
    assert {client_ip.of(LB, forwarded_for) for forwarded_for in lists} == {"2001:db8::"}


def test_long_forwarded_for_is_split_only_as_far_as_trusted() -> None:
    forwarded_for = "6.6.6.6," * 100_000 + "192.0.2.7"
    assert ClientIp(1).of(LB, forwarded_for) == "192.0.2.7"
    assert ClientIp(1).of(LB, "x" * 1_000_000) == LB


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "expected"),
    [
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "1.1.1.1, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("10.0.0.1", "203.0.113.9, 10.0.0.1", "203.0.113.9"),  # Envoy appended the address of the connection
        ("203.0.113.9", "1.1.1.1", "203.0.113.9"),  # the peer is not trusted
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),  # proxies only
        ("10.0.0.1", "203.0.113.9, garbage", "10.0.0.1"),
        ("10.0.0.1", "garbage, 10.0.0.2", "10.0.0.2"),
        ("fd00::1", "2001:db8:0:1:2::3", "2001:db8:0:1::"),
        ("::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("", "203.0.113.9", None),  # Unix socket
        ("10.0.0.1", ", ".join(["203.0.113.9"] + ["10.0.0.2"] * 40), "10.0.0.2"),  # only the last entries are examined
    ],
)
def test_trusted_networks(peer: str, forwarded_for: str, expected: str | None) -> None:
    networks = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
    assert ClientIp(trusted_networks=networks, ipv6_prefix=64).of(peer, forwarded_for) == expected
