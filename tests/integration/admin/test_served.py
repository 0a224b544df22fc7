"""The admin API of a running server: it reports a caller as the service treats it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc import aio

from ratelimit_rls.admin.rate_limits import FAILED_LOGINS_PER_MINUTE
from ratelimit_rls.identity.key_format import new_secret
from ratelimit_rls.protos.messages import RESET_LIMIT, ResetRequest
from tests.support.certificates import Authority
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

TOKEN = "the-first-token-of-all"
RULES = """\
domain: edge
identity:
  entries: [{key: x-api-key, kind: api_key, becomes: [user]}]
  on_invalid: refuse
descriptors: [{key: user, limits_of: user, rate_limit: {unit: year, requests_per_unit: 5}}]
"""


def test_credentials_count_for_the_same_user_on_both_ports(tmp_path: Path) -> None:
    rules, port = tmp_path / "edge.yaml", free_port()
    rules.write_text(RULES)
    settings = {
        "RLS_RULES": rules,
        "RLS_DATABASE_URL": f"sqlite:///{tmp_path}/records.db",
        "RLS_ADMIN_PORT": port,
        "RLS_ADMIN_TOKEN": TOKEN,
    }
    url, headers = f"http://127.0.0.1:{port}/api/v1", {"Authorization": f"Bearer {TOKEN}"}
    with ServiceProcess(settings) as service, httpx.Client(base_url=url, headers=headers) as admin:
        admin.put("/users/alice", json={}).raise_for_status()
        key = admin.post("/keys", json={"user_id": "alice"}).raise_for_status().json()["key"]
        request = {"domain": "edge", "descriptors": [{"entries": [{"key": "x-api-key", "value": key}]}]}
        service.wait_until(lambda: admin.post("/counters/peek", json=request).is_success, "knows the key")
        for left in (4, 2):
            result = admin.post("/decisions/check", json=request).json()["descriptors"][0]
            assert (result["rule"], result["limits"][0]["remaining"]) == ("edge.user", left)
            answer = ask(service.grpc_address, rate_limit_request("edge", {"x-api-key": key}))
            assert answer.statuses[0].limit_remaining == left - 1
        assert admin.post("/counters/reset", json=request).json()["total"] == 1
        assert (
            ask(service.grpc_address, rate_limit_request("edge", {"x-api-key": key})).statuses[0].limit_remaining == 4
        )
        assert key not in service.log() + admin.get("/audit").text


def test_without_a_database_there_is_no_admin_api(tmp_path: Path) -> None:
    rules, port = tmp_path / "edge.yaml", free_port()
    rules.write_text("domain: edge\nrate_limit: {unit: year, requests_per_unit: 5}\n")
    settings = {"RLS_RULES": rules, "RLS_ADMIN_PORT": port, "RLS_ADMIN_TOKEN": TOKEN}
    with ServiceProcess(settings) as service:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/healthz")
        with grpc.insecure_channel(service.grpc_address) as channel:
            reset: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(RESET_LIMIT)
            request = ResetRequest(identifier="alice", dimension="USER", domain="edge").SerializeToString()
            with pytest.raises(grpc.RpcError) as failed:
                reset(request, metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=20)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        logged = service.log()
    assert "admin=none" in logged
    for name in ("RLS_ADMIN_PORT", "RLS_ADMIN_TOKEN"):
        assert f"{name} has no effect without RLS_DATABASE_URL" in logged


def test_simulation_compiles_rules_as_the_service_does(tmp_path: Path) -> None:
    """With the settings of the service: what is denied is not charged, and a domain is described by one document."""
    document = """\
domain: edge
descriptors:
  - {key: few, rate_limit: {unit: year, requests_per_unit: 1}}
  - {key: many, rate_limit: {unit: year, requests_per_unit: 2}}
