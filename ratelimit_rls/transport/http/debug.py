"""Debug port: rules, statistics and hot counters of a running process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ratelimit_rls import errors
from ratelimit_rls.core.model import Algorithm, Limit, Rule
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.telemetry.hot_keys import HotReport, as_json
from ratelimit_rls.telemetry.masking import Mask
from ratelimit_rls.transport.http.header_value import header_value
from ratelimit_rls.transport.http.prometheus_endpoint import Scrape, metrics_page

_LISTING = """\
/rlconfig: print out the currently loaded configuration for debugging
/stats: print out stats
/metrics: print out metrics in the Prometheus format
/hot: print out the counters with the most hits and the most denials as JSON (?limit=20)
"""

DEFAULT_HOT_KEYS = 20
MAX_HOT_KEYS = 1000

Stats = Callable[[], Awaitable[Iterable[tuple[str, int]]]]
"""Returns every counter by name, summed over all workers."""

HotKeys = Callable[[], Awaitable[HotReport]]
"""Returns the most requested counters of all workers."""

StoreNodes = Callable[[], list[dict[str, Any]]]
"""Returns the state of the nodes of Redis as this process sees them."""


def debug_app(
    rules: ActiveRules,
    counters: Stats,
    hot_keys: HotKeys,
    scrape: Scrape,
    mask: Mask | None = None,
    nodes: StoreNodes | None = None,
) -> Starlette:
    """Return the app of the debug port.

    `mask` hides the values of descriptors in /hot. `nodes` adds the nodes of Redis to it; None for the embedded store.
    """

    async def listing(_: Request) -> Response:
        return PlainTextResponse(_LISTING)

    async def rlconfig(_: Request) -> Response:
        loaded = rules.current
        lines = [rule_lines(rule) for rule in loaded.tree.rules()] if loaded else []
        return PlainTextResponse("".join(lines), headers=_rules_headers(rules))

    async def stats(_: Request) -> Response:
        return PlainTextResponse("".join(f"{errors.one_line(name)}: {value}\n" for name, value in await counters()))

    async def hot(request: Request) -> Response:
        limit = request.query_params.get("limit", str(DEFAULT_HOT_KEYS))
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_HOT_KEYS:
            return PlainTextResponse(f"limit must be a whole number from 1 to {MAX_HOT_KEYS}\n", 400)
        store = {"store": nodes()} if nodes is not None else {}
        return JSONResponse(as_json(await hot_keys(), int(limit), mask) | store)

    pages = {"/": listing, "/rlconfig": rlconfig, "/stats": stats, "/hot": hot, "/metrics": metrics_page(scrape)}
    return Starlette(routes=[Route(path, page) for path, page in pages.items()])


def rule_lines(rule: Rule) -> str:
    """Format each limit as in envoyproxy/ratelimit; our own attributes are appended where they are used."""
    return "".join(_rule_line(rule, limit) for limit in rule.limits or (None,))


def _rule_line(rule: Rule, limit: Limit | None) -> str:
    unit, requests_per_unit = (limit.unit.name, limit.requests_per_unit) if limit else ("UNKNOWN", 0)
    line = (
        f"{rule.path}: unit={unit} requests_per_unit={requests_per_unit}, "
        f"shadow_mode: {_format_bool(rule.shadow_mode)}, quota_mode: {_format_bool(rule.quota_mode)}"
    )
    if limit and limit.unit_multiplier != 1:
        line += f", unit_multiplier: {limit.unit_multiplier}"
    if limit and limit.timezone:
        line += f", timezone: {limit.timezone}"
    if limit and limit.algorithm is not Algorithm.FIXED_WINDOW:
        line += f", algorithm: {limit.algorithm.value}"
        if limit.algorithm.has_burst:
            line += f", burst: {limit.burst}"
    return line + "\n"


def _rules_headers(rules: ActiveRules) -> dict[str, str]:
    """Return headers with the version of the rules, and with the error if newer rules were rejected."""
    headers = {"X-Ratelimit-Rules-Failures": str(rules.failures)}
    if rules.current is not None:
        headers["X-Ratelimit-Rules-Version"] = str(rules.current.version)
        headers["X-Ratelimit-Rules-Digest"] = rules.current.digest
    if rules.last_error is not None:
        headers["X-Ratelimit-Rules-Last-Error"] = header_value(str(rules.last_error))
    return headers


def _format_bool(value: bool) -> str:
    return "true" if value else "false"
