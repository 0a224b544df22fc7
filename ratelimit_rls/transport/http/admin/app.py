"""The app: routes under /api/v1, and what stands beside them and needs no token."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.responses import HTMLResponse, JSONResponse, Response

from ratelimit_rls.transport.http.admin import openapi, problems
from ratelimit_rls.transport.http.admin.backend import AdminBackend
from ratelimit_rls.transport.http.admin.frame import Frame
from ratelimit_rls.transport.http.admin.page import docs_page
from ratelimit_rls.transport.http.admin.routes import (
    audit,
    counters,
    decisions,
    keys,
    rules,
    sources,
    tiers,
    tokens,
    usage,
    users,
)
from ratelimit_rls.transport.http.admin.shown import Healthy
from ratelimit_rls.transport.http.admin.versions import VERSIONS, Version
from ratelimit_rls.transport.http.admin.way import Gate

ROUTERS = (
    rules.router,
    tiers.router,
    users.router,
    users.blocks,
    keys.router,
    tokens.router,
    counters.router,
    decisions.router,
    usage.recorded,
    usage.router,
    audit.router,
    sources.router,
)


def admin_app(backend: AdminBackend, versions: Sequence[Version] = VERSIONS) -> FastAPI:
    app = documented_app()
    app.state.gate = Gate(backend)
    app.add_middleware(Frame, versions=versions, only_loopback=not backend.needs_tokens)
    return app


def documented_app() -> FastAPI:
    """Every route, and nothing behind them: enough to write the document."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for router in ROUTERS:
        app.router.routes += router.routes

    @app.get("/healthz", summary="Tell whether this answers; needs no token", tags=["health"], response_model=Healthy)
    async def healthz() -> Response:
        """Of the API alone. A database that is away does not make it unhealthy: starting anew would not help."""
        return JSONResponse({"status": "ok"})

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        return JSONResponse(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(
            docs_page(app.openapi()),
            headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    problems.install(app)
    openapi.install(app)
    return app
