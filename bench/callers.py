"""Callers with accounts in a database: their limits and requests, over RLS and ext_authz.

3 % of the callers are limited to one call per hour and are denied; every denial is recorded.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sqlalchemy import insert

from bench import edge, wire
from bench.workload import SUBDIRECTORY, TENANTS
from ratelimit_rls.core.model import Limit, Unit
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Actor, Repository
from ratelimit_rls.database.row_mapping import chunks
from ratelimit_rls.database.tables import api_keys
from ratelimit_rls.identity import key_format
from ratelimit_rls.identity.accounts import Tier, User
from ratelimit_rls.protos.messages import CheckRequest

DOMAIN = "callers"
KEY_SECRET = "the-secret-of-a-benchmark"
DENIED_TENANTS = (97, 98, 99)
DENIED_SHARE = len(DENIED_TENANTS) / TENANTS

PLENTY = 1_000_000_000
TRIAL = "trial"
TIERS = ("free", "pro", "enterprise")
CUSTOM_SETS = 5
"""Default number of different sets of custom limits."""


def user_id(number: int) -> str:
    return f"user-{number:06}"


def key_text(number: int) -> str:
    """Return the API key of a user: equal in every run, so that requests and database can be created separately."""
    return parse_key_text(f"known {number}")


def parse_key_text(words: str) -> str:
    """Return a key derived from a text."""
    drawn = hashlib.sha512(words.encode()).digest()
    public = base64.b32encode(drawn[:8])[:12].decode().lower()
    return f"rlk_{public}_{base64.urlsafe_b64encode(drawn[8:40]).rstrip(b'=').decode()}"


def write_rules(root: Path, *, of_database: bool, on_invalid: str = "ip") -> None:
    """Write the rules.

    With `of_database`, callers have credentials and their own limits; else a header and the rules define them.
    """
    config = root / SUBDIRECTORY / "config"
    config.mkdir(parents=True, exist_ok=True)
    plenty, once = (f"rate_limit: {{unit: hour, requests_per_unit: {most}}}" for most in (PLENTY, 1))
    user = "from: user" if of_database else "header: x-user"
    lines = [
        f"domain: {DOMAIN}",
        "ext_authz:",
        "  descriptors:",
        f"    - entries: [{{key: tenant, header: x-tenant}}, {{key: user, {user}}}]",
        "    - entries: [{key: tenant, header: x-tenant}, {key: route, from: path}]",
        "descriptors:",
        "  - key: tenant",
        "    descriptors:",
    ]
    if of_database:
        lines[1:1] = [f"identity: {{credentials: [{{kind: api_key, header: x-api-key}}], on_invalid: {on_invalid}}}"]
        lines += [f"      - {{key: user, limits_of: user, {plenty}}}", f"      - {{key: route, {plenty}}}"]
    else:
        lines += [f"      - {{key: user, {plenty}}}", f"      - {{key: route, {plenty}}}"]
        for tenant in DENIED_TENANTS:
            lines += [f"  - key: tenant\n    value: tenant-{tenant}\n    descriptors:"]
            lines += [f"      - {{key: user, {once}}}", f"      - {{key: route, {plenty}}}"]
    (config / f"{DOMAIN}.yaml").write_text("\n".join(lines) + "\n")


def requests(callers: int) -> list[bytes]:
    """Return DATA frames of RateLimitRequests with two descriptors, one per caller."""
    return [wire.data(_request(number)) for number in range(callers)]


def _request(number: int) -> bytes:
    tenant = ("tenant", f"tenant-{number % TENANTS:02}")
    requested = [(tenant, ("user", user_id(number))), (tenant, ("route", f"/route-{number:06}"))]
    return wire.rate_limit_request(DOMAIN, requested)


def checks(callers: int) -> list[bytes]:
    """Return DATA frames of CheckRequests, one per caller, with API key and name in headers."""
    return [wire.data(check(number, key_text(number))) for number in range(callers)]


def check(number: int, credential: str, header: str = "x-api-key") -> bytes:
    """Return Envoy's CheckRequest of an ordinary GET; ids make every request different."""
    result = CheckRequest()
    result.attributes.source.address.socket_address.address = "192.0.2.7"
    result.attributes.source.address.socket_address.port_value = 40_000 + number % 20_000
    result.attributes.destination.address.socket_address.address = "198.51.100.1"
    result.attributes.destination.address.socket_address.port_value = 8443
    http = result.attributes.request.http
    http.id, http.method, http.scheme, http.protocol = str(10**12 + number), "GET", "https", "HTTP/2"
    http.host, http.path = "api.example.com", f"/route-{number:06}?page=2"
    headers = {
        ":authority": http.host,
        ":method": http.method,
        ":path": http.path,
        ":scheme": http.scheme,
        "accept": "application/json",
        "user-agent": "client/1.0",
        "x-forwarded-for": "192.0.2.7",
        "x-forwarded-proto": "https",
        "x-request-id": f"00000000-0000-4000-8000-{number:012}",
        "x-tenant": f"tenant-{number % TENANTS:02}",
        "x-user": user_id(number),
        header: credential,
    }
    http.headers.update(headers)
    return bytes(result.SerializeToString())


