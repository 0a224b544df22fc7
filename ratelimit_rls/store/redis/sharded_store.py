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
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import structlog

from ratelimit_rls.core.call_split import is_denied, key_ranges, select_descriptors
from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Charge, DescriptorPlan, Plan, PlanTemplate, Reading, StoreResult, Unit, construct
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.core.refund import Refund, refund
from ratelimit_rls.core.storage_keys import SLOTS, Location
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.redis.deployment import Deployment
from ratelimit_rls.store.redis.keyspace import RedisKeyspace
from ratelimit_rls.store.redis.resp import bulk, bulk_value
from ratelimit_rls.store.redis.store import layout
from ratelimit_rls.store.script_codec import (
    CALL_QUOTA_PASSES,
    CALL_SHADOWED,
    EncodedPlan,
    PartResult,
    Passed,
    PlanLayout,
)

_log = structlog.get_logger()

_PART_BYTES = 220  # measured with tracemalloc on CPython 3.11

_UNKNOWN = Reading(0, 0, 0)
"""Placeholder for a limit that has not been decided yet."""

Shard = int
"""A set of counters that can be decided in one step: a shard of the main Redis, or SLOTS + one of the second Redis."""

PlacedPlan = tuple[EncodedPlan[bytes], Shard]
"""A part of a plan, and where it is decided."""


class Part(NamedTuple):
    """A part of a plan, as far as it is the same for all calls with the same descriptors in it."""

    numbers: tuple[int, ...]  # indexes of its keys in the plan
    template: PlanTemplate
    layout: PlanLayout[bytes]
    decided_last: bool = False  # a refund, which cannot be undone, so the other parts are decided first


class Split(NamedTuple):
    """The parts of a plan, shared by all calls that are split alike."""

    parts: tuple[Part, ...]
    has_last: bool  # some part is decided last
    passes_with_its_parts: bool  # the call passes if all parts do, and the keys of its parts are in its own order