"""
    rules, port = tmp_path / "edge.yaml", free_port()
    rules.write_text(document)
    settings = {
        "RLS_RULES": rules,
        "RLS_DATABASE_URL": f"sqlite:///{tmp_path}/records.db",
        "RLS_ADMIN_PORT": port,
        "RLS_ADMIN_TOKEN": TOKEN,
        "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT": "true",
    }
    few, many = {"entries": [{"key": "few"}]}, {"entries": [{"key": "many"}]}
    requests = [
        {"at": "2030-01-01T00:00:00Z", "domain": "edge", "descriptors": descriptors}
        for descriptors in ([few, many], [few, many], [many])
    ]
    url, headers = f"http://127.0.0.1:{port}/api/v1", {"Authorization": f"Bearer {TOKEN}"}
    with ServiceProcess(settings), httpx.Client(base_url=url, headers=headers) as admin:
        active = admin.post("/decisions/simulate", json={"requests": requests}).json()
        assert active["results"] == ["ok", "over_limit", "ok"]
        assert admin.post("/decisions/simulate", json={"requests": requests, "documents": [document]}).json() == active
        other = "domain: edge\ndescriptors: [{key: other, rate_limit: {unit: year, requests_per_unit: 1}}]\n"
        twice = admin.post("/decisions/simulate", json={"requests": requests, "documents": [document, other]})
        assert (twice.status_code, twice.json()["errors"][0]["file"]) == (422, "documents[1]")


@contextlib.asynccontextmanager
async def from_address(source: str, port: int) -> AsyncIterator[int]:
    """A TCP proxy: the target port sees this address as the client."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def reset(port: int, credentials: grpc.ChannelCredentials, token: str, times: int = 1) -> list[grpc.StatusCode]:
    options = [("grpc.ssl_target_name_override", "localhost")]
    request = ResetRequest(identifier="alice", dimension="USER", domain="edge").SerializeToString()
    codes = []
    async with aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        for _ in range(times):
            call = channel.unary_unary(RESET_LIMIT)(  # type: ignore[var-annotated]
                request, metadata=(("authorization", f"Bearer {token}"),), timeout=20
            )
            codes.append(await call.code())
    return codes


async def test_failed_logins_on_the_grpc_port_lock_out_only_their_address(tmp_path: Path) -> None:
    """Over TLS. The gRPC library answers behind a Unix socket."""
    rules, admin_port = tmp_path / "edge.yaml", free_port()
    rules.write_text(RULES)
    authority = Authority(tmp_path / "certs")
    pem, key = authority.issue("localhost")
    settings = {
        "RLS_RULES": rules,
        "RLS_DATABASE_URL": f"sqlite:///{tmp_path}/records.db",
        "RLS_ADMIN_PORT": admin_port,
        "RLS_ADMIN_TOKEN": TOKEN,
        "GRPC_SERVER_USE_TLS": "true",
        "GRPC_SERVER_TLS_CERT": pem,
        "GRPC_SERVER_TLS_KEY": key,
    }
    credentials = grpc.ssl_channel_credentials(authority.ca_path.read_bytes())
    url, headers = f"http://127.0.0.1:{admin_port}/api/v1", {"Authorization": f"Bearer {TOKEN}"}
    with ServiceProcess(settings) as service, httpx.Client(base_url=url, headers=headers) as admin:
        fresh = admin.post("/tokens", json={"name": "ann", "role": "write"}).raise_for_status().json()["token"]
        async with from_address("127.0.0.2", service.grpc_port) as port:
            guessed = await reset(port, credentials, new_secret("rla").text, 2 * FAILED_LOGINS_PER_MINUTE)
            assert {*guessed} == {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert await reset(port, credentials, fresh) == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            assert await reset(port, credentials, TOKEN) == [grpc.StatusCode.OK]
        assert await reset(service.grpc_port, credentials, fresh) == [grpc.StatusCode.OK]
        rows = admin.get("/audit", params={"kind": "counters"}).json()["items"]
        assert [(row["actor"], row["address"]) for row in rows] == [
            ("ann", "127.0.0.1"),
            ("RLS_ADMIN_TOKEN", "127.0.0.2"),
        ]
