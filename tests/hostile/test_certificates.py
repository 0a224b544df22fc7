"""Wrong client certificates at a real server: a call on such a connection is not answered, and counts for nothing."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bench import wire
from ratelimit_rls.protos.messages import RateLimitResponse
from tests.hostile.envoy_calls import counts_by_reason
from tests.support.certificates import Authority
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SERVER = "rls.test"
CLIENT = "envoy.test"
GATEWAY = "spiffe://prod.test/ns/gateway/sa/envoy"
EDGE = "spiffe://prod.test/ns/edge"
LIMIT = 1_000_000
RULES = f"domain: tls\ndescriptors: [{{key: client, rate_limit: {{unit: year, requests_per_unit: {LIMIT}}}}}]\n"
DAY = datetime.timedelta(days=1)
TIMEOUT_S = 10

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def dns(*names: str) -> list[x509.GeneralName]:
    return [x509.DNSName(name) for name in names]


def uri(*uris: str) -> list[x509.GeneralName]:
    return [x509.UniformResourceIdentifier(one) for one in uris]


def pem(key: PrivateKey) -> bytes:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, plain)


def unsigned(
    key: PrivateKey,
    names: Sequence[x509.GeneralName],
    *,
    begins: datetime.timedelta = -DAY,
    ends: datetime.timedelta = DAY,
    usages: Sequence[x509.ObjectIdentifier] = (),
    is_ca: bool = False,
    unknown: bool = False,
) -> x509.CertificateBuilder:
    """Return the builder of a certificate. Its common name is always that of an accepted client."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CLIENT)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if unknown:
        unknown_oid = x509.ObjectIdentifier("1.3.6.1.4.1.55555.1")
        builder = builder.add_extension(x509.UnrecognizedExtension(unknown_oid, b"\x05\x00"), critical=True)
    return builder


def issued(
    authority: Authority,
    names: Sequence[x509.GeneralName] | None = None,
    *,
    key: PrivateKey | None = None,
    **how: object,
) -> bytes:
    """Return a certificate and its key in PEM; by default for CLIENT."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    request = unsigned(key, dns(CLIENT) if names is None else names, **how)  # type: ignore[arg-type]
    return authority.sign(request) + pem(key)


def self_signed() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CLIENT)])
    signed = unsigned(key, dns(CLIENT)).issuer_name(name).sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM) + pem(key)


def signed_by_a_client(authority: Authority) -> bytes:
    """Return a certificate signed with the certificate of an accepted client, which is not a CA, and the chain."""
    client_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    client = authority.sign(unsigned(client_key, dns("other.test")))
    issuer = x509.load_pem_x509_certificate(client).subject
    forged = unsigned(key, dns(CLIENT)).issuer_name(issuer).sign(client_key, hashes.SHA256())
    return forged.public_bytes(serialization.Encoding.PEM) + client + pem(key)


@dataclass(frozen=True, slots=True)
class Authorities:
    trusted: Authority
    middle: Authority
    """Intermediate CA that the trusted CA signed, and that is in the server's file of CAs."""

    revoked_middle: Authority
    unlisted_middle: Authority
    """Intermediate CA that the trusted CA signed, and that is not in the server's file of CAs."""

    stranger: Authority
    namesake: Authority
    """Another CA with the name of the trusted one."""

    revoked: bytes
    """Files of a certificate and its key."""

    @classmethod
    def new(cls, directory: Path) -> Authorities:
        trusted = Authority(directory / "trusted")

        def below(name: str) -> Authority:
            return Authority(directory / name, f"{name} CA", issuer=trusted)

        return cls(
            trusted,
            below("middle"),
            below("revoked"),
            below("unlisted"),
            Authority(directory / "stranger", "another CA"),
            Authority(directory / "namesake"),
            issued(trusted),
        )

    def write_files(self, directory: Path) -> dict[str, object]:
        """Files for a server that accepts CLIENT, GATEWAY and all SPIFFE IDs below EDGE, and its settings."""
        accepted = [self.trusted, self.middle, self.revoked_middle]
        revoked = directory / "revoked.pem"
        revoked.write_bytes(self.revoked)
        bundle, crl = directory / "clients.pem", directory / "crl.pem"
        bundle.write_bytes(b"".join(one.ca_path.read_bytes() for one in accepted))
        lists = self.trusted.crl(revoked, self.revoked_middle.ca_path), self.middle.crl(), self.revoked_middle.crl()
        crl.write_bytes(b"".join(lists))
        certificate, key = self.trusted.issue(SERVER)
        return {
            "GRPC_SERVER_USE_TLS": "true",
            "GRPC_SERVER_TLS_CERT": certificate,
            "GRPC_SERVER_TLS_KEY": key,
            "GRPC_CLIENT_TLS_CACERT": bundle,
            "GRPC_CLIENT_TLS_SAN": f"{CLIENT},{GATEWAY},{EDGE}/*",
            "GRPC_SERVER_TLS_CRL": crl,
        }


