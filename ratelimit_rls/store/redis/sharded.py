"""The store on several Redis servers: a cluster, a second Redis for limits per second, or both.

    plan ─► one part for each slot that its descriptors live on ─► the parts of a batch by slot, in parallel ─► answers

Each descriptor is decided in one step, with all of its limits, since they live on one slot. A call over several slots
is charged on all at once, and what was charged is given back if any refused, before the caller is told. Guarantee: no
limit is ever exceeded. Without faults the charge of a refused call is visible to others for one more round trip; with
faults it may stay until it wears off. `shard_by: domain` in the rules puts a whole domain on one slot, and each of its
calls in one step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Answer, Charge, Outline, Plan, Reading, Slot, Unit
from ratelimit_rls.core.parts import is_refused, key_numbers, part_of
from ratelimit_rls.core.refund import Refund, refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.batch import CALL_QUOTA_PASSES, CALL_SHADOWED, Form, PackedPlan, runs
from ratelimit_rls.store.redis.commands import bulk, word_of
from ratelimit_rls.store.redis.counters import RedisCounters
from ratelimit_rls.store.redis.servers import Servers, Work
from ratelimit_rls.store.redis.store import answers_of, form

_log = logging.getLogger(__name__)

MAIN = 0
PER_SECOND = 1

_PART_BYTES = 350  # weighed with tracemalloc on CPython 3.11

_FINE = Reading(0, 0, 0)
"""Of what has not been asked yet."""


class Place(NamedTuple):
    """Whose counters can be decided in one step."""

    realm: int
    shard: int


class Part(NamedTuple):
    """What of a plan is decided in one place."""

    place: Place
    numbers: tuple[int, ...]  # of the plan's keys
    outline: Outline
    plan: PackedPlan[bytes]
    comes_last: bool = False  # it gives back, which cannot be undone, so the others are asked first


class ShardedPlan(NamedTuple):
    keys: tuple[bytes, ...]
    form: Form[bytes]  # of the whole
    parts: tuple[Part, ...]

    @property
    def gives_back(self) -> bool:
        return any(part.plan.gives_back for part in self.parts)

    @property
    def is_plain(self) -> bool:
        return all(part.plan.is_plain for part in self.parts)

    @property
    def own_bytes(self) -> int:
        return _PART_BYTES * len(self.parts)

    def within(self, patience_us: int) -> ShardedPlan:
        return self._with(part.plan.within(patience_us) for part in self.parts)

    def once(self, request_id: bytes) -> ShardedPlan:
        """One record per place, and none that another call over the same place would take for its own."""
        return self._with(part.plan.once(request_id, self.keys) for part in self.parts)

    def at_most(self, hits: int) -> ShardedPlan:
        return self._with(part.plan.at_most(hits) for part in self.parts)

    def returned(self, hits: int, charged_at_us: int) -> ShardedPlan:
        return self._with(part.plan.returned(hits, charged_at_us) for part in self.parts)

    def _with(self, plans: Iterable[PackedPlan[bytes]]) -> ShardedPlan:
        parts = tuple(part._replace(plan=plan) for part, plan in zip(self.parts, plans, strict=True))
        return self._replace(parts=parts)


class ShardedStore(RedisCounters):
    def __init__(self, main: Servers, per_second: Servers | None = None) -> None:
        super().__init__(main, *([per_second] if per_second else []))

    def prepare(self, plan: Plan) -> Prepared:
        slots = plan.outline.slots
        ranges = key_numbers(slots)
        places = {
            number: self._place(slot, plan.keys[ranges[number].start])
            for number, slot in enumerate(slots)
            if slot.steps
        }
        keys = tuple(map(bulk, plan.keys))
        whole = form(plan.outline)
        if len(set(places.values())) == 1:
            only = Part(places.popitem()[1], tuple(range(len(keys))), plan.outline, PackedPlan(keys, whole))
            return ShardedPlan(keys, whole, (only,))
        groups: dict[tuple[Place, bool], list[int]] = {}
        for number, place in places.items():
            groups.setdefault((place, _gives_back_if_admitted(slots[number])), []).append(number)
        parts = []
        for (place, comes_last), members in groups.items():
            numbers = tuple(number for member in members for number in ranges[member])
            outline = part_of(plan.outline, tuple(members))
            own = PackedPlan(tuple(keys[number] for number in numbers), form(outline))
            parts.append(Part(place, numbers, outline, own, comes_last))
        return ShardedPlan(keys, whole, tuple(parts))

    def _place(self, slot: Slot, key: bytes) -> Place:
        """All limits of a descriptor in one place, so only one that has no others goes to the Redis of the seconds."""
        realm = MAIN
        if len(self.realms) > 1 and all(step.limit.unit is Unit.SECOND for step in slot.steps):
            realm = PER_SECOND
        return Place(realm, self.realms[realm].shard(key))

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        """As `prepared` was spread, so is what it gives back: each of the refund's descriptors has one key."""
        whole = cast("ShardedPlan", prepared)
        keys = tuple(whole.keys[number] for number in refund.numbers)
        parts = []
        for place, numbers, _, charged, _ in whole.parts:
            own = tuple(at for at, number in enumerate(refund.numbers) if number in numbers)
            if own:
                outline = part_of(refund.outline, own)
                moment_us = min(refund.charged_at_us[at] for at in own)
                plan = PackedPlan(
                    tuple(keys[at] for at in own), form(outline), charged_at_us=moment_us, record=charged.record
                )
                parts.append(Part(place, own, outline, plan))
        return ShardedPlan(keys, form(refund.outline), tuple(parts))

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        plans = cast("Sequence[ShardedPlan]", batch)
        told = await self._decide([part for plan in plans for part in plan.parts if not part.comes_last])
        if len(told) < sum(len(plan.parts) for plan in plans):
            told = await self._decide_last(plans, told)
        answered = iter(told)
        answers = [_joined(plan, [next(answered) for _ in plan.parts]) for plan in plans]
        await self._settle([owed for _, all_owed in answers for owed in all_owed])
        return [answer for answer, _ in answers]

    async def _decide_last(
        self, plans: Sequence[ShardedPlan], told: Sequence[Answer | StoreError]
    ) -> list[Answer | StoreError]:
        """With the parts that come last: given back if the call passes, else only looked at."""
        earlier = iter(told)
        answers: list[Any] = []
        last: list[Part] = []
        for plan in plans:
            own = [None if part.comes_last else next(earlier) for part in plan.parts]
            passes = _passes_so_far(plan, own)
            last += [
                part if passes else part._replace(plan=part.plan.at_most(0)._replace(record=None))
                for part in plan.parts
                if part.comes_last
            ]
            answers += own
        later = iter(await self._decide(last))
        return [next(later) if answer is None else answer for answer in answers]

    async def _settle(self, owed: Sequence[Part]) -> None:
        if not owed:
            return
        for part, answer in zip(owed, await self._decide(owed), strict=True):
            if isinstance(answer, StoreError):
                key = word_of(part.plan.keys[0])
                _log.warning("what a refused call was charged was not given back to %r: %s", key, answer)

    async def _decide(self, parts: Sequence[Part]) -> list[Answer | StoreError]:
        """The answer to each part, in order; all places at once."""
        by_place: dict[Place, list[int]] = {}
        for number, part in enumerate(parts):
            by_place.setdefault(part.place, []).append(number)
        work: list[list[Work]] = [[] for _ in self.realms]
        numbers: list[list[int]] = [[] for _ in self.realms]
        for (realm, shard), members in by_place.items():
            for run in runs([parts[number].plan for number in members]):
                work[realm].append(Work(shard, run))
            numbers[realm] += members
        replies = await asyncio.gather(
            *(servers.decide(own) for servers, own in zip(self.realms, work, strict=True) if own)
        )
        answers: list[Any] = [None] * len(parts)
        replied = iter(replies)
        for realm_work, realm_numbers in zip(work, numbers, strict=True):
            if realm_work:
                flat = [
                    answer
                    for (_, run), reply in zip(realm_work, next(replied), strict=True)
                    for answer in answers_of(run, reply)
                ]
                for number, answer in zip(realm_numbers, flat, strict=True):
                    answers[number] = answer
        self.tell_freed([part.plan for part in parts])
        return answers


