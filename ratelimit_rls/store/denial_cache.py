"""Cache of denials that are known to hold: repeats them without asking the store until the moment they end.

    batch ─► still denied ─► repeated from the cache, with the elapsed time subtracted
          └► the rest ─► the store ─► definite denials are cached, each until it ends

A denied client that keeps calling costs the store nothing, so a flood of denied calls stays in the process it reached.

Guarantee: a call is answered from the cache only if the store would deny it, too, and asking would count nothing. So a
denial is cached only if it charges nothing (or as the local cache of envoyproxy/ratelimit does it), and only while this
process is notified immediately of every counter that was refunded. For limits that deny, a repeated result has the
values that the store would return if there had been no other calls meanwhile; for other limits, those of when it was
asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import itemgetter
from random import random
from time import monotonic
from typing import Any

from ratelimit_rls.core.model import (
    Algorithm,
    Charge,
    Penalty,
    Plan,
    PlanTemplate,
    Purpose,
    Reading,
    Step,
    StoreResult,
    construct,
)
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import PreparedPlan, Store
from ratelimit_rls.store.script_codec import CALL_SHADOWED, PlanLayout

MAX_DENIAL_US = 600 * 1_000_000
"""Maximum lifetime of a cached denial. Then the store is asked, and may deny again. This bounds the effect of lost
invalidations."""

_CLOCK_DRIFT_FACTOR = 1 - 500e-6
"""Fraction of a denial's lifetime that is used: a clock that NTP corrects may run this much slower than the store's."""

_EPOCH_BUCKETS = 1024
_SWEEP_SIZE = 2

# Measured with tracemalloc on CPython 3.11: a denial with its entries in the tables, each key of its plan, and
# the set of entries that a key denies, as if the key denied no other entry.
_ENTRY_BYTES = 650
_KEY_BYTES = 180
_DENYING_KEY_BYTES = 330
# Shared by all entries of one layout, including rules and plan template, counted as if nothing else referenced them.
_LAYOUT_BYTES = 1700
_LAYOUT_KEY_BYTES = 700


class _DenialEntry:
    """A cached denial and the moment it ends."""

    __slots__ = ("capacities", "denying_keys", "end_s", "index", "plan", "received_s", "result", "weight_bytes")

    def __init__(self, plan: PreparedPlan, result: StoreResult, received_s: float, end_s: float) -> None:
        self.plan = plan
        self.result = result
        self.received_s = received_s
        self.end_s = end_s
        self.denying_keys = _denying_keys(plan, result)
        self.capacities = tuple(_capacities(plan.layout, result.readings))
        self.weight_bytes = _ENTRY_BYTES + _DENYING_KEY_BYTES * len(self.denying_keys)
        self.weight_bytes += sum(_KEY_BYTES + len(key) for key in plan.keys if isinstance(key, bytes))
        self.index = -1  # in DenialCache._entry_list

    def result_at(self, now_s: float) -> StoreResult:
        """Return the result as of `now_s`.

        The elapsed time is counted from the arrival of the result: the store decided before that, so a client that
        waits as long as it was asked to does not return before the end, which the store knows exactly.
        """
        elapsed_us = int((now_s - self.received_s) * 1e6)
        numbers: list[int] = []
        for (left, retry_us, reset_us), capacity in zip(self.result.readings, self.capacities, strict=True):
            numbers.append(left if retry_us or reset_us > elapsed_us else capacity)
            numbers.append(retry_us - elapsed_us if retry_us > 0 else retry_us)
            numbers.append(reset_us - elapsed_us if reset_us > elapsed_us else 0)
        return construct(StoreResult, (True, self.result.now_us + elapsed_us, tuple(numbers), 0, True, False, ()))


class DenialCache:
    """A store wrapper that caches denials in at most `max_bytes`; when full, it evicts a random entry.

    It is not a `BoundedCache`: it is bounded by bytes, entries are dropped by the counters that deny them, and expired
    ones are swept. Evicting those that end soonest would let day-long denials of clients that never return displace
    those of clients that are calling now.
    """

    is_synchronous = False

    def __init__(
        self,
        store: Store,
        max_bytes: int,
        *,
        skip_over_limit_charges: bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`skip_over_limit_charges`: do not count hits on a fixed window that is over, even under `charge: always`.

        Nothing is cached until `set_subscribed` reports that invalidations arrive. The clock is in seconds.
        """
        self._store = store
        self._max_bytes = max_bytes
        self._skip_over_limit_charges = skip_over_limit_charges
        self._clock = clock
        self._subscribed = False
        self._refunds_possible = False  # by the plans seen so far
        self._entries: dict[PreparedPlan, _DenialEntry] = {}
        self._entry_list: list[_DenialEntry] = []
        self._denied_by: dict[Hashable, set[_DenialEntry]] = {}  # by the key of the denying counter
        self._layouts: dict[PlanLayout[object], int] = {}  # and the number of their entries
        self._size_bytes = 0
        # The result of a request sent before a counter was freed must not be cached afterwards. Each invalidation
        # has a number; `_freed_epochs` has, by the hash of a key, the last one that may have concerned it.
        self._epoch = 0
        self._all_freed_epoch = 0
        self._freed_epochs = [0] * _EPOCH_BUCKETS
        self._hits = 0
        self._invalidated = 0
        self._evicted = 0

    def prepare(self, plan: Plan) -> PreparedPlan:
        if not self._refunds_possible and _may_refund(plan.template):
            self._refunds_possible = True
        return self._store.prepare(plan)

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        self._refunds_possible = True
        return self._store.refund_of(prepared, refund)

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        if self._refunds_possible:
            freed = [key for plan in batch if plan.frees_capacity for key in plan.keys]
            if freed:
                return await self._spend_and_invalidate(batch, freed)
        if self._entries:
            return await self._answer_or_forward(batch)
        return await self._forward(batch)

    async def _spend_and_invalidate(
        self, batch: Sequence[PreparedPlan], freed: list[Hashable]
    ) -> list[StoreResult | StoreError]:
        self._drop_denied_by(freed)  # for later calls of the batch
        try:
            return await self._answer_or_forward(batch)
        finally:
            self.forget(freed)  # even after an error: the refund may have happened

    async def _answer_or_forward(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        now_s = self._clock()
        self._sweep(now_s)
        found = list(map(self._entries.get, batch))
        if not any(found):
            return await self._forward(batch)
        results: list[Any] = []
        unknown = []
        for plan, entry in zip(batch, found, strict=True):
            if entry is not None and now_s < entry.end_s:
                results.append(entry.result_at(now_s))
                continue
            if entry is not None and entry.index >= 0:
                self._drop(entry)
            results.append(None)
            unknown.append(plan)
        self._hits += len(batch) - len(unknown)
        if not unknown:
            return results
        replies = iter(await self._forward(unknown))
        return [next(replies) if result is None else result for result in results]

    async def _forward(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        sent_s, epoch = self._clock(), self._epoch
        results = await self._store.spend(batch)
        if self._subscribed and _any_denied(results):
            for plan, result in zip(batch, results, strict=True):
                if isinstance(result, StoreResult) and result.denied:
                    self._remember(plan, result, sent_s, epoch)
        return results

    def _remember(self, plan: PreparedPlan, result: StoreResult, sent_s: float, epoch: int) -> None:
        """Cache a denial. `epoch` is the number of the last invalidation when the request was sent."""
        lifetime_us = min(self._denial_lifetime_us(plan, result), MAX_DENIAL_US)
        now_s = self._clock()
        # Counted from sending: the store decided later, so the entry expires first.
        end_s = sent_s + lifetime_us * _CLOCK_DRIFT_FACTOR / 1e6
        if end_s <= now_s:
            return
        entry = _DenialEntry(plan, _as_charged_again(plan, result), now_s, end_s)
        if self._all_freed_epoch > epoch or any(
            self._freed_epochs[hash(key) % _EPOCH_BUCKETS] > epoch for key in entry.denying_keys
        ):
            return
        before = self._entries.get(plan)
        if before is not None:
            self._drop(before)
        self._insert(entry)
        while self._size_bytes > self._max_bytes:
            self._drop(self._random_entry())
            self._evicted += 1

    def _denial_lifetime_us(self, plan: PreparedPlan, result: StoreResult) -> int:
        """Return how long the store would repeat this denial and count nothing; 0 if it would not.

        That is until the first of the denying limits stops denying: then the result would differ, and other limits may
        be charged. With a penalty, denials are not violations only during a cooldown.
        """
        layout = plan.layout
        if layout.flags & CALL_SHADOWED or layout.purpose is Purpose.REPORT or not plan.is_unmodified:
            return 0
        readings = iter(result.readings)
        waits_us = []
        for descriptor_plan in layout.descriptor_plans:
            for step in descriptor_plan.steps:
                reading = next(readings)
                if step.quota_mode or not self._charges_nothing(step, reading):
                    return 0
                if not reading.allowed:  # if it can never be admitted, the limit's reset is reported
                    waits_us.append(reading.retry_us if reading.retry_us > 0 else reading.reset_us)
            for watcher in descriptor_plan.watchers:
                reading = next(readings)
                if isinstance(watcher, Penalty):
                    if reading.retry_us <= 0:
                        return 0
                    waits_us.append(reading.retry_us)
        return min((wait_us for wait_us in waits_us if wait_us > 0), default=0)

    def _charges_nothing(self, step: Step, reading: Reading) -> bool:
        """Return True if a denied call charges nothing to this limit."""
        if step.charge is Charge.ADMITTED or step.cost == 0:
            return True
        is_window = step.limit.algorithm is Algorithm.FIXED_WINDOW
        return self._skip_over_limit_charges and is_window and not reading.allowed and reading.left < 0

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Drop the denials by these counters (as in `PreparedPlan.keys`): they were refunded or deleted."""
        self._epoch += 1
        freed = list(keys)
        for key in freed:
            self._freed_epochs[hash(key) % _EPOCH_BUCKETS] = self._epoch
        self._drop_denied_by(freed)

    def forget_all(self) -> None:
        """Drop all denials: the rules have changed, or it is unknown which counters were refunded."""
        self._epoch += 1
        self._all_freed_epoch = self._epoch
        self._invalidated += len(self._entries)
        self._entries.clear()
        self._entry_list.clear()
        self._denied_by.clear()
        self._layouts.clear()
        self._size_bytes = 0

    def set_subscribed(self, up: bool) -> None:
        """Set whether `forget` will be called for every counter freed from now on. If not, nothing is cached."""
        self._subscribed = up
        self.forget_all()

    def gauges(self) -> Iterator[tuple[str, int]]:
        """Yield size and counts. `hits`: calls denied from the cache. If `evictions` grow fast, raise the budget."""
        yield "ratelimit.denial_cache.entries", len(self._entries)
        yield "ratelimit.denial_cache.size", self._size_bytes
        yield "ratelimit.denial_cache.hits", self._hits
        yield "ratelimit.denial_cache.invalidations", self._invalidated
        yield "ratelimit.denial_cache.evictions", self._evicted

    def decode_key(self, key: Hashable) -> bytes:
        return self._store.decode_key(key)

    async def close(self) -> None:
        await self._store.close()

    def _insert(self, entry: _DenialEntry) -> None:
        self._entries[entry.plan] = entry
        entry.index = len(self._entry_list)
        self._entry_list.append(entry)
        for key in entry.denying_keys:
            self._denied_by.setdefault(key, set()).add(entry)
        layout = entry.plan.layout
        users = self._layouts[layout] = self._layouts.get(layout, 0) + 1
        self._size_bytes += entry.weight_bytes + (_layout_bytes(layout) if users == 1 else 0)

    def _drop(self, entry: _DenialEntry) -> None:
        del self._entries[entry.plan]
        last = self._entry_list.pop()
        if last is not entry:
            self._entry_list[entry.index] = last
            last.index = entry.index
        entry.index = -1
        for key in entry.denying_keys:
            denied = self._denied_by[key]
            denied.remove(entry)
            if not denied:
                del self._denied_by[key]
        layout = entry.plan.layout
        users = self._layouts[layout] = self._layouts[layout] - 1
        if not users:
            del self._layouts[layout]
        self._size_bytes -= entry.weight_bytes + (0 if users else _layout_bytes(layout))

    def _drop_denied_by(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            for entry in list(self._denied_by.get(key, ())):
                self._drop(entry)
                self._invalidated += 1

    def _random_entry(self) -> _DenialEntry:
        return self._entry_list[int(random() * len(self._entry_list))]

    def _sweep(self, now_s: float) -> None:
        """Check some random entries, so that expired ones of clients that never returned do not accumulate."""
        for _ in range(_SWEEP_SIZE):
            if self._entry_list:
                entry = self._random_entry()
                if entry.end_s <= now_s:
                    self._drop(entry)


@per_template
def _may_refund(template: PlanTemplate) -> bool:
    """Return True if calls of this template may free capacity, now or later: leased hits may be returned."""
    refunds = any(step.cost < 0 for step in template.steps)
    return refunds or any(one.rule is not None and one.rule.hot is not None for one in template.descriptor_plans)


_first = itemgetter(0)


def _any_denied(results: Sequence[Any]) -> bool:
    """Return False if none is denied. Most batches are like this; this test is several times faster than a loop."""
    try:
        return any(map(_first, results))  # StoreResult.denied
    except TypeError:  # one is a StoreError
        return True


def _denying_keys(plan: PreparedPlan, result: StoreResult) -> tuple[Hashable, ...]:
    """Return the keys of the counters that deny: unless one of them is freed, no change admits the call."""
    pairs = zip(plan.keys, result.readings, strict=True)
    return tuple({key: None for key, reading in pairs if not reading.allowed})


def _as_charged_again(plan: PreparedPlan, result: StoreResult) -> StoreResult:
    """Return what the next call would get: limits that are always charged are over by as much again."""
    steps = [step for one in plan.layout.descriptor_plans for step in (*one.steps, *(None for _ in one.watchers))]
    numbers = list(result.numbers)
    for number, step in enumerate(steps):
        if step is not None and step.charge is Charge.ALWAYS:
            numbers[3 * number] -= step.cost  # what is left
    return result._replace(numbers=tuple(numbers))


def _capacities(layout: PlanLayout[object], readings: Sequence[Reading]) -> Iterator[int]:
    """Yield what is left of each limit after its reset; a watcher has no reset."""
    at = 0
    for descriptor_plan in layout.descriptor_plans:
        for step in descriptor_plan.steps:
            yield step.limit.burst or step.limit.requests_per_unit
            at += 1
        for _ in descriptor_plan.watchers:
            yield readings[at].left
            at += 1


def _layout_bytes(layout: PlanLayout[object]) -> int:
    return _LAYOUT_BYTES + _LAYOUT_KEY_BYTES * len(layout.windows_us)
