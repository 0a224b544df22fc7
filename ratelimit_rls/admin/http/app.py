"""The FastAPI application: the routes under /api/v1, and /healthz, /openapi.json and /docs, which need no token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import HTMLResponse, JSONResponse, Response

from ratelimit_rls.admin.auth import AccessControl
from ratelimit_rls.admin.backend import AdminBackend
from ratelimit_rls.admin.http import openapi
from ratelimit_rls.admin.http.middleware import VERSIONS, ApiVersion, RequestGuardMiddleware
from ratelimit_rls.admin.http.pagination import Cursors
from ratelimit_rls.admin.http.problems import EXCEPTION_HANDLERS
from ratelimit_rls.admin.http.routes import accounts, credentials, decisions, records, rules
from ratelimit_rls.admin.http.schemas.resources import Health
from ratelimit_rls.admin.rate_limits import AdminRateLimits
from ratelimit_rls.admin.simulation import BoundedLock
from ratelimit_rls.telemetry.abuse import AbuseLog

ROUTERS = (
    rules.router,
    accounts.tiers,
    accounts.users,
    accounts.blocks,
    credentials.keys,
    credentials.tokens,
    decisions.counters,
    decisions.decisions,
    records.recorded_decisions,
    records.usage,
    records.audit,
    records.sources,
)


def admin_app(
    backend: AdminBackend, versions: Sequence[ApiVersion] = VERSIONS, abuse: AbuseLog | None = None
) -> FastAPI:
    app = documented_app()
    app.state.backend = backend
    app.state.access = AccessControl(
        backend.repository,
        backend.key_secret,
        backend.bootstrap_token,
        AdminRateLimits(backend.store, backend.policy.key_prefix),
        backend.clock,
        needs_tokens=backend.needs_tokens,
    )
    app.state.cursors = Cursors(backend.key_secret)
    app.state.simulations = BoundedLock()
    app.add_middleware(
        RequestGuardMiddleware, versions=versions, abuse=abuse or AbuseLog(), only_loopback=not backend.needs_tokens
    )
    return app


def documented_app() -> FastAPI:
    """Return the application with every route but no backend: enough to generate the OpenAPI document."""
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    for router in ROUTERS:
        app.include_router(router)

    @app.get("/healthz", summary="Check that the API answers; needs no token", tags=["health"], response_model=Health)
    async def get_health() -> dict[str, str]:
        """Report the health of the API alone. An unavailable database does not make it unhealthy, because a restart
        would not help."""
        return {"status": "ok"}

    # Both need no token, so they are rendered once.
    document = cache(lambda: JSONResponse(app.openapi()).body)
    docs_page = cache(lambda: openapi.docs_page(app.openapi()))

    @app.get("/openapi.json", include_in_schema=False)
    async def get_openapi_document() -> Response:
        return Response(document(), media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def get_docs_page() -> Response:
        return HTMLResponse(
            docs_page(), headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        )

    openapi.install(app)
    return app


def _operation_id(route: APIRoute) -> str:
    """Return the OpenAPI operation id: the name of the endpoint function, e.g. `list_users`."""
    return route.name
