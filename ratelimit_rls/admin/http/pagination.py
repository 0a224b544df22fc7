"""Pagination of lists: at most 500 items per page, and a signed cursor for the next one.

Items added between two pages do not make others appear twice. The signature of a cursor covers the list, its filters
and the position: a forged cursor, or one of another list or other filters, never reaches the database.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response

from ratelimit_rls.errors import BadRequest

DEFAULT_LIMIT = 100
MAX_LIMIT = 500

MAX_CURSOR_LENGTH: Final = 2048
"""Maximum length of a cursor in characters.

An id has at most 255 characters, each of which takes at most twelve in JSON within base64.
"""

_SIGNATURE_BYTES = 12


class Cursors:
    """Encodes and decodes cursors, signed with a key derived from the key secret."""

    def __init__(self, key_secret: bytes) -> None:
        self._key = hmac.digest(key_secret, b"cursors of the admin API", hashlib.sha256)

    def write(self, listing: str, filters: Mapping[str, Any], place: Sequence[str | int]) -> str:
        payload = json.dumps([*place], separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._sign(listing, filters, payload) + payload).decode().rstrip("=")

    def read(self, cursor: str, listing: str, filters: Mapping[str, Any]) -> list[str | int]:
        """Return the position in a cursor. Raises ValueError; its text completes the sentence "the cursor …"."""
        try:
            whole = base64.urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
        except (binascii.Error, ValueError):
            whole = b""
        signature, payload = whole[:_SIGNATURE_BYTES], whole[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(listing, filters, payload)):
            raise ValueError("does not belong to this list with these filters; start again without a cursor")
        place: list[str | int] = json.loads(payload)
        return place

    def _sign(self, listing: str, filters: Mapping[str, Any], payload: bytes) -> bytes:
        scope = json.dumps([listing, sorted(filters.items())]).encode()
        signed = b"%d:%b%b" % (len(scope), scope, payload)
        return hmac.digest(self._key, signed, hashlib.sha256)[:_SIGNATURE_BYTES]


_PAGE_PARAMS = ("limit", "cursor")

T = TypeVar("T")

CursorValue = str | int


class PageItems(NamedTuple, Generic[T]):
    """The items of one page, from which its response body is made."""

    items: Sequence[T]
    next: str | None  # cursor of the next page; None: this is the last one


class PageRequest:
    """A request for one page of a list."""

    def __init__(self, request: Request, response: Response, limit: int, cursor: str | None) -> None:
        self._cursors: Cursors = request.app.state.cursors
        self._path: str = request.scope["path"]
        self._filters = {name: value for name, value in request.query_params.items() if name not in _PAGE_PARAMS}
        self._response = response
        self._limit = limit
        self._cursor = cursor

    async def read(
        self,
        read: Callable[[CursorValue | None, int], Awaitable[Sequence[T]]],
        position: Callable[[T], CursorValue],
    ) -> PageItems[T]:
        """Read the page, and set the Link to the next one.

        `read` takes the position after which to begin (None: at the start) and the number of items to read; `position`
        returns the position of an item.
        """
        found = await read(self._after(), self._limit + 1)  # one more, to know whether there is a next page
        items = found[: self._limit]
        if len(found) == len(items):
            return PageItems(items, None)
        cursor = self._cursors.write(self._path, self._filters, [position(items[-1])])
        query = urlencode({**self._filters, "limit": self._limit, "cursor": cursor})
        self._response.headers["Link"] = f'<{self._path}?{query}>; rel="next"'
        return PageItems(items, cursor)

    def _after(self) -> CursorValue | None:
        if self._cursor is None:
            return None
        try:
            (after,) = self._cursors.read(self._cursor, self._path, self._filters)
        except ValueError as error:
            raise BadRequest(str(error), field="cursor") from None
        return after


async def get_page_request(
    request: Request,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Maximum number of items.")] = DEFAULT_LIMIT,
    cursor: Annotated[
        str | None,
        Query(
            max_length=MAX_CURSOR_LENGTH, description="`next` of the previous page, requested with the same filters."
        ),
    ] = None,
) -> PageRequest:
    return PageRequest(request, response, limit, cursor)


Pagination = Annotated[PageRequest, Depends(get_page_request)]
