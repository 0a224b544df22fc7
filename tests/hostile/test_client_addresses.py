"""Spoofed X-Forwarded-For lists at a real server: the sender is still counted under its own address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from tests.hostile.envoy_calls import Checked, EnvoyCalls
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

LIMIT = 1_000_000
ATTACKER, VICTIM = "198.51.100.66", "203.0.113.9"
ATTACKER_V6, VICTIM_V6 = "2001:db8:bad::66", "2001:db8:1::9"
FIRST_PROXY, LAST_PROXY = "10.0.0.1", "10.0.0.2"

PROXIES = {
    "direct": "",
    "one": "trusted_proxies: 1, use_remote_address: false,",
    "two": "trusted_proxies: 2, use_remote_address: true,",
    "networks": "trusted_networks: ['10.0.0.0/8', 'fd00::/8'],",
}
"""Trusted proxies, as the rules of each domain configure them."""

RULES = """\
domain: {domain}
answer: {{headers: [x-ratelimit]}}
identity: {{credentials: [{{kind: api_key, header: x-api-key}}]}}
ext_authz: {{{proxies} ipv6_prefix: 64, descriptors: [{{entries: [{{key: ip, from: client_ip}}]}}]}}
descriptors: [{{key: ip, rate_limit: {{unit: year, requests_per_unit: {limit}}}}}]
"""


class RequestPath(NamedTuple):
    """The path of a client's request to Envoy."""

    domain: str
    peer: str
    """Address of the last proxy before Envoy; empty: the client connects itself."""

    added: tuple[str, ...] = ()
    """Entries that proxies append to the client's list, after the client's address."""

    is_direct: bool = False

    def check(self, calls: EnvoyCalls, client: str, written: str | None = None) -> Checked:
        """Send a request whose client sent `written` as X-Forwarded-For."""
        entries = () if self.is_direct else (client, *self.added)
        forwarded_for = ", ".join(entries if written is None else (written, *entries))
        headers = {"x-forwarded-for": forwarded_for} if forwarded_for or written is not None else {}
        return calls.check(headers, peer=self.peer or client, domain=self.domain)


