"""The service with a database, and a small client of its admin API, for tests of whole processes."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ratelimit_rls.records.database import Database
from tests.launched import Watched
from tests.process import free_port

TOKEN = "the-admin-token-of-the-tests"
KEY_SECRET = "the-key-secret-of-the-tests"


class Told(NamedTuple):
    status: int
    body: Any  # JSON; None: there is none


class Key(NamedTuple):
    key_id: str
    text: str  # the credential


class Admin:
    """Each call on a connection of its own; what is refused fails the test, unless it is sent by `send`."""

    def __init__(self, port: int, token: str = TOKEN) -> None:
        self._port = port
        self._token = token

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Told:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, f"/api/v1{path}", None if body is None else json.dumps(body), headers=headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        return Told(answer.status, json.loads(text) if text else None)

    def do(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        told = self.send(method, path, body)
        assert told.status < 300, f"{method} {path}: {told}"
        return told.body

    def put_tier(self, name: str, requests: int) -> None:
        self.do("PUT", f"/tiers/{name}", {"limits": [a_day(requests)]})

    def put_user(self, user_id: str, **fields: Any) -> None:
        self.do("PUT", f"/users/{user_id}", fields)

    def add_key(self, user_id: str, **fields: Any) -> Key:
        made = self.do("POST", "/keys", {"user_id": user_id, **fields})
        return Key(made["key_id"], made["key"])

    def revoke(self, key: Key) -> None:
        self.do("DELETE", f"/keys/{key.key_id}")

    def override(self, user_id: str, requests: int, duration: str = "1h") -> None:
        self.do("POST", f"/users/{user_id}/override", {"limits": [a_day(requests)], "duration": duration})

    def block(self, user_id: str, **fields: Any) -> None:
        self.do("PUT", f"/users/{user_id}/block", fields)

    def unblock(self, user_id: str) -> None:
        self.do("DELETE", f"/users/{user_id}/block")

    def add_rule(self, name: str, document: str, **fields: Any) -> str:
        """Its id."""
        rule_id: str = self.do("POST", "/rules", {"name": name, "document": document, **fields})["rule_id"]
        return rule_id

    def source(self, name: str = "database") -> dict[str, Any]:
        """How one of the sources of rules and accounts goes."""
        sources = self.do("GET", "/sources")["sources"]
        found: dict[str, Any] = next(source for source in sources if source["name"] == name)
        return found


class Recorded(Watched):
    """The service with a database, whose admin API has a port of its own."""

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


def a_day(requests: int) -> dict[str, Any]:
    """A limit, by the day: no test meets the end of a minute."""
    return {"unit": "day", "requests_per_unit": requests}


def upgraded(url: str) -> str:
    """The same, of a database that then has this version's tables."""

    async def upgrade() -> None:
        database = Database(url)
        await database.upgrade()
        await database.close()

    asyncio.run(upgrade())
    return url
