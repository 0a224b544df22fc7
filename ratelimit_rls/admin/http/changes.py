"""Changes over HTTP: preconditions (ETags), dry runs, and repetition with an Idempotency-Key.

A change is one transaction: the change, its audit entry and, with an Idempotency-Key, its response. A repeated request
receives that response. Two concurrent requests run one after the other, because writers are serialized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.responses import Response

from ratelimit_rls.admin.http.problems import ApiError, problem_response
from ratelimit_rls.database.administration import StoredResponse
from ratelimit_rls.database.repository import Actor, Reader, Repository, UnitOfWork

DRY_RUN = "Dry-Run"
REPLAYED = "Idempotency-Replayed"

JSON = "application/json"

MAX_PRECONDITION_LENGTH = 1000
"""Characters of If-Match or If-None-Match."""

_ETAG = re.compile(r'\s*(?:W/)?"([\x21\x23-\x7e\x80-\xff]*)"\s*(?:,|$)')
_ANY = "*"

_SECRET_OF = "secret_of"  # noqa: S105 - the name of a field
"""Field that replaces a stored response with a secret: the id of what was created."""


def etag(version: int) -> str:
    return f'"{version}"'


def parse_etags(header: str, value: str | None) -> frozenset[str] | None:
    """Return the ETags in If-Match or If-None-Match; None if it is absent. Raises ApiError (400) if it is malformed."""
    if value is None:
        return None
    if value.strip() == _ANY:
        return frozenset([_ANY])
    tags, at = [], 0
    while len(value) <= MAX_PRECONDITION_LENGTH and (found := _ETAG.match(value, at)):
        tags.append(f'"{found[1]}"')
        at = found.end()
    if at != len(value) or not tags:
        raise ApiError(400, "bad-request", f'{header} must be a list of ETags, e.g. {header}: "3"')
    return frozenset(tags)


def matches_etag(version: int, etags: frozenset[str]) -> bool:
    return _ANY in etags or etag(version) in etags


class PreconditionFailed(ApiError):
    """412: the resource is not the version in If-Match. The response has the ETag of the current version."""

    def __init__(self, detail: str, version: int | None) -> None:
        super().__init__(412, "stale", detail, headers={"ETag": etag(version)} if version is not None else None)


class ChangeResult(NamedTuple):
    """Result of a change, from which the response is built."""

    body: BaseModel | None = None
    status: int = 200
    version: int | None = None  # of the resource in the body
    location: str = ""
    secret_of: str = ""  # id of what was created, if the body has its secret: it is returned once and never stored


class IdempotencyKey(NamedTuple):
    """The Idempotency-Key of a request, and a digest of the request."""

    key: str
    request_digest: str  # tells apart different requests that use the same key


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """A request that changes something: its actor, its preconditions, and how it is carried out."""

    repository: Repository
    actor: Actor
    dry_run: bool = False
    idempotency: IdempotencyKey | None = None
    if_match: frozenset[str] | None = None
    if_none_match: frozenset[str] | None = None

    def require(self, version: int | None, what: str) -> None:
        """Raise PreconditionFailed unless `version` satisfies the headers. None: the resource does not exist.

        To be called in the transaction, before the change.
        """
        if self.if_none_match is not None and _ANY in self.if_none_match and version is not None:
            raise PreconditionFailed(f"{what} already exists; a request without If-None-Match replaces it", version)
        if self.if_match is None:
            return
        if version is None:
            raise PreconditionFailed(f"{what} does not exist, but If-Match requires it", None)
        if not matches_etag(version, self.if_match):
            tag = etag(version)
            raise PreconditionFailed(f"{what} has changed: its ETag is now {tag}; read it again and retry", version)

    async def run(self, work: Callable[[UnitOfWork], Awaitable[ChangeResult]]) -> Response:
        """Run `work` in one transaction and return its response. A dry run does the same and rolls back."""
        async with self.repository.change(self.actor, dry_run=self.dry_run) as change:
            response = await self.replay(change)
            if response is None:
                result = await work(change)
                response = self.respond(result)
                if self.idempotency is not None and not self.dry_run:
                    stored = _to_stored(self.idempotency, result, response)
                    await change.store_response(self.actor.token_id, self.idempotency.key, stored)
        return response

    async def run_recorded(
        self, record: Callable[[UnitOfWork], Awaitable[None]], work: Callable[[], Awaitable[ChangeResult]]
    ) -> Response:
        """Run `work`, which changes something outside of the database, after `record` was committed: its audit entry.

        If `work` fails, the entry stays, and a repetition with the same Idempotency-Key runs both again.
        """
        async with self.repository.change(self.actor, dry_run=self.dry_run) as change:
            response = await self.replay(change)
            if response is None:
                await record(change)
        if response is not None:
            return response
        if self.idempotency is None or self.dry_run:
            return self.respond(await work())
        return await self.run(lambda _: work())

    async def replay(self, reader: Reader) -> Response | None:
        """Return the stored response if this request repeats an earlier one, else None."""
        if self.idempotency is None:
            return None
        stored = await reader.stored_response(self.actor.token_id, self.idempotency.key)
        return None if stored is None else self._replay_stored(self.idempotency, stored)

    def respond(self, result: ChangeResult) -> Response:
        headers: dict[str, str] = {}
        if result.version is not None:
            headers["ETag"] = etag(result.version)
        if result.location and not self.dry_run:
            headers["Location"] = result.location
        if self.dry_run:
            headers[DRY_RUN] = "true"
        if result.body is None:
            return Response(status_code=result.status, headers=headers)
        return Response(result.body.model_dump_json(), result.status, headers, JSON)

    def _replay_stored(self, idempotency: IdempotencyKey, stored: StoredResponse) -> Response:
        if stored.request_digest != idempotency.request_digest:
            raise ApiError(
                422,
                "idempotency-key-reused",
                "this Idempotency-Key was used for a different request; use a new key",
            )
        created = _secret_of(stored.body)
        if created is not None:
            error = ApiError(
                409,
                "secret-already-returned",
                f"this request was carried out before and created {created}; its secret was only in that response",
                headers={REPLAYED: "true"},
                id=created,
            )
            return problem_response(error, self.actor.request_id)
        headers: Mapping[str, str] = {**stored.headers, REPLAYED: "true"}
        return Response(stored.body or None, stored.status, headers, JSON if stored.body else None)


def _to_stored(idempotency: IdempotencyKey, result: ChangeResult, response: Response) -> StoredResponse:
    headers = {name: value for name, value in response.headers.items() if name in ("etag", "location")}
    body = bytes(response.body)
    if result.secret_of:
        body = json.dumps({_SECRET_OF: result.secret_of}).encode()
    return StoredResponse(idempotency.request_digest, response.status_code, headers, body)


def _secret_of(body: bytes) -> str | None:
    found: Any = json.loads(body) if body else None
    return str(found[_SECRET_OF]) if isinstance(found, dict) and [*found] == [_SECRET_OF] else None
