"""Pool of the leases of a process: bounds their number, and refunds unused hits to the store.

Expired leases are refunded with the next calls that go to the store anyway, or together by a timer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from weakref import WeakValueDictionary

import structlog

from ratelimit_rls.common.timers import CallLater, Timer, call_not_before
from ratelimit_rls.core.model import StoreResult
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import PreparedPlan, Store
from ratelimit_rls.store.leases.lease import Lease

MAX_LEASES = 10_000
"""Maximum number of counters whose demand is tracked or that have hits available, at about a kilobyte each. Hot ones
are few; this bounds rules that declare every user hot. The least recently used is dropped first."""

REFUND_DELAY_US = 20_000
"""A lease that is no longer used is refunded at most this long after it expires."""

MAX_REFUNDS_PER_BATCH = 16
"""Leases refunded together with calls, which wait for them."""

_log = structlog.get_logger()


class LeasePool:
    def __init__(
        self,
        store: Store,
        now_us: Callable[[], int],
        call_later: CallLater | None = None,
        max_leases: int = MAX_LEASES,
    ) -> None:
        """`call_later` defaults to that of the running loop."""
        self._store = store
        self._now_us = now_us
        self._call_later = call_later or call_not_before
        self._max_leases = max_leases
        self._by_name: WeakValueDictionary[Hashable, Lease] = WeakValueDictionary()
        self._lru: OrderedDict[Lease, None] = OrderedDict()  # most recently used last
        self._with_hits: dict[Lease, None] = {}  # leases that may have hits available
        self._pending_refunds: deque[PreparedPlan] = deque()
        self._refund_task: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._timer_us = 0
        self._returned_total = 0

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield "ratelimit.leases.counters", len(self._lru)
        yield "ratelimit.leases.available_hits", sum(lease.available for lease in self._with_hits)
        yield "ratelimit.leases.returned_hits", self._returned_total

    def get_or_create(self, name: Hashable, make: Callable[[], Lease]) -> Lease:
        """Return the lease of that name. It is shared for as long as a plan or a grant references it."""
        lease = self._by_name.get(name)
        if lease is None:
            lease = self._by_name[name] = make()
        return lease

    def touch(self, lease: Lease, now_us: int) -> None:
        """Refund expired hits and mark the lease as used. Call this before reading its available hits."""
        if now_us >= lease.expires_us:
            self.queue_refunds(lease.release(now_us))
        if lease in self._lru:
            self._lru.move_to_end(lease)
            return
        self._lru[lease] = None
        if len(self._lru) > self._max_leases:
            evicted, _ = self._lru.popitem(last=False)
            self.queue_refunds(evicted.release())

    def track(self, lease: Lease) -> None:
        """Schedule the refund of a lease that has been granted hits."""
        if lease.available:
            self._with_hits[lease] = None
            self._schedule(lease.expires_us + REFUND_DELAY_US)

    def queue_refunds(self, refunds: Iterable[PreparedPlan]) -> None:
        before = len(self._pending_refunds)
        self._pending_refunds.extend(refunds)
        if len(self._pending_refunds) > before:
            self._schedule(self._now_us() + REFUND_DELAY_US)

    def take_refunds(self) -> list[PreparedPlan]:
        """Take some refunds to send with calls. Pass the results to `record_refunds`."""
        return [self._pending_refunds.popleft() for _ in range(min(len(self._pending_refunds), MAX_REFUNDS_PER_BATCH))]

    def record_refunds(self, results: Sequence[StoreResult | StoreError]) -> None:
        """Count refunds. A failed one is not sent again, as it may have been executed; else its hits stay spent until
        they expire."""
        self._returned_total += len(results)
        lost = [result for result in results if isinstance(result, StoreError)]
        if lost:
            _log.warning("lease_refund_failed", leases=len(lost), error=str(lost[0]))

    def _schedule(self, at_us: int) -> None:
        if self._timer is not None:
            if self._timer_us <= at_us:
                return
            self._timer.cancel()
        self._timer_us = at_us
        self._timer = self._call_later(max(0, at_us - self._now_us()) / 1e6, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_us = self._now_us()
        for lease in list(self._with_hits):
            if now_us >= lease.expires_us:
                self._pending_refunds.extend(lease.release(now_us))
            if not lease.available:
                del self._with_hits[lease]
        if self._pending_refunds:
            if self._refund_task is None or self._refund_task.done():
                self._refund_task = asyncio.get_running_loop().create_task(self._send_refunds())
            else:
                self._schedule(now_us + REFUND_DELAY_US)
        if self._with_hits:
            self._schedule(min(lease.expires_us for lease in self._with_hits) + REFUND_DELAY_US)

    async def _send_refunds(self) -> None:
        refunds, self._pending_refunds = list(self._pending_refunds), deque()
        if refunds:
            self.record_refunds(await self._store.spend(refunds))

    async def close(self) -> None:
        """Refund all hits, including those that are still to be granted."""
        if in_flight := [
            lease.pending_request for lease in self._by_name.values() if lease.pending_request is not None
        ]:
            await asyncio.wait(in_flight)
        if self._refund_task is not None:
            await self._refund_task
        for lease in self._with_hits:
            self._pending_refunds.extend(lease.release())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._send_refunds()