PATHS = {
    "without proxies": RequestPath("direct", "", is_direct=True),
    "behind one proxy": RequestPath("one", LAST_PROXY),
    "behind two proxies": RequestPath("two", LAST_PROXY, (FIRST_PROXY, LAST_PROXY)),
    "behind proxies of a network": RequestPath("networks", LAST_PROXY),
    "past the proxies of a network": RequestPath("networks", "", is_direct=True),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One server for all attacks. Afterwards it still answers the victims, and their counters are unused."""
    directory = tmp_path_factory.mktemp("addresses")
    for domain, proxies in PROXIES.items():
        (directory / f"{domain}.yaml").write_text(RULES.format(domain=domain, proxies=proxies, limit=LIMIT))
    with ServiceProcess({"RLS_RULES": directory}) as running:
        yield running
        with EnvoyCalls(running.grpc_address) as calls:
            for path in list(PATHS.values())[:4]:
                for victim in (VICTIM, VICTIM_V6):
                    assert path.check(calls, victim).remaining == LIMIT - 1, (path, victim)
        assert "Traceback" not in running.log()


@pytest.fixture(scope="module")
def calls(service: ServiceProcess) -> Iterator[EnvoyCalls]:
    with EnvoyCalls(service.grpc_address) as made:
        yield made


SPOOFED = {
    "the victim": VICTIM,
    "the victim, often": ", ".join([VICTIM] * 20),
    "more hops than there are": f"{VICTIM}, {FIRST_PROXY}, {LAST_PROXY}",
    "the whole way": f"{VICTIM}, {ATTACKER}, {FIRST_PROXY}, {LAST_PROXY}",
    "IPv6": VICTIM_V6,
    "IPv4 in IPv6": f"::ffff:{VICTIM}",
    "IPv4 in IPv6, in hex": "::ffff:cb00:7109",
    "with a port": f"{VICTIM}:443",
    "in brackets, with a port": f"[{VICTIM_V6}]:443",
    "with a zone": f"{VICTIM_V6}%eth0",
    "spaces and tabs": f" \t {VICTIM} \t ",
    "no spaces": f"{VICTIM},{VICTIM}",
    "a comma at the end": f"{VICTIM},",
    "nothing but commas": ",,,,",
    "empty": "",
    "words": f"unknown, _hidden, {VICTIM}, null",
    "loopback": f"{VICTIM}, 127.0.0.1",
    "loopback in IPv6": f"{VICTIM}, ::1",
    "private addresses": f"{VICTIM}, 10.9.9.9, 192.168.0.1, fd00::1",
    "the address of metadata services": "169.254.169.254",
    "any address": "0.0.0.0, ::",
    "a whole number": "3405803785",
    "hex and octal": "0xcb007109, 0313.00.0161.011",
    "too few parts": "203.0.28937",
    "digits of another script": "٢٠٣.٠.١١٣.٩",
    "a network": "203.0.113.0/24",
    "in quotes": f'"{VICTIM}"',
    "an open quote": f'"{VICTIM}',
    "semicolons": f"{VICTIM}; {VICTIM}",
    "as Forwarded has it": f'for={VICTIM};proto=https, for="[{VICTIM_V6}]:1"',
    "an escaped comma": f"{VICTIM}%2C",
    "a comma of another script": f"{VICTIM}，",
    "a line break and a header": f"{VICTIM}\r\nX-Forwarded-For: {VICTIM}",
    "a NUL": f"{VICTIM}\0",
    "4,000 addresses": ", ".join([VICTIM] * 4000),
    "60,000 commas": "," * 60_000,
    "one entry of 60,000 characters": "1" * 60_000,
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("written", SPOOFED.values(), ids=SPOOFED.keys())
def test_spoofed_list_does_not_change_who_is_counted(calls: EnvoyCalls, path: RequestPath, written: str) -> None:
    honest = path.check(calls, ATTACKER)
    spoofed = path.check(calls, ATTACKER, written)

    assert spoofed.upstream["x-ratelimit-ip"] == ATTACKER
    assert spoofed.remaining == honest.remaining - 1


INCOMPLETE = {
    "no list": ("one", LAST_PROXY, "", LAST_PROXY),
    "nothing where the client should be": ("one", LAST_PROXY, f"{VICTIM},", LAST_PROXY),
    "a word where the client should be": ("one", LAST_PROXY, f"{VICTIM}, unknown", LAST_PROXY),
    "a port that is none": ("one", LAST_PROXY, f"{VICTIM}:http", LAST_PROXY),
    "two ports": ("one", LAST_PROXY, f"{VICTIM}:80:80", LAST_PROXY),
    "an open bracket": ("one", LAST_PROXY, f"[{VICTIM_V6}", LAST_PROXY),
    "text behind a bracket": ("one", LAST_PROXY, f"[{VICTIM_V6}]x", LAST_PROXY),
    "leading zeros": ("one", LAST_PROXY, "203.000.113.009", LAST_PROXY),
    "a network in place of an address": ("one", LAST_PROXY, f"{VICTIM}/32", LAST_PROXY),
    "shorter than the way": ("two", LAST_PROXY, VICTIM, LAST_PROXY),
    "shorter by one": ("two", LAST_PROXY, f"{VICTIM}, {LAST_PROXY}", LAST_PROXY),
    "not ended by Envoy": ("two", LAST_PROXY, f"{VICTIM}, {VICTIM}, {FIRST_PROXY}", LAST_PROXY),
    "past the proxies, with their addresses": ("two", ATTACKER, f"{VICTIM}, {FIRST_PROXY}, {LAST_PROXY}", ATTACKER),
    "past the proxies of a network": ("networks", ATTACKER, f"{VICTIM}, {FIRST_PROXY}", ATTACKER),
    "next to the network": ("networks", "11.0.0.1", VICTIM, "11.0.0.1"),
    "the network in IPv6's notation": ("networks", "fc00::1", VICTIM, "fc00::"),
    "a word before the proxies": ("networks", LAST_PROXY, f"{VICTIM}, unknown, {FIRST_PROXY}", FIRST_PROXY),
    "40 proxies": ("networks", LAST_PROXY, ", ".join([VICTIM] + [FIRST_PROXY] * 40), FIRST_PROXY),
    "only proxies": ("networks", LAST_PROXY, f"10.9.9.9, {FIRST_PROXY}", "10.9.9.9"),
}


@pytest.mark.parametrize(("domain", "peer", "forwarded_for", "counted"), INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_x_forwarded_for_that_does_not_match_the_proxies_is_ignored(
    calls: EnvoyCalls, domain: str, peer: str, forwarded_for: str, counted: str
) -> None:
    assert (
        calls.check({"x-forwarded-for": forwarded_for}, peer=peer, domain=domain).upstream["x-ratelimit-ip"] == counted
    )


SPELLINGS = {
    "a port": (f"{ATTACKER}:51234", ATTACKER),
    "IPv4 in IPv6": (f"::ffff:{ATTACKER}", ATTACKER),
    "IPv4 in IPv6, in hex": ("::FFFF:C633:6442", ATTACKER),
    "IPv4 in IPv6, in brackets": (f"[::ffff:{ATTACKER}]:51234", ATTACKER),
    "spaces": (f"  {ATTACKER}\t", ATTACKER),
    "all of IPv6": ("2001:0db8:0bad:0000:0000:0000:0000:0066", ATTACKER_V6),
    "IPv6 in capitals": ("2001:DB8:BAD::66", ATTACKER_V6),
    "IPv6 in brackets": (f"[{ATTACKER_V6}]", ATTACKER_V6),
    "IPv6 with a zone": (f"{ATTACKER_V6}%eth0", ATTACKER_V6),
    "IPv6 that ends as IPv4 does": ("2001:db8:bad::0.0.0.102", ATTACKER_V6),
    "a neighbour in the same network": ("2001:db8:bad::ffff:1", ATTACKER_V6),
    "the last address of the network": ("2001:db8:bad:0:ffff:ffff:ffff:ffff", ATTACKER_V6),
}


@pytest.mark.parametrize("path", [PATHS["behind one proxy"], PATHS["without proxies"]], ids=["list", "connection"])
@pytest.mark.parametrize(("spelled", "client"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_spellings_of_an_address_are_one_client(
    calls: EnvoyCalls, path: RequestPath, spelled: str, client: str
) -> None:
    assert path.check(calls, spelled).remaining == path.check(calls, client).remaining + 1


HEADERS: dict[str, Mapping[str, str]] = {
    name: {name: value}
    for name, value in {
        "x-real-ip": VICTIM,
        "x-client-ip": VICTIM,
        "true-client-ip": VICTIM,
        "cf-connecting-ip": VICTIM,
        "x-envoy-external-address": VICTIM,
        "x-original-forwarded-for": VICTIM,
        "forwarded": f"for={VICTIM}",
        "via": VICTIM,
        "x_forwarded_for": VICTIM,
        "x-forwarded_for": VICTIM,
        "x-ratelimit-ip": VICTIM,
        "ip": VICTIM,
    }.items()
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS.keys())
def test_other_header_names_no_client(calls: EnvoyCalls, headers: Mapping[str, str]) -> None:
    sent = {"x-forwarded-for": ATTACKER, **headers}
    for domain, peer in (("one", LAST_PROXY), ("direct", ATTACKER)):
        assert calls.check(sent, peer=peer, domain=domain).upstream["x-ratelimit-ip"] == ATTACKER


RAW = {
    "two headers": [("x-forwarded-for", VICTIM.encode()), ("x-forwarded-for", ATTACKER.encode())],
    "two headers, one with a comma": [
        ("x-forwarded-for", f"{VICTIM},".encode()),
        ("x-forwarded-for", ATTACKER.encode()),
    ],
    "1,000 headers": [*[("x-forwarded-for", VICTIM.encode())] * 1000, ("x-forwarded-for", ATTACKER.encode())],
    "bytes that are no text": [("x-forwarded-for", b"\xff\xfe\x80"), ("x-forwarded-for", ATTACKER.encode())],
    "a NUL": [("x-forwarded-for", VICTIM.encode() + b"\0"), ("x-forwarded-for", ATTACKER.encode())],
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW.keys())
def test_repeated_header_is_one_list(calls: EnvoyCalls, raw: list[tuple[str, bytes]]) -> None:
    passed = calls.check(raw_headers=raw, peer=LAST_PROXY, domain="one")
    assert passed.upstream["x-ratelimit-ip"] == ATTACKER


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_client_is_counted_under_its_own_address(calls: EnvoyCalls, path: RequestPath) -> None:
    """Each client has its own counter."""
    first, other, again = (path.check(calls, client) for client in ("192.0.2.1", "192.0.2.2", "192.0.2.1"))
    assert [one.upstream["x-ratelimit-ip"] for one in (first, other, again)] == ["192.0.2.1", "192.0.2.2", "192.0.2.1"]
    assert again.remaining == first.remaining - 1
