"""Store wrapper that takes hits in advance: a rule with `hot` is counted once per lease and process, not per call.

    a call ─► enough hits available for its hot counters ─► only the remainder goes to the store, if there is any
          └─► too few ─► more are requested, for now and until the lease ends ─► the same again
                     └─► still too few, or hardly used ─► the store decides, as it would without leases

Leased hits are spent in the store, so no limit is exceeded: a fixed window never, the others not over the window plus
one lease (docs/adr/0014-leases.md). Hits that are unused when their lease or the process ends are refunded. Hits whose
grant was lost on the way stay spent until they expire, like any hit whose result was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from ratelimit_rls.common.timers import CallLater
from ratelimit_rls.core.call_split import key_ranges, select_descriptors
from ratelimit_rls.core.model import Plan, StoreResult
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.store.base import PreparedPlan, Store
from ratelimit_rls.store.leases.lease import Lease
from ratelimit_rls.store.leases.lease_pool import MAX_LEASES, LeasePool
from ratelimit_rls.store.leases.leased_plan import HotPart, LeasedPlan, Remainder, ServedCall, leased_descriptors


class _LeaseRequest(NamedTuple):
    """A request for more hits."""

    lease: Lease
    hits: int
    done: asyncio.Future[StoreError | None]


class _ForwardedCall(NamedTuple):
    """A call of the batch as it goes to the store: all of it, or the remainder that leases did not serve."""

    number: int
    sent_plan: PreparedPlan
    plan: LeasedPlan | None = None
    served: ServedCall | None = None


class _WaitingCall(NamedTuple):
    """A call that waits for more hits."""

    number: int
    plan: LeasedPlan
    bits: int  # of the hot parts to be served from leases


class LeasingStore:
    """A store wrapper that serves hot counters from leases."""

    is_synchronous = False

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = monotonic,
        call_later: CallLater | None = None,
        max_leases: int = MAX_LEASES,
    ) -> None:
        """The clock is in seconds and monotonic; `call_later` defaults to that of the running loop."""
        self._store = store
        self._clock = clock
        self._pool = LeasePool(store, self._now_us, call_later, max_leases)
        self._batch_number = 0
        self._admitted_total = self._requested_total = 0

    def _now_us(self) -> int:
        return int(self._clock() * 1e6)

    def gauges(self) -> Iterator[tuple[str, int]]:
        """Yield counts. `served_total`: hot descriptors served from leases. `asked_total`: requests for more hits."""
        yield from self._pool.gauges()
        yield "ratelimit.leases.admitted_calls", self._admitted_total
        yield "ratelimit.leases.requests", self._requested_total

    # -- plans ---------------------------------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> PreparedPlan:
        whole = self._store.prepare(plan)
        leased = leased_descriptors(plan.template)
        if not leased:
            return whole
        ranges = key_ranges(plan.template.descriptor_plans)
        hot = tuple(self._hot_part(plan, whole, number, ranges[number], 1 << at) for at, number in enumerate(leased))
        if len({part.lease for part in hot}) < len(hot):
            return whole  # the same counter twice: only the store knows what is left for the second
        return LeasedPlan(whole, hot, partial(self._remainder, plan, leased))

    def _hot_part(self, plan: Plan, whole: PreparedPlan, number: int, numbers: range, bit: int) -> HotPart:
        descriptor_plan = plan.template.descriptor_plans[number]
        assert descriptor_plan.rule is not None
        assert descriptor_plan.rule.hot is not None
        lease_us = descriptor_plan.rule.hot.lease_us
        keys = plan.keys[numbers.start : numbers.stop]
        limits = tuple(step.limit for step in descriptor_plan.steps)

        def make() -> Lease:
            is_all = len(keys) == len(plan.keys)
            own = whole if is_all else self._store.prepare(Plan(select_descriptors(plan.template, (number,)), keys))
            return Lease(own, limits, lease_us)

        # When rules change, leases under other limits expire by themselves, and no call is served from them.
        lease = self._pool.get_or_create((keys, limits, lease_us), make)
        return HotPart(lease, descriptor_plan.steps[0].cost, numbers, bit)

    def _remainder(self, plan: Plan, leased: Sequence[int], served: int) -> Remainder | None:
        """Return the plan without those of the leased descriptors whose bits are set."""
        descriptor_plans = plan.template.descriptor_plans
        without = {number for at, number in enumerate(leased) if served >> at & 1}
        left = tuple(number for number, one in enumerate(descriptor_plans) if one.steps and number not in without)
        if not left:
            return None
        ranges = key_ranges(descriptor_plans)
        numbers = tuple(number for index in left for number in ranges[index])
        keys = tuple(plan.keys[number] for number in numbers)
        return Remainder(self._store.prepare(Plan(select_descriptors(plan.template, left), keys)), numbers)

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        """Return a refund to the store, also for leased hits: their lease may have expired by then."""
        return self._store.refund_of(prepared.whole if isinstance(prepared, LeasedPlan) else prepared, refund)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        if LeasedPlan not in map(type, batch):
            return await self._store.spend(batch)
        self._batch_number += 1
        now_us = self._now_us()
        results: list[Any] = [None] * len(batch)
        sent: list[_ForwardedCall] = []
        short: list[_WaitingCall] = []
        wanted: dict[Lease, int] = {}
        for number, plan in enumerate(batch):
            if not isinstance(plan, LeasedPlan):
                sent.append(_ForwardedCall(number, plan))
                continue
            bits, short_parts = self._classify(plan, now_us)
            if short_parts:
                short.append(_WaitingCall(number, plan, bits))
                for lease, hits, *_ in short_parts:
                    wanted[lease] = wanted.get(lease, 0) + hits
            elif bits:
                self._serve(number, plan, bits, now_us, sent, results)
            else:
                self._deny_or_forward(number, plan, now_us, sent, results)
        if wanted:
            left = await self._request_leases(short, wanted, sent, results, now_us)
            if left:
                await self._send_batch([], left, results)
        elif sent:
            await self._send_batch([], sent, results)
        return results

    def _classify(self, plan: LeasedPlan, now_us: int) -> tuple[int, list[HotPart]]:
        """Return the hot parts to be served from leases, as bits, and those of them with too few hits."""
        bits, short_parts = 0, []
        for part in plan.hot:
            lease, hits, _, bit = part
            lease.demand.add(hits, self._batch_number, now_us)
            self._pool.touch(lease, now_us)
            if lease.available >= hits:
                bits |= bit
            elif lease.should_request(now_us):
                bits |= bit
                short_parts.append(part)
        return bits, short_parts

    def _serve(
        self, number: int, plan: LeasedPlan, bits: int, now_us: int, sent: list[_ForwardedCall], results: list[Any]
    ) -> None:
        """Take the hits of these hot parts, and forward the remainder to the store."""
        served = plan.serve(bits, now_us)
        self._admitted_total += len(served.taken)
        if served.remainder is None:
            results[number] = served.result(None)
        else:
            sent.append(_ForwardedCall(number, served.remainder.plan, plan, served))

    def _deny_or_forward(
        self, number: int, plan: LeasedPlan, now_us: int, sent: list[_ForwardedCall], results: list[Any]
    ) -> None:
        """Forward a call to the store, unless it has just reported that there is nothing left."""
        denial = plan.local_denial(now_us)
        if denial is not None:
            results[number] = denial
        else:
            sent.append(_ForwardedCall(number, plan.whole, plan))

    async def _request_leases(
        self,
        short: list[_WaitingCall],
        wanted: dict[Lease, int],
        sent: list[_ForwardedCall],
        results: list[Any],
        now_us: int,
    ) -> list[_ForwardedCall]:
        """Request hits, one request per counter at a time; other calls wait for it. Return the calls still to send."""
        waits = {lease.pending_request: lease for lease in wanted if lease.pending_request is not None}
        requests = [
            self._new_request(lease, hits, now_us) for lease, hits in wanted.items() if lease.pending_request is None
        ]
        if requests or sent:
            await self._send_batch(requests, sent, results)
        if waits:
            await asyncio.wait(waits)  # which does not cancel them if this batch is cancelled
            now_us = self._now_us()
            for lease in wanted:
                self._pool.touch(lease, now_us)
        # Without a wait, the time is still that of the calls' arrival. Hits granted for them are used even if the
        # result took longer than the lease: they were counted when the store decided, like any call.
        failed = {lease: error for done, lease in waits.items() if (error := done.result())}
        failed |= {lease: error for lease, _, done in requests if (error := done.result())}
        left: list[_ForwardedCall] = []
        for number, plan, bits in short:
            short_parts = plan.short_leases(bits)
            errors = [failed[lease] for lease in short_parts if lease in failed]
            if not short_parts:
                self._serve(number, plan, bits, now_us, left, results)
            elif errors:
                results[number] = errors[0]
            else:
                for lease in short_parts:  # too little for this call may be enough for another elsewhere
                    self._pool.queue_refunds(lease.release())
                self._deny_or_forward(number, plan, now_us, left, results)
        return left

    def _new_request(self, lease: Lease, hits: int, now_us: int) -> _LeaseRequest:
        lease.pending_request = asyncio.get_running_loop().create_future()
        self._requested_total += 1
        return _LeaseRequest(lease, lease.request_size(hits, now_us), lease.pending_request)

    async def _send_batch(
        self, requests: Sequence[_LeaseRequest], sent: Sequence[_ForwardedCall], results: list[Any]
    ) -> None:
        """Send lease requests and calls to the store in one batch, together with some pending refunds."""
        refunds = self._pool.take_refunds()
        more = [lease.plan.take_up_to(hits) for lease, hits, _ in requests]
        outcome: list[StoreResult | StoreError] = []
        sent_us = self._now_us()
        try:
            outcome = await self._store.spend([*refunds, *more, *(one.sent_plan for one in sent)])
        finally:  # complete every request, whatever happened
            now_us = self._now_us()
            granted = outcome[len(refunds) : len(refunds) + len(requests)] or [_abandoned()] * len(requests)
            for (lease, hits, done), result in zip(requests, granted, strict=True):
                lease.pending_request = None
                if isinstance(result, StoreResult):
                    self._pool.touch(lease, now_us)  # so that all its hits are of the window of this result
                    lease.add(result, hits, sent_us, now_us)
                    self._pool.track(lease)
                done.set_result(result if isinstance(result, StoreError) else None)
        self._pool.record_refunds(outcome[: len(refunds)])
        for call, result in zip(sent, outcome[len(refunds) + len(requests) :], strict=True):
            results[call.number] = self._finish(call, result, now_us)

    def _finish(self, call: _ForwardedCall, result: StoreResult | StoreError, now_us: int) -> StoreResult | StoreError:
        if call.plan is None or isinstance(result, StoreError):
            return result  # leased hits stay spent: the fallback decides whether such a call passes
        served = call.served
        outcome = served.result(result) if served is not None else result
        if result.denied:
            if served is not None:
                self._admitted_total -= len(served.taken)
                for part, _ in served.taken:
                    self._pool.track(part.lease)
            if not result.remembered:
                for lease, readings in call.plan.denied_leases(served.bits if served else 0, outcome.readings):
                    lease.note_shortage(readings, now_us)
        return outcome

    def decode_key(self, key: Hashable) -> bytes:
        return self._store.decode_key(key)

    async def close(self) -> None:
        """Refund all leased hits, then close the store."""
        await self._pool.close()
        await self._store.close()


def _abandoned() -> StoreError:
    return StoreUnavailable("the request for a lease was cancelled")
