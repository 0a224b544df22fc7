"""Prometheus endpoint, on its own port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ratelimit_rls.telemetry.prometheus import CONTENT_TYPE

Scrape = Callable[[], Awaitable[Iterable[bytes]]]
"""Returns the current metrics in chunks, some of which may be empty."""


def metrics_app(path: str, scrape: Scrape) -> Starlette:
    return Starlette(routes=[Route(path, metrics_page(scrape))])


def metrics_page(scrape: Scrape) -> Callable[[Request], Awaitable[Response]]:
    async def page(_: Request) -> Response:
        return StreamingResponse(_stream(await scrape()), media_type=CONTENT_TYPE)

    return page


async def _stream(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks, and let the event loop handle calls after each."""
    for chunk in chunks:
        if chunk:
            yield chunk
        await asyncio.sleep(0)
