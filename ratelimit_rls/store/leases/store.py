"""Hits taken in advance: what a rule with `hot` counts is moved once per lease and process, not once per call.

    a call ─► enough in hand of its hot counters ─► only what else it asks goes to the store, if anything
          └─► too little ─► more is taken, for what is wanted now and until the lease ends ─► the same again
                        └─► too little still, or hardly asked for ─► the store decides, as it would without leases

What is in hand is spent in the store, so no limit is exceeded: a fixed window's never, the others' not over the window
and one lease (docs/adr/0014). What is not used by the end of its lease, or when the process ends, is given back. Hits
whose grant was lost on the way stay spent until they wear off, as any hit whose answer was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from ratelimit_rls.core.model import Answer, Plan
from ratelimit_rls.core.parts import key_numbers, part_of
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.store.base import Prepared, Store
from ratelimit_rls.store.leases.hand import Hand
from ratelimit_rls.store.leases.hands import MOST_HANDS, CallLater, Hands
from ratelimit_rls.store.leases.plan import HotPart, LeasedPlan, Rest, Served, leased_slots


class _Asking(NamedTuple):
    """A request for more."""

    hand: Hand
    hits: int
    done: asyncio.Future[StoreError | None]


class _Sent(NamedTuple):
    """What goes to the store for a call of the batch: all of it, or what was not served from hand."""

    number: int
    asked: Prepared
    plan: LeasedPlan | None = None
    served: Served | None = None


class _Short(NamedTuple):
    """A call that waits for more."""

    number: int
    plan: LeasedPlan
    bits: int  # of the hot parts that are to be served from hand


class Leases:
    decides_here = False

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = monotonic,
        call_later: CallLater | None = None,
        most_hands: int = MOST_HANDS,
    ) -> None:
        """The clock is in seconds, and never set back; `call_later` is the running loop's unless given."""
        self._store = store
        self._clock = clock
        self._hands = Hands(store, self._now_us, call_later, most_hands)
        self._turn = 0
        self._served_total = self._asked_total = 0

    def _now_us(self) -> int:
        return int(self._clock() * 1e6)

    def gauges(self) -> Iterator[tuple[str, int]]:
        """`served_total`: hot descriptors served from hand. `asked_total`: requests for more."""
        yield from self._hands.gauges()
        yield "ratelimit.leases.served_total", self._served_total
        yield "ratelimit.leases.asked_total", self._asked_total

    # -- plans ---------------------------------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> Prepared:
        whole = self._store.prepare(plan)
        leased = leased_slots(plan.outline)
        if not leased:
            return whole
        ranges = key_numbers(plan.outline.slots)
        hot = tuple(self._hot_part(plan, whole, number, ranges[number], 1 << at) for at, number in enumerate(leased))
        if len({part.hand for part in hot}) < len(hot):
            return whole  # twice the same counter, of which the store knows what is left for the second
        return LeasedPlan(whole, hot, partial(self._rest, plan, leased))

    def _hot_part(self, plan: Plan, whole: Prepared, number: int, numbers: range, bit: int) -> HotPart:
        slot = plan.outline.slots[number]
        assert slot.rule is not None
        assert slot.rule.hot is not None
        lease_us = slot.rule.hot.lease_us
        keys = plan.keys[numbers.start : numbers.stop]
        limits = tuple(step.limit for step in slot.steps)

        def make() -> Hand:
            is_all = len(keys) == len(plan.keys)
            own = whole if is_all else self._store.prepare(Plan(part_of(plan.outline, (number,)), keys))
            return Hand(own, limits, lease_us)

        # When rules change, leases under other limits end by themselves, and nobody is served from them.
        hand = self._hands.named((keys, limits, lease_us), make)
        return HotPart(hand, slot.steps[0].cost, numbers, bit)

    def _rest(self, plan: Plan, leased: Sequence[int], served: int) -> Rest | None:
        """What is left of a plan without those of the leased descriptors whose bits are set."""
        slots = plan.outline.slots
        without = {number for at, number in enumerate(leased) if served >> at & 1}
        left = tuple(number for number, slot in enumerate(slots) if slot.steps and number not in without)
        if not left:
            return None
        ranges = key_numbers(slots)
        numbers = tuple(number for slot_number in left for number in ranges[slot_number])
        keys = tuple(plan.keys[number] for number in numbers)
        return Rest(self._store.prepare(Plan(part_of(plan.outline, left), keys)), numbers)

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        """Given back to the store, also what was taken from hand: its lease may be over by then."""
        return self._store.opposite(prepared.whole if isinstance(prepared, LeasedPlan) else prepared, refund)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        if LeasedPlan not in map(type, batch):
            return await self._store.spend(batch)
        self._turn += 1
        now_us = self._now_us()
        answers: list[Any] = [None] * len(batch)
        sent: list[_Sent] = []
        short: list[_Short] = []
        wanted: dict[Hand, int] = {}
        for number, plan in enumerate(batch):
            if not isinstance(plan, LeasedPlan):
                sent.append(_Sent(number, plan))
                continue
            bits, lacking = self._look(plan, now_us)
            if lacking:
                short.append(_Short(number, plan, bits))
                for hand, hits, *_ in lacking:
                    wanted[hand] = wanted.get(hand, 0) + hits
            elif bits:
                self._serve(number, plan, bits, now_us, sent, answers)
            else:
                self._pass_on(number, plan, now_us, sent, answers)
        if wanted:
            left = await self._ask_for_more(short, wanted, sent, answers, now_us)
            if left:
                await self._travel([], left, answers)
        elif sent:
            await self._travel([], sent, answers)
        return answers

    def _look(self, plan: LeasedPlan, now_us: int) -> tuple[int, list[HotPart]]:
        """Which hot parts are to be served from hand, as bits, and those of them of which there is too little."""
        bits, lacking = 0, []
        for part in plan.hot:
            hand, hits, _, bit = part
            hand.demand.add(hits, self._turn, now_us)
            self._hands.use(hand, now_us)
            if hand.in_hand >= hits:
                bits |= bit
            elif hand.wants_more(now_us):
                bits |= bit
                lacking.append(part)
        return bits, lacking

    def _serve(
        self, number: int, plan: LeasedPlan, bits: int, now_us: int, sent: list[_Sent], answers: list[Any]
    ) -> None:
        """Take what these hot parts need, and ask the store for the rest."""
        served = plan.serve(bits, now_us)
        self._served_total += len(served.taken)
        if served.rest is None:
            answers[number] = served.answer(None)
        else:
            sent.append(_Sent(number, served.rest.asked, plan, served))

    def _pass_on(self, number: int, plan: LeasedPlan, now_us: int, sent: list[_Sent], answers: list[Any]) -> None:
        """Have the store decide, unless it has just said that there is nothing."""
        refusal = plan.refused_here(now_us)
        if refusal is not None:
            answers[number] = refusal
        else:
            sent.append(_Sent(number, plan.whole, plan))

    async def _ask_for_more(
        self, short: list[_Short], wanted: dict[Hand, int], sent: list[_Sent], answers: list[Any], now_us: int
    ) -> list[_Sent]:
        """One request per counter at a time; whoever comes meanwhile waits for it. Returns what is still to be sent."""
        waits = {hand.asking: hand for hand in wanted if hand.asking is not None}
        asking = [self._ask(hand, hits, now_us) for hand, hits in wanted.items() if hand.asking is None]
        if asking or sent:
            await self._travel(asking, sent, answers)
        if waits:
            await asyncio.wait(waits)  # which leaves them alone if this batch is given up
            now_us = self._now_us()
            for hand in wanted:
                self._hands.use(hand, now_us)
        # Without a wait the moment is still the one at which the calls came. What was granted for them is theirs even
        # if the answer took longer than the lease: they were counted when the store said so, as any call is.
        failed = {hand: why for done, hand in waits.items() if (why := done.result())}
        failed |= {hand: why for hand, _, done in asking if (why := done.result())}
        left: list[_Sent] = []
        for number, plan, bits in short:
            lacking = plan.lacking(bits)
            errors = [failed[hand] for hand in lacking if hand in failed]
            if not lacking:
                self._serve(number, plan, bits, now_us, left, answers)
            elif errors:
                answers[number] = errors[0]
            else:
                for hand in lacking:  # too little for this call may be enough for another elsewhere
                    self._hands.owe(hand.let_go())
                self._pass_on(number, plan, now_us, left, answers)
        return left

    def _ask(self, hand: Hand, hits: int, now_us: int) -> _Asking:
        hand.asking = asyncio.get_running_loop().create_future()
        self._asked_total += 1
        return _Asking(hand, hand.to_ask(hits, now_us), hand.asking)

    async def _travel(self, asking: Sequence[_Asking], sent: Sequence[_Sent], answers: list[Any]) -> None:
        """Ask the store for all of this at once, and give back on the way what is owed."""
        owed = self._hands.owed_now()
        more = [hand.part.at_most(hits) for hand, hits, _ in asking]
        told: list[Answer | StoreError] = []
        sent_us = self._now_us()
        try:
            told = await self._store.spend([*owed, *more, *(one.asked for one in sent)])
        finally:  # whatever came of it, nobody waits in vain
            now_us = self._now_us()
            granted = told[len(owed) : len(owed) + len(asking)] or [_given_up()] * len(asking)
            for (hand, hits, done), answer in zip(asking, granted, strict=True):
                hand.asking = None
                if isinstance(answer, Answer):
                    self._hands.use(hand, now_us)  # so that all it has is of the window that the answer is of
                    hand.add(answer, hits, sent_us, now_us)
                    self._hands.hold(hand)
                done.set_result(answer if isinstance(answer, StoreError) else None)
        self._hands.returned(told[: len(owed)])
        for call, answer in zip(sent, told[len(owed) + len(asking) :], strict=True):
            answers[call.number] = self._told(call, answer, now_us)

    def _told(self, call: _Sent, answer: Answer | StoreError, now_us: int) -> Answer | StoreError:
        if call.plan is None or isinstance(answer, StoreError):
            return answer  # hits from hand stay spent: whether such a call passes is said elsewhere
        served = call.served
        told = served.answer(answer) if served is not None else answer
        if answer.refused:
            if served is not None:
                self._served_total -= len(served.taken)
                for part, _ in served.taken:
                    self._hands.hold(part.hand)
            if not answer.remembered:
                for hand, readings in call.plan.refusals(served.bits if served else 0, told.readings):
                    hand.was_short(readings, now_us)
        return told

    async def close(self) -> None:
        """Give back all that is in hand; then the store is closed, too."""
        await self._hands.close()
        await self._store.close()


def _given_up() -> StoreError:
    return StoreUnavailable("the request for a lease was given up")
