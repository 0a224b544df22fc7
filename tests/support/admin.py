"""The service with a database as a process, and a small client of its admin API."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ratelimit_rls.database.database import Database
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess

TOKEN = "the-admin-token-of-the-tests"
KEY_SECRET = "the-key-secret-of-the-tests"


class AdminResponse(NamedTuple):
    status: int
    body: Any  # parsed JSON; None if empty


class Key(NamedTuple):
    key_id: str
    text: str  # the credential


class Admin:
    """Admin API client. Each call uses its own connection; errors fail the test, except with `send`."""

    def __init__(self, port: int, token: str = TOKEN) -> None:
        self._port = port
        self._token = token

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> AdminResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, f"/api/v1{path}", None if body is None else json.dumps(body), headers=headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        return AdminResponse(answer.status, json.loads(text) if text else None)

    def do(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        result = self.send(method, path, body)
        assert result.status < 300, f"{method} {path}: {result}"
        return result.body

    def put_tier(self, name: str, requests: int) -> None:
        self.do("PUT", f"/tiers/{name}", {"limits": [yearly_limit(requests)]})

    def put_user(self, user_id: str, **fields: Any) -> None:
        self.do("PUT", f"/users/{user_id}", fields)

    def add_key(self, user_id: str, **fields: Any) -> Key:
        made = self.do("POST", "/keys", {"user_id": user_id, **fields})
        return Key(made["key_id"], made["key"])

    def revoke(self, key: Key) -> None:
        self.do("DELETE", f"/keys/{key.key_id}")

    def override(self, user_id: str, requests: int, duration: str = "1h") -> None:
        self.do("POST", f"/users/{user_id}/override", {"limits": [yearly_limit(requests)], "duration": duration})

    def block(self, user_id: str, **fields: Any) -> None:
        self.do("PUT", f"/users/{user_id}/block", fields)

    def unblock(self, user_id: str) -> None:
        self.do("DELETE", f"/users/{user_id}/block")

    def add_rule(self, name: str, document: str, **fields: Any) -> str:
        """Add a rule and return its id."""
        rule_id: str = self.do("POST", "/rules", {"name": name, "document": document, **fields})["rule_id"]
        return rule_id

    def source(self, name: str = "database") -> dict[str, Any]:
        """Return the state of one source of rules and accounts."""
        sources = self.do("GET", "/sources")["sources"]
        found: dict[str, Any] = next(source for source in sources if source["name"] == name)
        return found


class ServiceWithDatabase(ServiceProcess):
    """The service as a process with a database and an admin API."""

    def __init__(self, url: str, environment: Mapping[str, object], *, healthy: bool = True) -> None:
        self.admin_port = free_port()
        variables: dict[str, object] = {
            "RLS_DATABASE_URL": url,
            "RLS_ADMIN_PORT": self.admin_port,
            "RLS_ADMIN_TOKEN": TOKEN,
            "RLS_KEY_SECRET": KEY_SECRET,
        }
        super().__init__({**variables, **environment}, healthy=healthy)

    @property
    def admin(self) -> Admin:
        return Admin(self.admin_port)

    def wait_for_source(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        self.wait_until(lambda: condition(self.admin.source()), what)


def yearly_limit(requests: int) -> dict[str, Any]:
    """Return a limit per year, so that no window ends during a test."""
    return {"unit": "year", "requests_per_unit": requests}


def upgrade_schema(url: str) -> str:
    """Create this version's tables in the database and return its URL."""

    async def upgrade() -> None:
        database = Database(url)
        await database.upgrade()
        await database.close()

    asyncio.run(upgrade())
    return url
