"""The admin API with everything behind it that it needs, in one process, and clients with tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import httpx

from ratelimit_rls.core.accounts import AdminToken, Role, StoredRule
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.identity.api_keys import ApiKeys
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.identity.secrets import digest, new_secret
from ratelimit_rls.identity.verifier import Callers
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.desk import Actor, Desk
from ratelimit_rls.rules.compile import Compiled, compile_documents
from ratelimit_rls.rules.load import LAST_RANK, Source
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.rules.sources.database import check_rule
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.http.admin.app import admin_app
from ratelimit_rls.transport.http.admin.backend import AdminBackend, SourceState
from ratelimit_rls.transport.http.admin.versions import VERSIONS, Version

KEY_SECRET = b"the secret of the tests"
FIRST_TOKEN = "the-first-token-of-all"
NOW_S = 1_800_000_000.0
API = "/api/v1"

FILE = b"""\
domain: edge
descriptors:
  - key: user
    limits_of: user
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: path
    rate_limit: {unit: minute, requests_per_unit: 3, algorithm: sliding_log}
    penalty: {within: 1h, after: 1, multipliers: [2]}
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Office:
    backend: AdminBackend
    clock: Clock
    clients: list[httpx.AsyncClient] = field(default_factory=list)
    address: str = "192.0.2.1"
    versions: Sequence[Version] = VERSIONS

    def __post_init__(self) -> None:
        self.app = admin_app(self.backend, self.versions)

    def client(
        self, token: str | None = FIRST_TOKEN, *, address: str | None = None, host: str = "admin.test"
    ) -> Client:
        transport = httpx.ASGITransport(self.app, client=(address or self.address, 1234), raise_app_exceptions=True)
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        client = Client(transport=transport, base_url=f"http://{host}", headers=headers)
        self.clients.append(client)
        return client

    async def token(self, role: str = "write", *, expires_s: float | None = None, name: str = "") -> str:
        """The text of a new one."""
        secret = new_secret("rla")
        made = AdminToken(
            secret.public_id, digest(KEY_SECRET, secret.text), name or f"a {role} token", Role(role), expires_s
        )
        async with self.backend.desk.change(Actor("tests")) as change:
            await change.add_token(made)
        return secret.text

    async def revoke(self, token: str) -> None:
        async with self.backend.desk.change(Actor("tests")) as change:
            await change.revoke_token(token.split("_")[1])

    def load(self, rules: str) -> None:
        """In place of those in force."""
        compiled = compile_documents({"rules.yaml": rules.encode()})
        self.backend.rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))

    async def key(self, user_id: str) -> str:
        """The text of a new API key."""
        made = await self.client().post("/keys", json={"user_id": user_id})
        await self.follow()
        return str(made.raise_for_status().json()["key"])

    async def follow(self) -> None:
        """The directory has what the database has."""
        async with self.backend.desk.reading() as reader:
            self.backend.directory.load(await reader.accounts())

    def with_backend(self, **changes: Any) -> Office:
        return Office(replace(self.backend, **changes), self.clock, versions=self.versions)


class Client(httpx.AsyncClient):
    """Of paths below the API's prefix."""

    def build_request(self, method: str, url: Any, **more: Any) -> httpx.Request:
        where = str(url)
        return super().build_request(
            method, where if where.startswith(("/healthz", "/docs", "/openapi", "/api")) else API + where, **more
        )


@asynccontextmanager
async def new_office(url: str, clock: Clock | None = None) -> AsyncIterator[Office]:
    clock = clock or Clock()
    database = Database(url)
    files = [Source("rules.yaml", FILE, LAST_RANK)]
    rules = Rules()
    compiled = compile_documents(files)
    rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))
    store = EmbeddedStore(clock=lambda: int(clock() * 1e6))
    directory = Directory(clock)

    def check(stored: Sequence[StoredRule]) -> Compiled:
        return check_rule(stored, files, merge_domains=True)

    backend = AdminBackend(
        desk=Desk(database, clock=clock),
        database=database,
        directory=directory,
        rules=rules,
        limiter=RateLimiter(rules, store, Metrics(), Policy(), standings=directory),
        store=store,
        counters=store,
        policy=Policy(),
        check_rules=check,
        sources=lambda: [SourceState("files", version=1, digest=compiled.digest)],
        verifier=Callers(ApiKeys(directory, KEY_SECRET), None, directory),
        key_secret=KEY_SECRET,
        first_token=FIRST_TOKEN,
        clock=clock,
    )
    office = Office(backend, clock)
    try:
        yield office
    finally:
        for client in office.clients:
            await client.aclose()
        await database.close()
        await asyncio.sleep(0)
