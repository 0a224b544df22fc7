"""Metrics for Prometheus to scrape, on a port of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ratelimit_rls.telemetry.prometheus import CONTENT_TYPE

Scrape = Callable[[], Awaitable[Iterable[bytes]]]
"""The text of now, in pieces; one may be empty."""


def metrics_app(path: str, scrape: Scrape) -> Starlette:
    return Starlette(routes=[Route(path, metrics_page(scrape))])


def metrics_page(scrape: Scrape) -> Callable[[Request], Awaitable[Response]]:
    async def page(_: Request) -> Response:
        return StreamingResponse(_unhurried(await scrape()), media_type=CONTENT_TYPE)

    return page


async def _unhurried(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Calls come first: between two pieces it is their turn."""
    for piece in pieces:
        if piece:
            yield piece
        await asyncio.sleep(0)