def users(
    count: int,
    custom_sets: int = CUSTOM_SETS,
    *,
    all_custom: bool = False,
    name: Callable[[int], str] = user_id,
    some_are_denied: bool = True,
) -> Iterator[User]:
    """Return users with a tier; a tenth, or all, have custom limits, which differ slightly and are never reached."""
    for number in range(count):
        is_trial = some_are_denied and number % TENANTS in DENIED_TENANTS
        tier = TRIAL if is_trial else TIERS[number % len(TIERS)]
        is_custom = not is_trial and (all_custom or number % 10 == 0)
        limits = (Limit(PLENTY - 1 - number % custom_sets, Unit.HOUR),) if is_custom else ()
        yield User(name(number), tier, limits)


async def fill(
    url: str, count: int, custom_sets: int = CUSTOM_SETS, *, all_custom: bool = False, keys: bool = True
) -> None:
    """Upgrade the database and add users, each with a key."""
    await _fill(url, users(count, custom_sets, all_custom=all_custom), keys=count if keys else 0)


async def fill_with_users_of_edge(url: str, count: int) -> None:
    """Upgrade the database and add the most active users of the edge, without keys."""
    await _fill(url, users(count, name=edge.user_name, some_are_denied=False), keys=0)


async def _fill(url: str, accounts: Iterable[User], keys: int) -> None:
    database = Database(url)
    try:
        await database.upgrade()
        async with Repository(database).change(Actor("bench"), timeout_s=600) as change:
            await change.put_tier(Tier(TRIAL, (Limit(1, Unit.HOUR),)))
            for number, tier in enumerate(TIERS):
                await change.put_tier(Tier(tier, (Limit(PLENTY + number, Unit.HOUR),)))
            await change.put_users(accounts)
        if keys:
            await _add_keys(database, keys)
    finally:
        await database.close()


async def _add_keys(database: Database, count: int) -> None:
    """Insert keys directly: the repository adds them one by one, each with an audit entry."""
    async with database.begin(600) as connection:
        for some in chunks(map(str, range(count)), 1000):
            await connection.execute(insert(api_keys), [_key_row(int(number)) for number in some])


def _key_row(number: int) -> dict[str, object]:
    text = key_text(number)
    return {
        "key_id": key_format.public_id(text, "rlk"),
        "api_key_hash": key_format.digest(KEY_SECRET.encode(), text),
        "user_id": user_id(number),
        "key_name": None,
        "tier": None,
        "limits": None,
        "expires_at": None,
        "total_requests": 0,
        "is_active": True,
        "version": 1,
        "created_at": 0.0,
        "updated_at": 0.0,
    }


def fill_now(url: str, count: int, custom_sets: int = CUSTOM_SETS, *, all_custom: bool = False) -> None:
    asyncio.run(fill(url, count, custom_sets, all_custom=all_custom))
