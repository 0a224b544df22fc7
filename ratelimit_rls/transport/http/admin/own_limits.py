"""The API is limited by the engine it administers: so many reads and writes for each token, and few failed logins.

The rules are written here as anybody would write them, and counted in the configured store, so that they hold over all
replicas. They count under a prefix of their own: no rule of a user can meet them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from ratelimit_rls.core.client_ip import canonical
from ratelimit_rls.core.model import Code, Descriptor, Entry, Purpose, Request
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import StoreError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.base import Store
from ratelimit_rls.telemetry.metrics import Metrics

READS_A_MINUTE: Final = 1000
WRITES_A_MINUTE: Final = 100
FAILED_LOGINS_A_MINUTE: Final = 10

IPV6_PREFIX = 64
"""Whoever has one address of such a network has all of them."""

_DOMAIN = "admin"

_RULES = f"""\
domain: {_DOMAIN}
on_store_failure: local
descriptors:
  - key: token
    descriptors:
      - key: does
        value: read
        rate_limit: {{unit: minute, requests_per_unit: {READS_A_MINUTE}, algorithm: sliding_window}}
      - key: does
        value: write
        rate_limit: {{unit: minute, requests_per_unit: {WRITES_A_MINUTE}, algorithm: sliding_window}}
  - key: failed_login
    rate_limit: {{unit: minute, requests_per_unit: {FAILED_LOGINS_A_MINUTE}, algorithm: sliding_window}}
"""


class OwnLimits:
    """Each method says after how many seconds to come back, or None: go ahead."""

    def __init__(self, store: Store, key_prefix: str = "") -> None:
        compiled = compile_documents({"the limits of the admin API": _RULES.encode()})
        rules = Rules()
        rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))
        # Metrics of its own: what administrators do is not what the service is asked.
        self._limiter = RateLimiter(rules, store, Metrics(), Policy(key_prefix=f"{key_prefix}admin:"))

    async def count(self, token_id: str, *, is_write: bool) -> int | None:
        return await self._ask(Entry("token", token_id), Entry("does", "write" if is_write else "read"))

    async def may_log_in(self, address: str) -> int | None:
        """Before a token is looked at; nothing is counted."""
        return await self._ask(_login(address), purpose=Purpose.LOOK)

    async def login_failed(self, address: str) -> int | None:
        return await self._ask(_login(address))

    async def _ask(self, *entries: Entry, purpose: Purpose = Purpose.DECIDE) -> int | None:
        call = self._limiter.prepare(Request(_DOMAIN, (Descriptor(entries),), purpose=purpose))
        (decision,) = await self._limiter.check([call])
        if isinstance(decision, StoreError) or decision.code is not Code.OVER_LIMIT:
            return None
        return max(1, decision.statuses[0].reset_s)


def _login(address: str) -> Entry:
    return Entry("failed_login", canonical(address, IPV6_PREFIX) or address[:64])