def _gives_back_if_admitted(slot: Slot) -> bool:
    """Under `always` it gives back whatever the verdict."""
    return slot.steps[0].cost < 0 and slot.steps[0].charge is Charge.ADMITTED


def _passes_so_far(plan: ShardedPlan, told: Sequence[Answer | StoreError | None]) -> bool:
    """By what was told; a refund is never what refuses a call."""
    readings = [_FINE] * len(plan.keys)
    for part, answer in zip(plan.parts, told, strict=True):
        if isinstance(answer, StoreError):
            return False
        if answer is not None:
            for number, reading in zip(part.numbers, answer.readings, strict=True):
                readings[number] = reading
    return bool(plan.form.flags & CALL_SHADOWED) or not _is_refused(plan, readings)


def _is_refused(plan: ShardedPlan, readings: Sequence[Reading]) -> bool:
    return is_refused(plan.form.slots, readings, bool(plan.form.flags & CALL_QUOTA_PASSES))


def _joined(plan: ShardedPlan, told: list[Answer | StoreError]) -> tuple[Answer | StoreError, Sequence[Part]]:
    """One verdict over all parts, and what was charged although another part refused, to be given back."""
    if len(told) == 1:
        return told[0], ()
    answers: list[Answer] = []
    for answer in told:
        if isinstance(answer, StoreError):
            return answer, ()  # what was charged elsewhere stays: whether to give it back is not known
        answers.append(answer)
    readings = [_FINE] * len(plan.keys)
    moments_us = [0] * len(plan.keys)
    for part, answer in zip(plan.parts, answers, strict=True):
        for number, reading in zip(part.numbers, answer.readings, strict=True):
            readings[number] = reading
            moments_us[number] = answer.now_us
    refused = _is_refused(plan, readings)
    owed: list[Part] = []
    if refused and not plan.form.flags & CALL_SHADOWED:
        for part, answer in zip(plan.parts, answers, strict=True):
            if not answer.refused and part.plan.charged_at_us is None:
                owed += _charged(part, answer, readings)
    again = all(answer.again for answer in answers)
    now_us = max(moments_us)
    return Answer(refused, now_us, tuple(readings), again=again, moments_us=tuple(moments_us)), owed


def _charged(part: Part, answer: Answer, readings: list[Reading]) -> Iterator[Part]:
    """What gives it back, if there is something; the readings then tell what is left after that."""
    owed = refund(decide(part.outline, answer))
    if owed is None:
        return
    for number, step in zip(owed.numbers, owed.outline.steps, strict=True):
        reading = readings[part.numbers[number]]
        readings[part.numbers[number]] = reading._replace(left=reading.left - step.cost, retry_us=0)
    if answer.again:
        return  # the call that was charged, of which this is a retry, gives it back
    keys = tuple(part.plan.keys[number] for number in owed.numbers)
    # Without a record: should another place have lost its own, a retry must be charged here again.
    plan = PackedPlan(keys, form(owed.outline), charged_at_us=answer.now_us, record=part.plan.record)
    yield Part(part.place, owed.numbers, owed.outline, plan)