class Tls(ServiceProcess):
    """A server, and calls that each use a new connection."""

    def __init__(self, directory: Path) -> None:
        self.authorities = Authorities.new(directory)
        rules = directory / "tls.yaml"
        rules.write_text(RULES)
        super().__init__({"RLS_RULES": rules, **self.authorities.write_files(directory)})

    def context(self, presented: bytes | None) -> ssl.SSLContext:
        """Return the TLS context of a client that accepts short keys and weak signatures."""
        context = ssl.create_default_context(cafile=str(self.authorities.trusted.ca_path))
        context.set_alpn_protocols(["h2"])
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        if presented is not None:
            path = self.directory / "shown.pem"
            path.write_bytes(presented)
            context.load_cert_chain(path)
        return context

    def remaining(self, presented: bytes | None, client: str) -> int | None:
        return self.remaining_by(self.context(presented), client)

    def remaining_by(self, context: ssl.SSLContext, client: str) -> int | None:
        """Return the remaining limit after a call; None if the server closes the connection without a response."""
        try:
            with (
                socket.create_connection(("127.0.0.1", self.grpc_port), timeout=TIMEOUT_S) as plain,
                context.wrap_socket(plain, server_hostname=SERVER) as secured,
            ):
                return _status(secured, "https", client)
        except (ssl.SSLError, ConnectionError):
            return None

    def remaining_in_clear(self, client: str) -> int | None:
        try:
            with socket.create_connection(("127.0.0.1", self.grpc_port), timeout=TIMEOUT_S) as plain:
                return _status(plain, "http", client)
        except ConnectionError:
            return None

    def rejected_clients(self) -> int:
        return counts_by_reason(self, "ratelimit_abuse_total").get("unauthenticated", 0)


def _status(connection: socket.socket, scheme: str, client: str) -> int | None:
    message = wire.rate_limit_request("tls", [[("client", client)]])
    head, _ = wire.header_blocks(scheme, SERVER, "5S")
    body = wire.frame(wire.DATA, wire.END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message)
    connection.sendall(wire.opening() + wire.frame(wire.HEADERS, wire.END_HEADERS, 1, head) + body)
    with connection.makefile("rb") as answers:
        while len(start := answers.read(9)) == 9:
            payload = answers.read(int.from_bytes(start[:3], "big"))
            if start[3] == wire.DATA:
                return int(RateLimitResponse.FromString(payload[5:]).statuses[0].limit_remaining)
    return None


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    """One server for all attacks. Afterwards it still answers a valid client, whose counter is unused."""
    with Tls(tmp_path_factory.mktemp("certificates")) as running:
        yield running
        assert running.remaining(issued(running.authorities.trusted), "attacked") == LIMIT - 1
        assert "Traceback" not in running.log()


