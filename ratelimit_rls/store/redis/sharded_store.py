"""Store on several Redis servers: a cluster, a second Redis for per-second limits, or both.

    plan ─► one part per slot of its descriptors ─► the parts of a batch by slot, in parallel ─► results

Each descriptor is decided in one step, with all of its limits, since they share a slot. A call over several slots is
charged on all of them, and refunded if any denies, before the caller gets its response. Guarantee: no limit is ever
exceeded. Without failures the charge of a denied call is visible to others for one more round trip; with failures it
may stay until it expires. `shard_by: domain` in the rules puts a whole domain on one slot, so that each of its calls is
decided in one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import structlog

from ratelimit_rls.core.call_split import is_denied, key_ranges, select_descriptors
from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Charge, DescriptorPlan, Plan, PlanTemplate, Reading, StoreResult, Unit
from ratelimit_rls.core.refund import Refund, refund
from ratelimit_rls.core.storage_keys import Location
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.redis.deployment import Deployment, ShardRun
from ratelimit_rls.store.redis.keyspace import RedisKeyspace
from ratelimit_rls.store.redis.resp import bulk, bulk_value
from ratelimit_rls.store.redis.store import decode_results, layout
from ratelimit_rls.store.script_codec import CALL_QUOTA_PASSES, CALL_SHADOWED, EncodedPlan, PlanLayout, split_runs

_log = structlog.get_logger()

MAIN = 0
PER_SECOND = 1

_PART_BYTES = 350  # measured with tracemalloc on CPython 3.11

_UNKNOWN = Reading(0, 0, 0)
"""Placeholder for a limit that has not been decided yet."""


class Shard(NamedTuple):
    """A set of counters that can be decided in one step."""

    realm: int
    shard: int


class ShardPart(NamedTuple):
    """The part of a plan that is decided on one shard."""

    shard_id: Shard
    numbers: tuple[int, ...]  # indexes of its keys in the plan
    template: PlanTemplate
    plan: EncodedPlan[bytes]
    decided_last: bool = False  # a refund, which cannot be undone, so the other parts are decided first


class ShardedPlan(NamedTuple):
    keys: tuple[bytes, ...]
    layout: PlanLayout[bytes]  # of the whole plan
    parts: tuple[ShardPart, ...]

    @property
    def frees_capacity(self) -> bool:
        return any(part.plan.frees_capacity for part in self.parts)

    @property
    def is_unmodified(self) -> bool:
        return all(part.plan.is_unmodified for part in self.parts)

    @property
    def own_bytes(self) -> int:
        return _PART_BYTES * len(self.parts)

    def with_max_wait(self, max_wait_us: int) -> ShardedPlan:
        return self._with(part.plan.with_max_wait(max_wait_us) for part in self.parts)

    def idempotent(self, request_id: bytes) -> ShardedPlan:
        """Use one idempotency key per shard, distinct from those of other calls over the same shard."""
        return self._with(part.plan.idempotent(request_id, self.keys) for part in self.parts)

    def take_up_to(self, hits: int) -> ShardedPlan:
        return self._with(part.plan.take_up_to(hits) for part in self.parts)

    def refund(self, hits: int, charged_at_us: int) -> ShardedPlan:
        return self._with(part.plan.refund(hits, charged_at_us) for part in self.parts)

    def _with(self, plans: Iterable[EncodedPlan[bytes]]) -> ShardedPlan:
        parts = tuple(part._replace(plan=plan) for part, plan in zip(self.parts, plans, strict=True))
        return self._replace(parts=parts)


class ShardedStore(RedisKeyspace):
    def __init__(self, main: Deployment, per_second: Deployment | None = None) -> None:
        super().__init__(main, *([per_second] if per_second else []))

    def prepare(self, plan: Plan) -> ShardedPlan:
        descriptor_plans = plan.template.descriptor_plans
        ranges = key_ranges(descriptor_plans)
        shards = {
            number: self._shard_of(descriptor_plan, plan.keys[ranges[number].start])
            for number, descriptor_plan in enumerate(descriptor_plans)
            if descriptor_plan.steps
        }
        keys = tuple(map(bulk, plan.keys))
        whole = layout(plan.template)
        if len(set(shards.values())) == 1:
            only = ShardPart(shards.popitem()[1], tuple(range(len(keys))), plan.template, EncodedPlan(keys, whole))
            return ShardedPlan(keys, whole, (only,))
        groups: dict[tuple[Shard, bool], list[int]] = {}
        for number, shard in shards.items():
            groups.setdefault((shard, _refunds_if_admitted(descriptor_plans[number])), []).append(number)
        parts = []
        for (shard, comes_last), members in groups.items():
            numbers = tuple(number for member in members for number in ranges[member])
            template = select_descriptors(plan.template, tuple(members))
            own = EncodedPlan(tuple(keys[number] for number in numbers), layout(template))
            parts.append(ShardPart(shard, numbers, template, own, comes_last))
        return ShardedPlan(keys, whole, tuple(parts))

    def locations(self, plan: Plan) -> list[Location]:
        """Return the place of each counter of a plan."""
        realms = {number: part.shard_id.realm for part in self.prepare(plan).parts for number in part.numbers}
        return [self.realms[realms[number]].location(key) for number, key in enumerate(plan.keys)]

    def _shard_of(self, descriptor_plan: DescriptorPlan, key: bytes) -> Shard:
        """Return the shard of a descriptor. Only one with per-second limits alone goes to the second Redis, since all
        limits of a descriptor share a shard."""
        realm = MAIN
        if len(self.realms) > 1 and all(step.limit.unit is Unit.SECOND for step in descriptor_plan.steps):
            realm = PER_SECOND
        return Shard(realm, self.realms[realm].shard(key))

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        """Split the refund like `prepared`: each of the refund's descriptors has one key."""
        whole = cast("ShardedPlan", prepared)
        keys = tuple(whole.keys[number] for number in refund.numbers)
        parts = []
        for shard, numbers, _, charged, _ in whole.parts:
            own = tuple(at for at, number in enumerate(refund.numbers) if number in numbers)
            if own:
                template = select_descriptors(refund.template, own)
                charged_at_us = min(refund.charged_at_us[at] for at in own)
                plan = EncodedPlan(
                    tuple(keys[at] for at in own),
                    layout(template),
                    charged_at_us=charged_at_us,
                    idempotency_key=charged.idempotency_key,
                )
                parts.append(ShardPart(shard, own, template, plan))
        return ShardedPlan(keys, layout(refund.template), tuple(parts))

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        plans = cast("Sequence[ShardedPlan]", batch)
        results = await self._spend_parts([part for plan in plans for part in plan.parts if not part.decided_last])
        if len(results) < sum(len(plan.parts) for plan in plans):
            results = await self._decide_last(plans, results)
        answered = iter(results)
        merged = [_merge(plan, [next(answered) for _ in plan.parts]) for plan in plans]
        await self._refund_denied([refunds for _, call_refunds in merged for refunds in call_refunds])
        return [result for result, _ in merged]

    async def _decide_last(
        self, plans: Sequence[ShardedPlan], results: Sequence[StoreResult | StoreError]
    ) -> list[StoreResult | StoreError]:
        """Decide the parts that come last: refund if the call passes, otherwise only look."""
        earlier = iter(results)
        merged: list[Any] = []
        last: list[ShardPart] = []
        for plan in plans:
            own = [None if part.decided_last else next(earlier) for part in plan.parts]
            passes = _passes_so_far(plan, own)
            last += [
                part if passes else part._replace(plan=part.plan.take_up_to(0)._replace(idempotency_key=None))
                for part in plan.parts
                if part.decided_last
            ]
            merged += own
        later = iter(await self._spend_parts(last))
        return [next(later) if result is None else result for result in merged]

    async def _refund_denied(self, refunds: Sequence[ShardPart]) -> None:
        if not refunds:
            return
        for part, result in zip(refunds, await self._spend_parts(refunds), strict=True):
            if isinstance(result, StoreError):
                key = bulk_value(part.plan.keys[0])
                _log.warning("denied_call_refund_failed", key=key.decode(errors="replace"), error=str(result))

    async def _spend_parts(self, parts: Sequence[ShardPart]) -> list[StoreResult | StoreError]:
        """Return the result of each part, in order; all shards are asked in parallel."""
        by_shard: dict[Shard, list[int]] = {}
        for number, part in enumerate(parts):
            by_shard.setdefault(part.shard_id, []).append(number)
        work: list[list[ShardRun]] = [[] for _ in self.realms]
        numbers: list[list[int]] = [[] for _ in self.realms]
        for (realm, shard), members in by_shard.items():
            for run in split_runs([parts[number].plan for number in members]):
                work[realm].append(ShardRun(shard, run))
            numbers[realm] += members
        replies = await asyncio.gather(
            *(deployment.run_script(own) for deployment, own in zip(self.realms, work, strict=True) if own)
        )
        merged: list[Any] = [None] * len(parts)
        replied = iter(replies)
        for realm_work, realm_numbers in zip(work, numbers, strict=True):
            if realm_work:
                flat = [
                    result
                    for (_, run), reply in zip(realm_work, next(replied), strict=True)
                    for result in decode_results(run, reply)
                ]
                for number, result in zip(realm_numbers, flat, strict=True):
                    merged[number] = result
        self.publish_freed([part.plan for part in parts])
        return merged


