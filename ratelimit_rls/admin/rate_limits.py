"""Rate limits of the admin API itself: reads and writes per token, and failed logins per address.

The rules are ordinary YAML rules, counted in the configured store, so that they apply across all replicas. Their
counters have a key prefix of their own, so that no configured rule can share them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from ratelimit_rls.core.client_ip import canonical
from ratelimit_rls.core.model import Code, Descriptor, Entry, Purpose, Request
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import StoreError
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.base import Store
from ratelimit_rls.telemetry.metrics import Metrics

READS_PER_MINUTE: Final = 1000
WRITES_PER_MINUTE: Final = 100
FAILED_LOGINS_PER_MINUTE: Final = 10

IPV6_PREFIX = 64
"""A client usually has a whole network of this prefix length, so failed logins are counted per network."""

_DOMAIN = "admin"

_RULES = f"""\
domain: {_DOMAIN}
on_store_failure: local
descriptors:
  - key: token
    descriptors:
      - key: does
        value: read
        rate_limit: {{unit: minute, requests_per_unit: {READS_PER_MINUTE}, algorithm: sliding_window}}
      - key: does
        value: write
        rate_limit: {{unit: minute, requests_per_unit: {WRITES_PER_MINUTE}, algorithm: sliding_window}}
  - key: failed_login
    rate_limit: {{unit: minute, requests_per_unit: {FAILED_LOGINS_PER_MINUTE}, algorithm: sliding_window}}
"""


class AdminRateLimits:
    """Each method returns the seconds to wait before a retry, or None if the request may proceed."""

    def __init__(self, store: Store, key_prefix: str = "") -> None:
        compiled = compile_documents({"the limits of the admin API": _RULES.encode()})
        rules = ActiveRules()
        rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))
        # Separate metrics: requests of administrators are not traffic of the service.
        self._limiter = RateLimiter(rules, store, Metrics(), Policy(key_prefix=f"{key_prefix}admin:"))

    async def count(self, token_id: str, *, is_write: bool) -> int | None:
        return await self._check(Entry("token", token_id), Entry("does", "write" if is_write else "read"))

    async def check_login(self, address: str) -> int | None:
        """Check whether an address may try a token. Counts nothing."""
        return await self._check(_login(address), purpose=Purpose.LOOK)

    async def record_failed_login(self, address: str) -> int | None:
        return await self._check(_login(address))

    async def _check(self, *entries: Entry, purpose: Purpose = Purpose.DECIDE) -> int | None:
        call = self._limiter.prepare(Request(_DOMAIN, (Descriptor(entries),), purpose=purpose))
        (decision,) = await self._limiter.check([call])
        if isinstance(decision, StoreError) or decision.code is not Code.OVER_LIMIT:
            return None
        return max(1, decision.statuses[0].reset_s)


def _login(address: str) -> Entry:
    return Entry("failed_login", canonical(address, IPV6_PREFIX) or address[:64])