WRONG: dict[str, Callable[[Authorities], bytes | None]] = {
    "none": lambda _: None,
    # Signatures and authorities.
    "self-signed": lambda _: self_signed(),
    "of another CA": lambda of: issued(of.stranger),
    "of another CA with the same name": lambda of: issued(of.namesake),
    "signed by a client": lambda of: signed_by_a_client(of.trusted),
    "of an intermediate CA that is not presented": lambda of: issued(of.unlisted_middle),
    "of an intermediate CA without a revocation list": lambda of: (
        issued(of.unlisted_middle) + of.unlisted_middle.ca_path.read_bytes()
    ),
    "of a revoked intermediate CA": lambda of: issued(of.revoked_middle),
    "revoked": lambda of: of.revoked,
    # Validity and key usage.
    "expired": lambda of: issued(of.trusted, begins=-2 * DAY, ends=-datetime.timedelta(minutes=1)),
    "not yet valid": lambda of: issued(of.trusted, begins=datetime.timedelta(minutes=1)),
    "for servers only": lambda of: issued(of.trusted, usages=[ExtendedKeyUsageOID.SERVER_AUTH]),
    "for signing code only": lambda of: issued(of.trusted, usages=[ExtendedKeyUsageOID.CODE_SIGNING]),
    "with an unknown critical extension": lambda of: issued(of.trusted, unknown=True),
    "the certificate of a CA, without the name": lambda of: of.middle.ca_path.read_bytes() + of.middle.key_pem,
    "with an RSA key of 1024 bits": lambda of: issued(of.trusted, key=rsa.generate_private_key(65_537, 1024)),
    # Subject alternative names.
    "common name alone": lambda of: issued(of.trusted, []),
    "another name": lambda of: issued(of.trusted, dns("other.test")),
    "the server's name": lambda of: issued(of.trusted, dns(SERVER)),
    "a name below": lambda of: issued(of.trusted, dns(f"a.{CLIENT}")),
    "a name that begins alike": lambda of: issued(of.trusted, dns(f"{CLIENT}.attacker.test")),
    "a name that ends alike": lambda of: issued(of.trusted, dns(f"not-{CLIENT}")),
    "a name with a NUL": lambda of: issued(of.trusted, dns(f"{CLIENT}\0.attacker.test")),
    "a wildcard one level below": lambda of: issued(of.trusted, dns(f"*.{CLIENT}")),
    "a wildcard for everything": lambda of: issued(of.trusted, dns("*")),
    "a wildcard within a label": lambda of: issued(of.trusted, dns("e*.test", "envoy.*")),
    "the name as an address": lambda of: issued(of.trusted, [x509.IPAddress(ip_address("127.0.0.1"))]),
    "the name as a mail address": lambda of: issued(of.trusted, [x509.RFC822Name(f"root@{CLIENT}")]),
    "the name as a URI": lambda of: issued(of.trusted, uri(f"https://{CLIENT}")),
    "several other names": lambda of: issued(of.trusted, dns("a.test", f"{CLIENT}, DNS:{CLIENT}")),
    # SPIFFE IDs.
    "an ID of another trust domain": lambda of: issued(of.trusted, uri("spiffe://evil.test/ns/gateway/sa/envoy")),
    "a trust domain that begins alike": lambda of: issued(of.trusted, uri("spiffe://prod.test.evil/ns/edge/sa/a")),
    "an ID that begins alike": lambda of: issued(of.trusted, uri(f"{GATEWAY}-2")),
    "an ID below": lambda of: issued(of.trusted, uri(f"{GATEWAY}/admin")),
    "a path that begins alike": lambda of: issued(of.trusted, uri(f"{EDGE}-2/sa/envoy")),
    "the parent of a pattern": lambda of: issued(of.trusted, uri(EDGE)),
    "dots in an ID": lambda of: issued(of.trusted, uri(f"{EDGE}/../gateway/sa/root")),
    "an escaped ID": lambda of: issued(of.trusted, uri(f"{EDGE}/%2e%2e/sa")),
    "a query behind an ID": lambda of: issued(of.trusted, uri(f"{GATEWAY}?a=b")),
    "an ID in capitals": lambda of: issued(of.trusted, uri(GATEWAY.replace("prod.test", "PROD.TEST"))),
    "two IDs": lambda of: issued(of.trusted, uri(GATEWAY, "spiffe://prod.test/ns/other/sa/b")),
    "an ID as a DNS name": lambda of: issued(of.trusted, dns(GATEWAY)),
}


