"""The debug port: what a person wants to see of a running process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ratelimit_rls import errors
from ratelimit_rls.core.model import Algorithm, Limit, Rule
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.telemetry.hot_keys import HotReport, as_json
from ratelimit_rls.transport.http.lines import one_line
from ratelimit_rls.transport.http.metrics import Scrape, metrics_page

_LISTING = """\
/rlconfig: print out the currently loaded configuration for debugging
/stats: print out stats
/metrics: print out metrics as Prometheus reads them
/hot: print out, in JSON, which counters are asked for most and which refuse most (?limit=20)
"""

FEW_HOT = 20
MOST_HOT = 1000

Stats = Callable[[], Awaitable[Iterable[tuple[str, int]]]]
"""Every counter by name, whoever counted it."""

Hot = Callable[[], Awaitable[HotReport]]
"""What is asked for most, whoever was asked."""


def ops_app(rules: Rules, counters: Stats, hot_keys: Hot, scrape: Scrape) -> Starlette:
    async def listing(_: Request) -> Response:
        return PlainTextResponse(_LISTING)

    async def rlconfig(_: Request) -> Response:
        loaded = rules.current
        lines = [rule_lines(rule) for rule in loaded.tree.rules()] if loaded else []
        return PlainTextResponse("".join(lines), headers=_rules_headers(rules))

    async def stats(_: Request) -> Response:
        return PlainTextResponse("".join(f"{errors.one_line(name)}: {value}\n" for name, value in await counters()))

    async def hot(request: Request) -> Response:
        limit = request.query_params.get("limit", str(FEW_HOT))
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MOST_HOT:
            return PlainTextResponse(f"limit must be a whole number from 1 to {MOST_HOT}\n", 400)
        return JSONResponse(as_json(await hot_keys(), int(limit)))

    pages = {"/": listing, "/rlconfig": rlconfig, "/stats": stats, "/hot": hot, "/metrics": metrics_page(scrape)}
    return Starlette(routes=[Route(path, page) for path, page in pages.items()])


def rule_lines(rule: Rule) -> str:
    """The reference's line for each limit; what the reference does not have comes after it, where it is used."""
    return "".join(_line(rule, limit) for limit in rule.limits or (None,))


def _line(rule: Rule, limit: Limit | None) -> str:
    unit, requests_per_unit = (limit.unit.name, limit.requests_per_unit) if limit else ("UNKNOWN", 0)
    line = (
        f"{rule.path}: unit={unit} requests_per_unit={requests_per_unit}, "
        f"shadow_mode: {_bool(rule.shadow_mode)}, quota_mode: {_bool(rule.quota_mode)}"
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


def _rules_headers(rules: Rules) -> dict[str, str]:
    """Which rules these are, and whether newer ones were refused."""
    headers = {"X-Ratelimit-Rules-Failures": str(rules.failures)}
    if rules.current is not None:
        headers["X-Ratelimit-Rules-Version"] = str(rules.current.version)
        headers["X-Ratelimit-Rules-Digest"] = rules.current.digest
    if rules.last_error is not None:
        headers["X-Ratelimit-Rules-Last-Error"] = one_line(str(rules.last_error))
    return headers


def _bool(value: bool) -> str:
    return "true" if value else "false"
