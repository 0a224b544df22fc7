"""The admin API with its backend in one process, and clients with tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx

from ratelimit_rls.admin.backend import AdminBackend, SourceState
from ratelimit_rls.admin.http.app import admin_app
from ratelimit_rls.admin.http.middleware import VERSIONS, ApiVersion
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.database.administration import AdminToken, Role
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Actor, Repository, UnitOfWork
from ratelimit_rls.errors import DatabaseUnavailable
from ratelimit_rls.identity.api_keys import ApiKeyVerifier
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.identity.key_format import digest, new_secret
from ratelimit_rls.identity.verifier import CredentialVerifier
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import CompiledRules, compile_documents
from ratelimit_rls.rules.source_document import LAST_RANK, SourceDocument
from ratelimit_rls.rules.sources.database import check_rules
from ratelimit_rls.rules.stored_rule import StoredRule
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics

KEY_SECRET = b"the secret of the tests"
BOOTSTRAP_TOKEN = "the-first-token-of-all"
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
class AdminApi:
    backend: AdminBackend
    clock: Clock
    clients: list[httpx.AsyncClient] = field(default_factory=list)
    address: str = "192.0.2.1"
    versions: Sequence[ApiVersion] = VERSIONS

    def __post_init__(self) -> None:
        self.app = admin_app(self.backend, self.versions)

    def client(
        self, token: str | None = BOOTSTRAP_TOKEN, *, address: str | None = None, host: str = "admin.test"
    ) -> Client:
        transport = httpx.ASGITransport(self.app, client=(address or self.address, 1234), raise_app_exceptions=True)
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        client = Client(transport=transport, base_url=f"http://{host}", headers=headers)
        self.clients.append(client)
        return client

    async def token(self, role: str = "write", *, expires_s: float | None = None, name: str = "") -> str:
        """Create a token and return its text."""
        secret = new_secret("rla")
        made = AdminToken(
            secret.public_id, digest(KEY_SECRET, secret.text), name or f"a {role} token", Role(role), expires_s
        )
        async with self.backend.repository.change(Actor("tests")) as change:
            await change.add_token(made)
        return secret.text

    async def revoke(self, token: str) -> None:
        async with self.backend.repository.change(Actor("tests")) as change:
            await change.revoke_token(token.split("_")[1])

    def load(self, rules: str) -> None:
        """Replace the active rules."""
        compiled = compile_documents({"rules.yaml": rules.encode()})
        self.backend.rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))

    async def key(self, user_id: str) -> str:
        """Create an API key and return its text."""
        made = await self.client().post("/keys", json={"user_id": user_id})
        await self.follow()
        return str(made.raise_for_status().json()["key"])

    async def follow(self) -> None:
        """Load the accounts of the database into the directory."""
        async with self.backend.repository.reading() as reader:
            self.backend.directory.load(await reader.accounts())

    def with_backend(self, **changes: Any) -> AdminApi:
        return AdminApi(replace(self.backend, **changes), self.clock, versions=self.versions)


class LosesCommits(Repository):
    """A repository whose database goes away before it commits a change."""

    @asynccontextmanager
    async def change(self, *given: Any, **more: Any) -> AsyncIterator[UnitOfWork]:
        async with super().change(*given, **more) as change:
            yield change
            raise DatabaseUnavailable("the connection was lost")


class Client(httpx.AsyncClient):
    """Prepends the prefix of the API to paths."""

    def build_request(self, method: str, url: Any, **more: Any) -> httpx.Request:
        where = str(url)
        return super().build_request(
            method, where if where.startswith(("/healthz", "/docs", "/openapi", "/api")) else API + where, **more
        )


@asynccontextmanager
async def open_admin_api(url: str, clock: Clock | None = None) -> AsyncIterator[AdminApi]:
    clock = clock or Clock()
    database = Database(url)
    files = [SourceDocument("rules.yaml", FILE, LAST_RANK)]
    rules = ActiveRules()
    compiled = compile_documents(files)
    rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))
    store = EmbeddedStore(clock=lambda: int(clock() * 1e6))
    directory = Directory(clock)

    def check(stored: Sequence[StoredRule]) -> CompiledRules:
        return check_rules(stored, files, merge_domains=True)

    backend = AdminBackend(
        repository=Repository(database, clock=clock),
        database=database,
        directory=directory,
        rules=rules,
        limiter=RateLimiter(rules, store, Metrics(), Policy(), entitlements=directory),
        store=store,
        counters=store,
        policy=Policy(),
        compile_rules=partial(compile_documents, merge_domains=True),
        check_rules=check,
        sources=lambda: [SourceState("files", version=1, digest=compiled.digest)],
        verifier=CredentialVerifier(ApiKeyVerifier(directory, KEY_SECRET), None, directory),
        key_secret=KEY_SECRET,
        bootstrap_token=BOOTSTRAP_TOKEN,
        clock=clock,
    )
    api = AdminApi(backend, clock)
    try:
        yield api
    finally:
        for client in api.clients:
            await client.aclose()
        await database.close()
        await asyncio.sleep(0)