def _refunds_if_admitted(descriptor_plan: DescriptorPlan) -> bool:
    """Return True for a refund that depends on the verdict. Under `always` it does not."""
    return descriptor_plan.steps[0].cost < 0 and descriptor_plan.steps[0].charge is Charge.ADMITTED


def _passes_so_far(plan: ShardedPlan, results: Sequence[StoreResult | StoreError | None]) -> bool:
    """Return True if no result so far denies the call; a refund never denies one."""
    readings = [_UNKNOWN] * len(plan.keys)
    for part, result in zip(plan.parts, results, strict=True):
        if isinstance(result, StoreError):
            return False
        if result is not None:
            for number, reading in zip(part.numbers, result.readings, strict=True):
                readings[number] = reading
    return bool(plan.layout.flags & CALL_SHADOWED) or not _is_denied(plan, readings)


def _is_denied(plan: ShardedPlan, readings: Sequence[Reading]) -> bool:
    return is_denied(plan.layout.descriptor_plans, readings, bool(plan.layout.flags & CALL_QUOTA_PASSES))


def _merge(
    plan: ShardedPlan, results: list[StoreResult | StoreError]
) -> tuple[StoreResult | StoreError, Sequence[ShardPart]]:
    """Return one verdict over all parts, and refunds of parts that were charged although another part denied."""
    if len(results) == 1:
        return results[0], ()
    merged: list[StoreResult] = []
    for result in results:
        if isinstance(result, StoreError):
            return result, ()  # charges on other shards stay: it is unknown whether to refund them
        merged.append(result)
    readings = [_UNKNOWN] * len(plan.keys)
    decided_at_us = [0] * len(plan.keys)
    for part, result in zip(plan.parts, merged, strict=True):
        for number, reading in zip(part.numbers, result.readings, strict=True):
            readings[number] = reading
            decided_at_us[number] = result.now_us
    denied = _is_denied(plan, readings)
    refunds: list[ShardPart] = []
    if denied and not plan.layout.flags & CALL_SHADOWED:
        for part, result in zip(plan.parts, merged, strict=True):
            if not result.denied and part.plan.charged_at_us is None:
                refunds += _charges_to_refund(part, result, readings)
    replayed = all(result.replayed for result in merged)
    now_us = max(decided_at_us)
    result = StoreResult.of(denied, now_us, readings, replayed=replayed, decided_at_us=tuple(decided_at_us))
    return result, refunds


def _charges_to_refund(part: ShardPart, result: StoreResult, readings: list[Reading]) -> Iterator[ShardPart]:
    """Yield the refund of a part, if it was charged, and update the limit states accordingly."""
    refunds = refund(decision_of(part.template, result))
    if refunds is None:
        return
    for number, step in zip(refunds.numbers, refunds.template.steps, strict=True):
        reading = readings[part.numbers[number]]
        readings[part.numbers[number]] = reading._replace(left=reading.left - step.cost, retry_us=0)
    if result.replayed:
        return  # a retry: the call that was charged refunds it
    keys = tuple(part.plan.keys[number] for number in refunds.numbers)
    # The refund deletes the idempotency record: if another shard has lost its own, a retry must be charged here again.
    plan = EncodedPlan(
        keys, layout(refunds.template), charged_at_us=result.now_us, idempotency_key=part.plan.idempotency_key
    )
    yield ShardPart(part.shard_id, refunds.numbers, refunds.template, plan)
