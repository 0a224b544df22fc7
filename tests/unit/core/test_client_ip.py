"""Whose request it is: a spoofed X-Forwarded-For is never believed beyond what was configured."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from ratelimit_rls.core.client_ip import LONGEST_ADDRESS, ClientIp, canonical

LB = "10.0.0.2"  # the trusted proxy that the connection comes from


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
def test_an_ipv6_address_has_one_spelling(spelling: str) -> None:
    assert canonical(spelling) == "2001:db8::1"


@pytest.mark.parametrize("spelling", ["192.0.2.1", "192.0.2.1:80", "::ffff:192.0.2.1", "[::ffff:c000:201]:80"])
def test_an_ipv4_address_has_one_spelling_in_either_clothes(spelling: str) -> None:
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
        "1" * (LONGEST_ADDRESS + 1),
    ],
)
def test_what_is_not_an_address_is_none(garbage: str) -> None:
    assert canonical(garbage) is None


def test_addresses_of_one_network_are_one_client() -> None:
    client_ip = ClientIp(ipv6_prefix=64)
    first, second = (client_ip.of(peer, "") for peer in ("2001:db8:1:2::a", "2001:db8:1:2:ffff::b"))
    assert first == second == "2001:db8:1:2::"
    assert client_ip.of("2001:db8:1:3::a", "") == "2001:db8:1:3::"
    assert client_ip.of("192.0.2.1", "") == "192.0.2.1", "the prefix is IPv6's alone"
    assert client_ip.of("::ffff:192.0.2.1", "") == "192.0.2.1"


def test_without_trusted_proxies_the_list_is_not_looked_at() -> None:
    assert ClientIp().of("192.0.2.1", "203.0.113.9") == "192.0.2.1"


@pytest.mark.parametrize(
    ("trusted_proxies", "forwarded_for", "client"),
    [
        (1, "192.0.2.7", "192.0.2.7"),
        (1, "6.6.6.6, 192.0.2.7", "192.0.2.7"),  # what the client wrote itself stands further left
        (1, "6.6.6.6,7.7.7.7,192.0.2.7", "192.0.2.7"),
        (2, "6.6.6.6, 192.0.2.7, 10.0.0.1", "192.0.2.7"),
        (2, "192.0.2.7, 10.0.0.1", "192.0.2.7"),
        (2, "192.0.2.7", LB),  # shorter than it can be: not the way that was configured
        (1, "", LB),
        (1, ",", LB),
        (1, "6.6.6.6, unknown", LB),  # garbage where the client's address should be
        (1, "6.6.6.6,", LB),
        (1, "6.6.6.6, 192.0.2.7:1234", "192.0.2.7"),
    ],
)
@pytest.mark.parametrize("envoy_adds", [False, True])
def test_the_list_is_read_from_the_right_as_far_as_there_are_trusted_proxies(
    trusted_proxies: int, forwarded_for: str, client: str, envoy_adds: bool
) -> None:
    client_ip = ClientIp(trusted_proxies, use_remote_address=envoy_adds)
    if envoy_adds:
        forwarded_for = f"{forwarded_for},{LB}" if forwarded_for else LB
    assert client_ip.of(LB, forwarded_for) == client


def test_a_list_that_does_not_end_as_it_was_said_to_is_not_believed() -> None:
    told = ClientIp(1, use_remote_address=True)
    assert told.of(LB, "6.6.6.6, 192.0.2.7") == LB


def test_envoy_writes_the_machine_s_own_address_for_a_loopback_connection() -> None:
    told = ClientIp(1, use_remote_address=True)
    assert told.of("127.0.0.1", "6.6.6.6, 192.0.2.7, 172.17.0.4") == "192.0.2.7"
    assert told.of("::1", "192.0.2.7, 172.17.0.4") == "192.0.2.7"


def test_a_unix_socket_has_no_address_but_what_a_trusted_proxy_wrote() -> None:
    assert ClientIp().of("", "6.6.6.6") is None
    assert ClientIp(1).of("", "6.6.6.6, 192.0.2.7") == "192.0.2.7"
    assert ClientIp(1, use_remote_address=True).of("", "6.6.6.6, 192.0.2.7") == "192.0.2.7"
    assert ClientIp(1).of("", "") is None


def test_spellings_in_the_list_are_one_client() -> None:
    client_ip = ClientIp(1, ipv6_prefix=56)
    lists = ("2001:db8:0:1::1", "[2001:DB8:0:1::2]:9", "x, 2001:0db8:0000:0002::3%eth0")
    assert {client_ip.of(LB, forwarded_for) for forwarded_for in lists} == {"2001:db8::"}


def test_a_long_list_costs_what_is_trusted_of_it() -> None:
    forwarded_for = "6.6.6.6," * 100_000 + "192.0.2.7"
    assert ClientIp(1).of(LB, forwarded_for) == "192.0.2.7"
    assert ClientIp(1).of(LB, "x" * 1_000_000) == LB


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "expected"),
    [
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "1.1.1.1, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("10.0.0.1", "203.0.113.9, 10.0.0.1", "203.0.113.9"),  # Envoy has added the connection's own
        ("203.0.113.9", "1.1.1.1", "203.0.113.9"),  # a stranger's word
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),  # nobody but proxies
        ("10.0.0.1", "203.0.113.9, garbage", "10.0.0.1"),
        ("10.0.0.1", "garbage, 10.0.0.2", "10.0.0.2"),
        ("fd00::1", "2001:db8:0:1:2::3", "2001:db8:0:1::"),
        ("::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("", "203.0.113.9", None),  # a Unix socket
        ("10.0.0.1", ", ".join(["203.0.113.9"] + ["10.0.0.2"] * 40), "10.0.0.2"),  # looked at so far, and no further
    ],
)
def test_proxies_may_be_trusted_by_where_they_are(peer: str, forwarded_for: str, expected: str | None) -> None:
    networks = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
    assert ClientIp(trusted_networks=networks, ipv6_prefix=64).of(peer, forwarded_for) == expected
