"""The HTTP ports of a running server with TLS, client certificates, a token or Unix sockets."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.grpc_client import Reply
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

NAME = "rls.test"
ASK = json.dumps({"domain": "roomy", "descriptors": [{"entries": [{"key": "all", "value": "hits"}]}]})
TOKEN = "a-token-of-twenty-letters"


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(str(self._path))


class TlsConnection(http.client.HTTPSConnection):
    """Connect to 127.0.0.1 with the name in the certificate."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(NAME, port, timeout=10, context=context)
        self._context = context

    def connect(self) -> None:
        plain = socket.create_connection(("127.0.0.1", self.port), 10)
        self.sock = self._context.wrap_socket(plain, server_hostname=NAME)
        assert self.sock.selected_alpn_protocol() == "http/1.1"


def send(
    connection: http.client.HTTPConnection, path: str, body: str | None = None, headers: Mapping[str, str] | None = None
) -> Reply:
    try:
        connection.request("GET" if body is None else "POST", path, body, dict(headers or {}))
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, names, answer.read().decode())
    finally:
        connection.close()


def plain(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=10)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def mutual(authority: Authority) -> dict[str, object]:
    """Environment of a gRPC port that requires client certificates."""
    certificate, key = authority.issue(NAME)
    return {
        "GRPC_SERVER_USE_TLS": "true",
        "GRPC_SERVER_TLS_CERT": certificate,
        "GRPC_SERVER_TLS_KEY": key,
        "GRPC_CLIENT_TLS_CACERT": authority.ca_path,
        "GRPC_CLIENT_TLS_SAN": "envoy.test",
    }


class TlsService(ServiceProcess):
    """Service whose health is checked over TLS."""

    trusted: Authority

    def ready(self) -> bool:
        try:
            return send(TlsConnection(self.http_port, client_context(self.trusted)), "/healthcheck").status == 200
        except (OSError, http.client.HTTPException):
            return False


def client_context(authority: Authority, client_name: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca_path)
    context.set_alpn_protocols(["h2", "http/1.1"])  # as offered by curl and browsers
    if client_name:
        context.load_cert_chain(*authority.issue(client_name))
    return context


def test_json_is_disabled_if_grpc_requires_client_certificates(rules: Path, mutual: dict[str, object]) -> None:
    with ServiceProcess({"RLS_RULES": rules, **mutual}) as service:
        rejected = send(plain(service.http_port), "/json", ASK)
        assert rejected.status == 403
        assert "RLS_HTTP_JSON=on enables it" in rejected.body
        for path in ("/healthcheck", "/livez"):
            assert send(plain(service.http_port), path).status == 200
        assert "/json is off" in service.log()
        assert 'reason="unauthenticated"' in service.debug("/metrics").body
    with ServiceProcess({"RLS_RULES": rules, **mutual, "RLS_HTTP_JSON": "on"}) as service:
        assert send(plain(service.http_port), "/json", ASK).status == 200


def test_every_http_port_supports_tls_with_client_certificates(
    rules: Path, mutual: dict[str, object], authority: Authority, tmp_path: Path
) -> None:
    metrics_port = free_port()
    service = TlsService(
        {
            "RLS_RULES": rules,
            **mutual,
            "RLS_HTTP_TLS": "true",
            "RLS_HTTP_CLIENT_CERT": "true",
            "USE_PROMETHEUS": "true",
            "PROMETHEUS_ADDR": f"127.0.0.1:{metrics_port}",
        }
    )
    service.trusted = authority
    envoy, anonymous = client_context(authority, "envoy.test"), client_context(authority)
    stranger = client_context(Authority(tmp_path / "stranger", "another CA"), "envoy.test")
    stranger.load_verify_locations(authority.ca_path)
    with service:
        ports = {"/json": service.http_port, "/stats": service.debug_port, "/metrics": metrics_port}
        for path, port in ports.items():
            body = ASK if path == "/json" else None
            assert send(TlsConnection(port, envoy), path, body).status == 200, path
            rejected = send(TlsConnection(port, anonymous), path, body)
            assert (rejected.status, rejected.body) == (403, "this needs a client certificate\n"), path
            for context in (stranger, client_context(authority, "other.test")):
                with pytest.raises((OSError, http.client.HTTPException)):
                    send(TlsConnection(port, context), path, body)
            with pytest.raises((OSError, http.client.HTTPException)):
                send(plain(port), path, body)
        assert send(TlsConnection(service.http_port, anonymous), "/livez").status == 200


