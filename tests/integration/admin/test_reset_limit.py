"""ResetLimit over gRPC, with the tokens, rate limits and audit log of the admin API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from ratelimit_rls.admin.auth import AccessControl
from ratelimit_rls.admin.counters import ResetAdministration
from ratelimit_rls.admin.rate_limits import FAILED_LOGINS_PER_MINUTE, WRITES_PER_MINUTE, AdminRateLimits
from ratelimit_rls.api.limiter.decode import LimiterDecoder
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Repository
from ratelimit_rls.identity.key_format import new_secret
from ratelimit_rls.protos.messages import RESET_LIMIT, ResetRequest, ResetResponse
from ratelimit_rls.transport.grpc.call_proxy import PEER_METADATA
from ratelimit_rls.transport.grpc.reset_limit import ResetLimit
from tests.integration.admin.admin_client import BOOTSTRAP_TOKEN, KEY_SECRET, AdminApi, Client, LosesCommits
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

REQUEST = {"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "alice"}]}]}


class Caller:
    """Resets the counters of alice."""

    def __init__(self, channel: aio.Channel) -> None:
        self._reset: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(RESET_LIMIT)

    async def reset(self, token: str, request_id: str = "") -> int | tuple[grpc.StatusCode, str]:
        """Return the number of counters, or the status code and message."""
        metadata = [("authorization", f"Bearer {token}"), (PEER_METADATA, "127.0.0.1")]  # as proxied calls have it
        metadata += [("x-request-id", request_id)] if request_id else []
        request = ResetRequest(identifier="alice", dimension="USER", domain="edge").SerializeToString()
        try:
            answer = await self._reset(request, metadata=metadata, timeout=20)
        except aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return int(ResetResponse.FromString(answer).counters)


@asynccontextmanager
async def listening(api: AdminApi, repository: Repository | None = None) -> AsyncIterator[Caller]:
    backend = api.backend
    repository = repository or backend.repository
    access = AccessControl(repository, KEY_SECRET, BOOTSTRAP_TOKEN, AdminRateLimits(backend.store), time.time)
    administration = ResetAdministration(access, repository, backend.counters)
    server = aio.server()
    ResetLimit(backend.limiter, LimiterDecoder(), administration).attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Caller(channel)
    finally:
        await server.stop(None)


async def left(admin: Client) -> int:
    result = (await admin.post("/counters/peek", json=REQUEST)).json()
    return int(result["descriptors"][0]["limits"][0]["remaining"])


async def test_reset_is_audited_with_all_details(api: AdminApi, admin: Client) -> None:
    token = await api.token("write", name="ann")
    await admin.post("/decisions/check", json=REQUEST)
    async with listening(api) as caller:
        assert await caller.reset(token, "call-7") == 1
        assert await caller.reset(BOOTSTRAP_TOKEN) == 0
    assert await left(admin) == 5
    rows = (await admin.get("/audit", params={"kind": "counters"})).json()["items"]
    result = [(row["actor"], row["token_id"], row["address"], row["request_id"], row["after"]) for row in rows]
    done = {"descriptors": ["user=alice"]}
    assert result == [
        ("RLS_ADMIN_TOKEN", "RLS_ADMIN_TOKEN", "127.0.0.1", "", {**done, "counters_reset": 0}),
        ("ann", token.split("_")[1], "127.0.0.1", "call-7", {**done, "counters_reset": 1}),
    ]


async def test_reset_is_not_done_if_it_cannot_be_audited(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    await sqlite_admin.post("/decisions/check", json=REQUEST)
    nowhere = Database(f"postgresql://user@127.0.0.1:{free_port()}/records")
    async with listening(sqlite_api, Repository(nowhere)) as caller:
        for token in (BOOTSTRAP_TOKEN, await sqlite_api.token("write")):
            assert await caller.reset(token) == (
                grpc.StatusCode.UNAVAILABLE,
                "the database is unavailable; nothing was reset",
            )
    assert await left(sqlite_admin) == 4


async def test_counters_are_reset_only_after_the_audit_entry_is_committed(
    sqlite_api: AdminApi, sqlite_admin: Client
) -> None:
    await sqlite_admin.post("/decisions/check", json=REQUEST)
    async with listening(sqlite_api, LosesCommits(sqlite_api.backend.database)) as caller:
        assert await caller.reset(BOOTSTRAP_TOKEN) == (
            grpc.StatusCode.UNAVAILABLE,
            "the database is unavailable; nothing was reset",
        )
    assert await left(sqlite_admin) == 4
    assert (await sqlite_admin.get("/audit")).json()["items"] == []


async def test_reset_waits_for_the_database_lock(api: AdminApi, admin: Client, upgraded_url: str) -> None:
    """The write lock is acquired before any counter is reset."""
    await admin.post("/decisions/check", json=REQUEST)
    other = Database(upgraded_url)

    class Impatient(Repository):
        def change(self, *given: Any, **more: Any) -> Any:
            return super().change(*given, **more, timeout_s=0.3)

    database = Database(upgraded_url)
    async with listening(api, Impatient(database)) as caller:
        async with other.begin() as connection:
            await other.serialise(connection)
            code, message = await caller.reset(BOOTSTRAP_TOKEN)  # type: ignore[misc]
        assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "the database is unavailable; nothing was reset")
        assert await left(admin) == 4
        assert await caller.reset(BOOTSTRAP_TOKEN) == 1
    assert len((await admin.get("/audit", params={"kind": "counters"})).json()["items"]) == 1
    await database.close()
    await other.close()


async def test_reset_limit_shares_the_rate_limits_of_the_admin_api(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    token, other = await sqlite_api.token("write"), await sqlite_api.token("write")
    limits = AdminRateLimits(sqlite_api.backend.store)
    for _ in range(WRITES_PER_MINUTE - 1):
        assert await limits.count(token.split("_")[1], is_write=True) is None
    async with listening(sqlite_api) as caller:
        assert await caller.reset(token) == 0
        code, message = await caller.reset(token)  # type: ignore[misc]
        assert (code, message.partition(";")[0]) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too many changes with this token",
        )
        assert "retry in" in message
        assert await caller.reset(other) == 0
        reader = await caller.reset(await sqlite_api.token("read"))
        assert reader == (
            grpc.StatusCode.PERMISSION_DENIED,
            "this operation needs the role write; the token has read",
        )

        forged, fresh = new_secret("rla").text, await sqlite_api.token("write")
        result = [await caller.reset(forged) for _ in range(FAILED_LOGINS_PER_MINUTE + 1)]
        assert result[0] == (grpc.StatusCode.UNAUTHENTICATED, "unknown token")
        for rejection in (result[-1], await caller.reset(fresh)):
            code, message = rejection  # type: ignore[misc]
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert message.startswith("too many failed logins from this address; retry in")
        assert await caller.reset(other) == 0
        assert await caller.reset(BOOTSTRAP_TOKEN) == 0
    # Both ports count them together.
    assert (await sqlite_api.client(fresh, address="127.0.0.1").get("/sources")).status_code == 429
