"""Lists, page by page: at most 500 at once, and a cursor for the rest. What comes in between is not seen twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from fastapi import Depends, Query
from starlette.responses import Response

from ratelimit_rls.transport.http.admin.cursors import LONGEST
from ratelimit_rls.transport.http.admin.problems import wrong_field
from ratelimit_rls.transport.http.admin.shown import Page, Shown
from ratelimit_rls.transport.http.admin.visit import Visit

USUAL = 100
MOST = 500

_PART = ("limit", "cursor")

T = TypeVar("T")

Place = str | int


class Part(NamedTuple):
    """Which part of a list is asked for."""

    limit: int
    cursor: str | None


async def _part(
    limit: Annotated[int, Query(ge=1, le=MOST, description="How many at most.")] = USUAL,
    cursor: Annotated[
        str | None, Query(max_length=LONGEST, description="`next` of the page before, with the same filters.")
    ] = None,
) -> Part:
    return Part(limit, cursor)


WhichPart = Annotated[Part, Depends(_part)]


async def answer_page(
    visit: Visit,
    part: Part,
    read: Callable[[Place | None, int], Awaitable[Sequence[T]]],
    place: Callable[[T], Place],
    show: Callable[[T], Shown],
) -> Response:
    """`read` is given the place after which to begin, and how many to read; `place` is that of one thing."""
    filters = {name: value for name, value in visit.query.items() if name not in _PART}
    after: Place | None = None
    if part.cursor is not None:
        try:
            (after,) = visit.cursors.read(part.cursor, visit.path, filters)
        except ValueError as fault:
            raise wrong_field("cursor", f"it {fault}") from None
    found = await read(after, part.limit + 1)  # one more, to know whether there is a next page
    shown = found[: part.limit]
    more = len(found) > len(shown)
    following = visit.cursors.write(visit.path, filters, [place(shown[-1])]) if more else None
    response = visit.show(Page[Any](items=[show(one) for one in shown], next=following))
    if following is not None:
        query = urlencode({**filters, "limit": part.limit, "cursor": following})
        response.headers["Link"] = f'<{visit.path}?{query}>; rel="next"'
    return response