def test_renewed_certificates_are_used_without_restart(
    rules: Path, mutual: dict[str, object], authority: Authority, tmp_path: Path
) -> None:
    files = {"GRPC_SERVER_TLS_CERT": tmp_path / "tls.crt", "GRPC_SERVER_TLS_KEY": tmp_path / "tls.key"}
    for name, path in files.items():
        path.write_bytes(Path(str(mutual[name])).read_bytes())
    service = TlsService({"RLS_RULES": rules, **files, "RLS_HTTP_TLS": "true"})
    service.trusted = authority
    with service:
        first = ssl.get_server_certificate(("127.0.0.1", service.http_port))
        for new, old in zip(authority.issue(NAME), files.values(), strict=True):
            copy = old.with_suffix(".new")
            copy.write_bytes(new.read_bytes())
            os.replace(copy, old)
        service.wait_until(
            lambda: ssl.get_server_certificate(("127.0.0.1", service.http_port)) != first, "has the new certificate"
        )
        assert service.ready()


def test_token_is_required_except_for_health(rules: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    with ServiceProcess({"RLS_RULES": rules, "RLS_HTTP_TOKEN_FILE": file}) as service:
        holder = {"Authorization": f"Bearer {TOKEN}"}
        for path, port, body in (("/json", service.http_port, ASK), ("/rlconfig", service.debug_port, None)):
            assert send(plain(port), path, body).status == 401
            assert send(plain(port), path, body, holder).status == 200
            assert send(plain(port), path, body, {**holder, "Origin": "https://evil.example"}).status == 403
        assert send(plain(service.http_port), "/livez").status == 200
        assert TOKEN not in service.log()


class UnixService(ServiceProcess):
    unix_socket: Path

    def ready(self) -> bool:
        try:
            return send(UnixConnection(self.unix_socket), "/healthcheck").status == 200
        except OSError:
            return False


def test_http_ports_can_be_unix_sockets(rules: Path, mutual: dict[str, object], tmp_path: Path) -> None:
    http_socket, debug_socket = tmp_path / "http.sock", tmp_path / "debug.sock"
    service = UnixService(
        {
            "RLS_RULES": rules,
            **mutual,
            "RLS_HTTP_UDS": http_socket,
            "RLS_DEBUG_UDS": debug_socket,
            "RLS_HTTP_TOKEN": TOKEN,
            "RLS_GRPC_UDS_MODE": "0600",
        }
    )
    service.unix_socket = http_socket
    with service:
        assert send(UnixConnection(http_socket), "/json", ASK).status == 200
        assert "total_hits" in send(UnixConnection(debug_socket), "/stats").body
        assert {stat.S_IMODE(path.stat().st_mode) for path in (http_socket, debug_socket)} == {0o600}
        for port in (service.http_port, service.debug_port):
            with pytest.raises(ConnectionRefusedError):
                send(plain(port), "/")
        assert f"http=unix:{http_socket}" in service.log()


def test_cross_origin_requests_cannot_spend_hits(rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules, "RLS_HTTP_ALLOWED_HOSTS": "rls.example"}) as service:
        port = service.http_port
        assert send(plain(port), "/json", ASK).status == 200
        assert send(plain(port), "/json", ASK, {"Origin": "https://evil.example"}).status == 403
        assert send(plain(port), "/json", ASK, {"Sec-Fetch-Site": "cross-site"}).status == 403
        rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
        assert send(plain(port), "/json", ASK, rebound).status == 421
        assert send(plain(port), "/json", ASK, {"Host": f"rls.example.:{port}"}).status == 200
        assert send(plain(service.debug_port), "/stats", None, {"Host": "evil.example"}).status == 421
        assert service.stat("ratelimit.service.rate_limit.roomy.all.total_hits") == 2
        assert "reason=cross_origin" in service.log()
