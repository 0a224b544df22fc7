"""ResetLimit over gRPC with what stands behind it: the tokens, the limits and the record of the admin API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from ratelimit_rls.identity.secrets import new_secret
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.desk import Desk
from ratelimit_rls.server.administrators import Administrators
from ratelimit_rls.settings import Settings
from ratelimit_rls.transport.grpc.limiter_read import Reader
from ratelimit_rls.transport.grpc.limiter_reset import ResetLimit
from ratelimit_rls.transport.grpc.messages import RESET_LIMIT, ResetRequest, ResetResponse
from ratelimit_rls.transport.http.admin.own_limits import FAILED_LOGINS_A_MINUTE, WRITES_A_MINUTE, OwnLimits
from tests.integration.admin.office import FIRST_TOKEN, KEY_SECRET, Client, Office
from tests.process import free_port

pytestmark = pytest.mark.slow

ASKED = {"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "alice"}]}]}


class Caller:
    """Asks for alice's counters to be forgotten."""

    def __init__(self, channel: aio.Channel) -> None:
        self._reset = channel.unary_unary(RESET_LIMIT)

    async def reset(self, token: str, request_id: str = "") -> int | tuple[grpc.StatusCode, str]:
        """How many there were, or why not."""
        metadata = (("authorization", f"Bearer {token}"), *([("x-request-id", request_id)] if request_id else []))
        asked = ResetRequest(identifier="alice", dimension="USER", domain="edge").SerializeToString()
        try:
            answer = await self._reset(asked, metadata=metadata, timeout=20)
        except aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return int(ResetResponse.FromString(answer).counters)


@asynccontextmanager
async def listening(office: Office, desk: Desk | None = None) -> AsyncIterator[Caller]:
    backend = office.backend
    records: Any = SimpleNamespace(desk=desk or backend.desk, key_secret=KEY_SECRET)
    administrators = Administrators(Settings(rls_admin_token=FIRST_TOKEN), records, backend.store)
    server = aio.server()
    ResetLimit(backend.limiter, backend.counters, Reader(), administrators).attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Caller(channel)
    finally:
        await server.stop(None)


async def left(admin: Client) -> int:
    told = (await admin.post("/counters/peek", json=ASKED)).json()
    return int(told["descriptors"][0]["limits"][0]["remaining"])


async def test_a_reset_is_on_the_record_with_all_that_is_known_of_it(office: Office, admin: Client) -> None:
    token = await office.token("write", name="ann")
    await admin.post("/decisions/check", json=ASKED)
    async with listening(office) as caller:
        assert await caller.reset(token, "call-7") == 1
        assert await caller.reset(FIRST_TOKEN) == 0
    assert await left(admin) == 5
    rows = (await admin.get("/audit", params={"kind": "counters"})).json()["items"]
    told = [(row["actor"], row["token_id"], row["address"], row["request_id"], row["after"]) for row in rows]
    done = {"descriptors": ["user=alice"]}
    assert told == [
        ("RLS_ADMIN_TOKEN", "RLS_ADMIN_TOKEN", "127.0.0.1", "", {**done, "forgotten": 0}),
        ("ann", token.split("_")[1], "127.0.0.1", "call-7", {**done, "forgotten": 1}),
    ]


async def test_what_cannot_be_recorded_is_not_done(any_office: Office, any_admin: Client) -> None:
    await any_admin.post("/decisions/check", json=ASKED)
    nowhere = Database(f"postgresql://user@127.0.0.1:{free_port()}/records")
    async with listening(any_office, Desk(nowhere)) as caller:
        for token in (FIRST_TOKEN, await any_office.token("write")):
            assert await caller.reset(token) == (
                grpc.StatusCode.UNAVAILABLE,
                "the database is away; nothing was reset",
            )
    assert await left(any_admin) == 4


async def test_while_others_write_nothing_is_done_in_between(office: Office, admin: Client, upgraded_url: str) -> None:
    """The database has to be ours before anything is forgotten."""
    await admin.post("/decisions/check", json=ASKED)
    other = Database(upgraded_url)

    class Impatient(Desk):
        def change(self, *given: Any, **more: Any) -> Any:
            return super().change(*given, **more, patience_s=0.3)

    database = Database(upgraded_url)
    async with listening(office, Impatient(database)) as caller:
        async with other.begin() as connection:
            await other.serialise(connection)
            code, words = await caller.reset(FIRST_TOKEN)  # type: ignore[misc]
        assert (code, words) == (grpc.StatusCode.UNAVAILABLE, "the database is away; nothing was reset")
        assert await left(admin) == 4
        assert await caller.reset(FIRST_TOKEN) == 1
    assert len((await admin.get("/audit", params={"kind": "counters"})).json()["items"]) == 1
    await database.close()
    await other.close()


async def test_the_limits_of_the_admin_api_hold_here(any_office: Office, any_admin: Client) -> None:
    token, other = await any_office.token("write"), await any_office.token("write")
    limits = OwnLimits(any_office.backend.store)
    for _ in range(WRITES_A_MINUTE - 1):
        assert await limits.count(token.split("_")[1], is_write=True) is None
    async with listening(any_office) as caller:
        assert await caller.reset(token) == 0
        code, words = await caller.reset(token)  # type: ignore[misc]
        assert (code, words.partition(";")[0]) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too many changes with this token",
        )
        assert "come back in" in words
        assert await caller.reset(other) == 0
        reader = await caller.reset(await any_office.token("read"))
        assert reader == (
            grpc.StatusCode.PERMISSION_DENIED,
            "this needs a token with the role write; yours has read",
        )

        forged, fresh = new_secret("rla").text, await any_office.token("write")
        told = [await caller.reset(forged) for _ in range(FAILED_LOGINS_A_MINUTE + 1)]
        assert told[0] == (grpc.StatusCode.UNAUTHENTICATED, "the token is not one of ours")
        for refusal in (told[-1], await caller.reset(fresh)):
            code, words = refusal  # type: ignore[misc]
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert words.startswith("too many logins from this address have failed; come back in")
        assert await caller.reset(other) == 0
        assert await caller.reset(FIRST_TOKEN) == 0
    # And both doors count them together.
    assert (await any_office.client(fresh, address="127.0.0.1").get("/sources")).status_code == 429