class ShardedPlan(NamedTuple):
    keys: tuple[bytes, ...]
    layout: PlanLayout[bytes]  # of the whole plan
    plans: tuple[EncodedPlan[bytes], ...]  # of each part
    shards: tuple[Shard, ...]  # of each part
    split: Split

    @property
    def frees_capacity(self) -> bool:
        return any(plan.frees_capacity for plan in self.plans)

    @property
    def is_unmodified(self) -> bool:
        return all(plan.is_unmodified for plan in self.plans)

    @property
    def own_bytes(self) -> int:
        return _PART_BYTES * len(self.plans)

    def with_max_wait(self, max_wait_us: int) -> ShardedPlan:
        return self._replace(plans=tuple(plan.with_max_wait(max_wait_us) for plan in self.plans))

    def idempotent(self, request_id: bytes) -> ShardedPlan:
        """Use one idempotency key per shard, distinct from those of other calls over the same shard."""
        return self._replace(plans=tuple(plan.idempotent(request_id, self.keys) for plan in self.plans))

    def take_up_to(self, hits: int) -> ShardedPlan:
        return self._replace(plans=tuple(plan.take_up_to(hits) for plan in self.plans))

    def refund(self, hits: int, charged_at_us: int) -> ShardedPlan:
        return self._replace(plans=tuple(plan.refund(hits, charged_at_us) for plan in self.plans))


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
        is_one_part = len(set(shards.values())) == 1
        groups: dict[tuple[Shard, bool], list[int]] = {}
        for number, shard in shards.items():
            comes_last = not is_one_part and _refunds_if_admitted(descriptor_plans[number])
            groups.setdefault((shard, comes_last), []).append(number)
        split = _split(plan.template, tuple((tuple(members), last) for (_, last), members in groups.items()))
        keys = tuple(map(bulk, plan.keys))
        plans = [EncodedPlan(tuple([keys[number] for number in part.numbers]), part.layout) for part in split.parts]
        return ShardedPlan(keys, layout(plan.template), tuple(plans), tuple([shard for shard, _ in groups]), split)

    def locations(self, plan: Plan) -> list[Location]:
        """Return the place of each counter of a plan."""
        prepared = self.prepare(plan)
        realms = {
            number: shard // SLOTS
            for shard, part in zip(prepared.shards, prepared.split.parts, strict=True)
            for number in part.numbers
        }
        return [self.realms[realms[number]].location(key) for number, key in enumerate(plan.keys)]

    def _shard_of(self, descriptor_plan: DescriptorPlan, key: bytes) -> Shard:
        """Return the shard of a descriptor. Only one with per-second limits alone goes to the second Redis, since all
        limits of a descriptor share a shard."""
        realm = 0
        if len(self.realms) > 1 and all(step.limit.unit is Unit.SECOND for step in descriptor_plan.steps):
            realm = 1
        return realm * SLOTS + self.realms[realm].shard(key)

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        """Split the refund like `prepared`: each of the refund's descriptors has one key."""
        whole = cast("ShardedPlan", prepared)
        keys = tuple(whole.keys[number] for number in refund.numbers)
        groups, plans, shards = [], [], []
        for charged, shard, part in zip(whole.plans, whole.shards, whole.split.parts, strict=True):
            own = tuple(at for at, number in enumerate(refund.numbers) if number in part.numbers)
            if own:
                groups.append((own, False))
                shards.append(shard)
                plan = EncodedPlan(
                    tuple(keys[at] for at in own),
                    layout(select_descriptors(refund.template, own)),
                    charged_at_us=min(refund.charged_at_us[at] for at in own),
                    idempotency_key=charged.idempotency_key,
                )
                plans.append(plan)
        split = _split(refund.template, tuple(groups))
        return ShardedPlan(keys, layout(refund.template), tuple(plans), tuple(shards), split)

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        calls = cast("Sequence[ShardedPlan]", batch)
        results: Sequence[PartResult]
        if any(call.split.has_last for call in calls):
            results = await self._spend_in_two_steps(calls)
        else:
            plans = [plan for call in calls for plan in call.plans]
            results = await self._spend_parts(plans, [shard for call in calls for shard in call.shards])
        merged: list[StoreResult | StoreError] = []
        refunds: list[PlacedPlan] = []
        end = 0
        for call in calls:
            start, end = end, end + len(call.plans)
            if end == start + 1:
                merged.append(in_full(results[start]))
                continue
            own = results[start:end]
            passing = merge_passing(own) if call.split.passes_with_its_parts else None
            if passing is not None:
                merged.append(passing)
                continue
            result, own_refunds = merge(call, [in_full(one) for one in own])
            merged.append(result)
            refunds += own_refunds
        await self._refund_denied(refunds)
        return merged

    async def _spend_in_two_steps(self, calls: Sequence[ShardedPlan]) -> list[StoreResult | StoreError]:
        """Decide the parts that come last after all others: refund if the call passes, otherwise only look."""
        earlier = iter(await self._spend_placed([one for call in calls for one in _placed(call, last=False)]))
        results: list[Any] = []
        last: list[PlacedPlan] = []
        for call in calls:
            own = [None if part.decided_last else next(earlier) for part in call.split.parts]
            passes = _passes_so_far(call, own)
            last += [(plan if passes else _look(plan), shard) for plan, shard in _placed(call, last=True)]
            results += own
        later = iter(await self._spend_placed(last))
        return [next(later) if result is None else result for result in results]

    async def _refund_denied(self, refunds: Sequence[PlacedPlan]) -> None:
        if not refunds:
            return
        for (plan, _), result in zip(refunds, await self._spend_placed(refunds), strict=True):
            if isinstance(result, StoreError):
                key = bulk_value(plan.keys[0])
                _log.warning("denied_call_refund_failed", key=key.decode(errors="replace"), error=str(result))

    async def _spend_placed(self, placed: Sequence[PlacedPlan]) -> list[StoreResult | StoreError]:
        results = await self._spend_parts([plan for plan, _ in placed], [shard for _, shard in placed])
        return [in_full(result) for result in results]

    async def _spend_parts(self, plans: Sequence[EncodedPlan[bytes]], shards: Sequence[Shard]) -> Sequence[PartResult]:
        """Return the result of each part, in order; all servers are asked in parallel."""
        if len(self.realms) == 1:
            results = await self.realms[0].spend(plans, shards)
        else:
            results = await self._spend_in_both(plans, shards)
        self.publish_freed(plans)
        return results

    async def _spend_in_both(
        self, plans: Sequence[EncodedPlan[bytes]], shards: Sequence[Shard]
    ) -> Sequence[PartResult]:
        numbers: list[list[int]] = [[] for _ in self.realms]
        for number, shard in enumerate(shards):
            numbers[shard // SLOTS].append(number)
        spent = [
            realm.spend([plans[number] for number in own], [shards[number] % SLOTS for number in own])
            for realm, own in zip(self.realms, numbers, strict=True)
            if own
        ]
        results = dict(zip(chain(*numbers), chain(*await asyncio.gather(*spent)), strict=True))
        return [results[number] for number in range(len(plans))]


@per_template
def _splits(_: PlanTemplate) -> dict[tuple[tuple[tuple[int, ...], bool], ...], Split]:
    return {}


def _split(template: PlanTemplate, groups: tuple[tuple[tuple[int, ...], bool], ...]) -> Split:
    """Return the split of a template into parts: of each, the indexes of its descriptors and whether it is decided
    last. The result is cached."""
    splits = _splits(template)
    split = splits.get(groups)
    if split is None:
        parts = tuple([_part(template, members, last) for members, last in groups])
        in_order = all(number == at for at, number in enumerate(chain(*[part.numbers for part in parts])))
        split = splits[groups] = Split(
            parts, any(last for _, last in groups), in_order and _passes_if_parts_pass(template)
        )
    return split


def _part(template: PlanTemplate, members: tuple[int, ...], decided_last: bool) -> Part:
    ranges = key_ranges(template.descriptor_plans)
    numbers = tuple(number for member in members for number in ranges[member])
    own = template if len(numbers) == ranges[-1].stop else select_descriptors(template, members)
    return Part(numbers, own, layout(own), decided_last)


def _passes_if_parts_pass(template: PlanTemplate) -> bool:
    """Return False for calls with quotas or watchers: their verdict is more than that of the parts."""
    has_watchers = any(one.watchers for one in template.descriptor_plans)
    return not (template.quota_passes or has_watchers or any(step.quota_mode for step in template.steps))


def _placed(call: ShardedPlan, *, last: bool) -> list[PlacedPlan]:
    """Return the parts of a call that are decided last, or the others."""
    placed = zip(call.plans, call.shards, call.split.parts, strict=True)
    return [(plan, shard) for plan, shard, part in placed if part.decided_last is last]


def _look(plan: EncodedPlan[bytes]) -> EncodedPlan[bytes]:
    """Return a plan that charges nothing and reads what this one would charge."""
    return plan.take_up_to(0)._replace(idempotency_key=None)


def _refunds_if_admitted(descriptor_plan: DescriptorPlan) -> bool:
    """Return True for a refund that depends on the verdict. Under `always` it does not."""
    return descriptor_plan.steps[0].cost < 0 and descriptor_plan.steps[0].charge is Charge.ADMITTED


def _passes_so_far(call: ShardedPlan, results: Sequence[StoreResult | StoreError | None]) -> bool:
    """Return True if no result so far denies the call; a refund never denies one."""
    readings = [_UNKNOWN] * len(call.keys)
    for part, result in zip(call.split.parts, results, strict=True):
        if isinstance(result, StoreError):
            return False
        if result is not None:
            for number, reading in zip(part.numbers, result.readings, strict=True):
                readings[number] = reading
    return bool(call.layout.flags & CALL_SHADOWED) or not _is_denied(call, readings)


def _is_denied(call: ShardedPlan, readings: Sequence[Reading]) -> bool:
    return is_denied(call.layout.descriptor_plans, readings, bool(call.layout.flags & CALL_QUOTA_PASSES))


def in_full(result: PartResult) -> StoreResult | StoreError:
    """Return the result of a part of a call as that of a call."""
    if result.__class__ is tuple:
        now_us, numbers = cast("Passed", result)
        return construct(StoreResult, (False, now_us, numbers, 0, False, False, ()))
    return cast("StoreResult | StoreError", result)


def merge_passing(results: Sequence[PartResult]) -> StoreResult | None:
    """Return the result of a call of which every part passes, which nearly every call does; None for any other."""
    numbers: tuple[int, ...] = ()
    decided_at_us: tuple[int, ...] = ()
    for result in results:
        if result.__class__ is tuple:
            now_us, own = cast("Passed", result)
        elif isinstance(result, StoreResult) and not (result.denied or result.replayed):
            now_us, own = result.now_us, result.numbers
        else:
            return None
        numbers += own
        decided_at_us += (now_us,) * (len(own) // 3)
    return construct(StoreResult, (False, max(decided_at_us), numbers, 0, False, False, decided_at_us))


def merge(
    call: ShardedPlan, results: Sequence[StoreResult | StoreError]
) -> tuple[StoreResult | StoreError, Sequence[PlacedPlan]]:
    """Return one verdict over all parts, and refunds of parts that were charged although another part denied."""
    merged: list[StoreResult] = []
    for result in results:
        if isinstance(result, StoreError):
            return result, ()  # charges on other shards stay: it is unknown whether to refund them
        merged.append(result)
    readings = [_UNKNOWN] * len(call.keys)
    decided_at_us = [0] * len(call.keys)
    for part, result in zip(call.split.parts, merged, strict=True):
        for number, reading in zip(part.numbers, result.readings, strict=True):
            readings[number] = reading
            decided_at_us[number] = result.now_us
    denied = _is_denied(call, readings)
    refunds: list[PlacedPlan] = []
    if denied and not call.layout.flags & CALL_SHADOWED:
        for plan, shard, part, result in zip(call.plans, call.shards, call.split.parts, merged, strict=True):
            if not result.denied and plan.charged_at_us is None:
                refunds += [(one, shard) for one in _charges_to_refund(plan, part, result, readings)]
    replayed = all(result.replayed for result in merged)
    now_us = max(decided_at_us)
    result = StoreResult.of(denied, now_us, readings, replayed=replayed, decided_at_us=tuple(decided_at_us))
    return result, refunds


def _charges_to_refund(
    plan: EncodedPlan[bytes], part: Part, result: StoreResult, readings: list[Reading]
) -> Iterator[EncodedPlan[bytes]]:
    """Yield the refund of a part, if it was charged, and update the limit states accordingly."""
    refunds = refund(decision_of(part.template, result))
    if refunds is None:
        return
    for number, step in zip(refunds.numbers, refunds.template.steps, strict=True):
        reading = readings[part.numbers[number]]
        readings[part.numbers[number]] = reading._replace(left=reading.left - step.cost, retry_us=0)
    if result.replayed:
        return  # a retry: the call that was charged refunds it
    keys = tuple(plan.keys[number] for number in refunds.numbers)
    # The refund deletes the idempotency record: if another shard has lost its own, a retry must be charged here again.
    yield EncodedPlan(keys, layout(refunds.template), charged_at_us=result.now_us, idempotency_key=plan.idempotency_key)
