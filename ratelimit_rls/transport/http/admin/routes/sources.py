"""Where rules and accounts come from, and how that goes."""

from __future__ import annotations

from starlette.responses import Response

from ratelimit_rls.transport.http.admin.shown import ShownSource, ShownSources
from ratelimit_rls.transport.http.admin.visit import Here
from ratelimit_rls.transport.http.admin.way import routes_of

router = routes_of("sources", "sources")


@router.get("", summary="Show the sources of rules and accounts", response_model=ShownSources)
async def show_sources(visit: Here) -> Response:
    """As the process that answers has them."""
    return visit.show(ShownSources(sources=[ShownSource.of(state) for state in visit.backend.sources()]))