@pytest.mark.parametrize("show", WRONG.values(), ids=WRONG.keys())
def test_wrong_certificate_is_rejected(service: Tls, show: Callable[[Authorities], bytes | None]) -> None:
    before = service.rejected_clients()
    assert service.remaining(show(service.authorities), "attacked") is None
    service.wait_until(lambda: service.rejected_clients() == before + 1, "counts the client as unauthenticated")


def only_version(version: ssl.TLSVersion) -> Callable[[ssl.SSLContext], None]:
    def choose(context: ssl.SSLContext) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version

    return choose


def only_ciphers(names: str) -> Callable[[ssl.SSLContext], None]:
    def choose(context: ssl.SSLContext) -> None:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(f"{names}:@SECLEVEL=0")

    return choose


WEAK: dict[str, Callable[[ssl.SSLContext], None]] = {
    "TLS 1.0": only_version(ssl.TLSVersion.TLSv1),
    "TLS 1.1": only_version(ssl.TLSVersion.TLSv1_1),
    "no encryption": only_ciphers("eNULL"),
    "no server certificate": only_ciphers("aNULL"),
}


@pytest.mark.parametrize("weaken", WEAK.values(), ids=WEAK.keys())
def test_weak_tls_is_rejected(service: Tls, weaken: Callable[[ssl.SSLContext], None]) -> None:
    context = service.context(issued(service.authorities.trusted))
    weaken(context)
    assert service.remaining_by(context, "attacked") is None


def test_plain_text_is_not_answered(service: Tls) -> None:
    assert service.remaining_in_clear("attacked") is None


def test_json_decides_nothing_without_a_certificate(service: Tls) -> None:
    """HTTP stays open for health alone where gRPC clients need a certificate."""
    connection = HTTPConnection("127.0.0.1", service.http_port, timeout=TIMEOUT_S)
    request = {"domain": "tls", "descriptors": [{"entries": [{"key": "client", "value": "attacked"}]}]}
    try:
        connection.request("POST", "/json", json.dumps(request))
        assert connection.getresponse().status == 403
    finally:
        connection.close()


RIGHT: dict[str, Callable[[Authorities], bytes]] = {
    "the name": lambda of: issued(of.trusted),
    "the name in capitals": lambda of: issued(of.trusted, dns(CLIENT.upper())),
    "the name among others": lambda of: issued(of.trusted, dns("a.test", CLIENT)),
    "a wildcard for the name": lambda of: issued(of.trusted, dns("*.test")),
    "the SPIFFE ID": lambda of: issued(of.trusted, uri(GATEWAY)),
    "an ID below a pattern": lambda of: issued(of.trusted, uri(f"{EDGE}/sa/envoy")),
    "for clients": lambda of: issued(of.trusted, usages=[ExtendedKeyUsageOID.CLIENT_AUTH]),
    "of an intermediate CA": lambda of: issued(of.middle),
    "with an RSA key of 2048 bits": lambda of: issued(of.trusted, key=rsa.generate_private_key(65_537, 2048)),
}


@pytest.mark.parametrize("show", RIGHT.values(), ids=RIGHT.keys())
def test_right_certificate_is_accepted(service: Tls, show: Callable[[Authorities], bytes]) -> None:
    before = service.rejected_clients()
    assert service.remaining(show(service.authorities), "innocent") is not None
    assert service.rejected_clients() == before


def test_tls_1_2_is_accepted(service: Tls) -> None:
    context = service.context(issued(service.authorities.trusted))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert service.remaining_by(context, "innocent") is not None
