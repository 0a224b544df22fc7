"""One admitted request: who makes it, what it has seen, and how its answer is written, and kept for its repetition.

A change is one transaction: the change, its record, and, with an Idempotency-Key, its answer. Whoever repeats the
request is given that answer; two at once are one after the other, since writers are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ratelimit_rls.core.accounts import KeptAnswer
from ratelimit_rls.records.desk import Actor, Change, Reader
from ratelimit_rls.transport.http.admin.access import Caller
from ratelimit_rls.transport.http.admin.backend import AdminBackend
from ratelimit_rls.transport.http.admin.cursors import Cursors
from ratelimit_rls.transport.http.admin.etags import Seen, etag
from ratelimit_rls.transport.http.admin.problems import Fault, problem
from ratelimit_rls.transport.http.admin.turns import Turns

DRY_RUN = "Dry-Run"
REPLAYED = "Idempotency-Replayed"

JSON = "application/json"

_SECRET_OF = "secret_of"  # noqa: S105 - the name of a field
"""What is kept in place of an answer with a secret: the id of what was made."""


class Answer(NamedTuple):
    body: BaseModel | None = None
    status: int = 200
    version: int | None = None  # of what the body shows
    location: str = ""
    secret_of: str = ""  # what was made, if the body has its secret: that is told once, and not kept


Work = Callable[[Change], Awaitable[Answer]]


class IdempotencyKey(NamedTuple):
    key: str
    request_digest: str  # what tells the request from another under the same key


def request_digest(request: Request, body: bytes) -> str:
    whole = hashlib.sha256()
    for part in (request.method.encode(), request.scope["path"].encode(), request.scope["query_string"], body):
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class Visit:
    backend: AdminBackend
    cursors: Cursors
    simulations: Turns
    caller: Caller
    address: str
    request_id: str
    path: str
    query: Mapping[str, str]
    seen: Seen
    dry_run: bool = False
    idempotency: IdempotencyKey | None = None

    @property
    def actor(self) -> Actor:
        return Actor(self.caller.name, self.caller.token_id, self.address, self.request_id)

    def now_s(self) -> float:
        return self.backend.clock()

    async def change(self, work: Work) -> Response:
        """Do it, all or nothing, and answer; a dry run does the same and leaves no trace."""
        async with self.backend.desk.change(self.actor, dry_run=self.dry_run) as change:
            response = await self.replay(change)
            if response is None:
                answer = await work(change)
                response = self._written(answer)
                if self.idempotency is not None and not self.dry_run:
                    keep = self._to_keep(self.idempotency, answer, response)
                    await change.keep_answer(self.caller.token_id, self.idempotency.key, keep)
        return response

    async def replay(self, reader: Reader) -> Response | None:
        """What was answered to this request before, if it is a repetition."""
        if self.idempotency is None:
            return None
        kept = await reader.idempotent(self.caller.token_id, self.idempotency.key)
        return None if kept is None else self._replayed(self.idempotency, kept)

    def show(self, body: BaseModel, version: int | None = None) -> Response:
        """The answer to a GET; 304, if the caller has it already."""
        if version is not None and self.seen.knows(version):
            return Response(status_code=304, headers={"ETag": etag(version)})
        return self._written(Answer(body, version=version))

    def _written(self, answer: Answer) -> Response:
        headers: dict[str, str] = {}
        if answer.version is not None:
            headers["ETag"] = etag(answer.version)
        if answer.location and not self.dry_run:
            headers["Location"] = answer.location
        if self.dry_run:
            headers[DRY_RUN] = "true"
        if answer.body is None:
            return Response(status_code=answer.status, headers=headers)
        return Response(answer.body.model_dump_json(by_alias=True), answer.status, headers, JSON)

    def _to_keep(self, idempotency: IdempotencyKey, answer: Answer, response: Response) -> KeptAnswer:
        headers = {name: value for name, value in response.headers.items() if name in ("etag", "location")}
        body = bytes(response.body)
        if answer.secret_of:
            body = json.dumps({_SECRET_OF: answer.secret_of}).encode()
        return KeptAnswer(idempotency.request_digest, response.status_code, headers, body)

    def _replayed(self, idempotency: IdempotencyKey, kept: KeptAnswer) -> Response:
        if kept.request_digest != idempotency.request_digest:
            raise Fault(
                422,
                "idempotency-key-reused",
                "this Idempotency-Key was used for another request; a new request needs a new key",
            )
        made = _secret_of(kept.body)
        if made is not None:
            fault = Fault(
                409,
                "secret-told-once",
                f"this request was carried out before and made {made}; its secret was told then and is kept nowhere",
                headers={REPLAYED: "true"},
                id=made,
            )
            return problem(fault, self.request_id)
        headers: Mapping[str, str] = {**kept.headers, REPLAYED: "true"}
        return Response(kept.body or None, kept.status, headers, JSON if kept.body else None)


def _secret_of(body: bytes) -> str | None:
    found: Any = json.loads(body) if body else None
    return str(found[_SECRET_OF]) if isinstance(found, dict) and [*found] == [_SECRET_OF] else None


async def visit_of(request: Request) -> Visit:
    visit: Visit = request.state.visit
    return visit


Here = Annotated[Visit, Depends(visit_of)]
"""How a route is given the request it serves."""
