"""A plan of which some descriptors can be served from hits that were taken in advance, and the rest of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from ratelimit_rls.core.model import Answer, Charge, Limit, Outline, Purpose, Reading, Slot
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.batch import Form
from ratelimit_rls.store.leases.hand import Hand, Taken

MOST_LEASED = 3
"""Descriptors of one call that are served from hand, so that there are at most eight kinds of what is left of it."""

# Weighed with tracemalloc on CPython 3.11.
_PLAN_BYTES = 500
_HAND_BYTES = 1600


@per_outline
def leased_slots(outline: Outline) -> tuple[int, ...]:
    """The numbers of the descriptors that can be served from hand; of most outlines, none.

    Where a refusal need not hold, or one quota may pass for another, it is the store that says who passes. What costs
    more than there ever is would take all of it again and again, and could not use it.
    """
    decides = outline.purpose is Purpose.DECIDE and not outline.shadow_mode and not outline.quota_passes
    if not decides or any(step.quota_mode for step in outline.steps):
        return ()
    return tuple(number for number, slot in enumerate(outline.slots) if _is_leased(slot))[:MOST_LEASED]


def _is_leased(slot: Slot) -> bool:
    if slot.rule is None or slot.rule.hot is None or not slot.steps or slot.watchers:
        return False
    return all(
        step.charge is Charge.ADMITTED
        and not step.shadow_mode
        and not step.max_delay_us
        and 0 < step.cost <= _most_at_once(step.limit)
        for step in slot.steps
    )


def _most_at_once(limit: Limit) -> int:
    return limit.burst if limit.algorithm.has_burst else limit.requests_per_unit


class HotPart(NamedTuple):
    """A descriptor of a call that can be served from hand."""

    hand: Hand
    hits: int
    numbers: range  # of its keys in the plan
    bit: int  # that stands for it where some of a call's are meant


class Rest(NamedTuple):
    """What else a call asks."""

    asked: Prepared
    numbers: tuple[int, ...]  # of its keys in the plan


class LeasedPlan:
    """Whoever has a request id, or little patience, asks the store: what was answered under an id is kept there."""

    __slots__ = ("_make_rest", "_rests", "hot", "whole")

    def __init__(self, whole: Prepared, hot: tuple[HotPart, ...], make_rest: Callable[[int], Rest | None]) -> None:
        """`make_rest` makes what is left without the hot parts whose bits are set; None: nothing is."""
        self.whole = whole
        self.hot = hot
        self._make_rest = make_rest
        self._rests: dict[int, Rest | None] = {}

    def lacking(self, bits: int) -> list[Hand]:
        """Of these hot parts, the hands that have too little."""
        return [part.hand for part in self.hot if part.bit & bits and part.hand.in_hand < part.hits]

    def serve(self, bits: int, now_us: int) -> Served:
        """Take the hits of these hot parts, at least one; none is lacking."""
        if bits not in self._rests:
            self._rests[bits] = self._make_rest(bits)
        taken = [(part, part.hand.take(part.hits)) for part in self.hot if part.bit & bits]
        return Served(self, bits, self._rests[bits], taken, now_us)

    def refused_here(self, now_us: int) -> Answer | None:
        """A refusal that the store need not be asked for; it must, if it has a say in more than the hot parts."""
        if sum(len(part.numbers) for part in self.hot) < len(self.whole.keys):
            return None
        waits_us = [0 if hand.in_hand >= hits else hand.refuses_for_us(now_us) for hand, hits, *_ in self.hot]
        if not any(waits_us):
            return None
        readings = [
            reading._replace(retry_us=wait_us)
            for (hand, *_), wait_us in zip(self.hot, waits_us, strict=True)
            for reading in hand.readings(now_us)
        ]
        if len(readings) < len(self.whole.keys):
            return None  # one of them was never told of
        moment_us = min(part.hand.moment_us(now_us) for part in self.hot)
        return Answer(True, moment_us, tuple(readings), remembered=True)

    def refusals(self, served: int, readings: Sequence[Reading]) -> Iterator[tuple[Hand, Sequence[Reading]]]:
        """The hot parts, but for those that were served, that the store refused."""
        for hand, _, numbers, bit in self.hot:
            own = readings[numbers.start : numbers.stop]
            if not bit & served and not all(reading.allowed for reading in own):
                yield hand, own

    @property
    def keys(self) -> tuple[Hashable, ...]:
        return self.whole.keys

    @property
    def form(self) -> Form[Any]:
        return self.whole.form

    @property
    def gives_back(self) -> bool:
        return self.whole.gives_back

    @property
    def own_bytes(self) -> int:
        """With its hands: a call that is kept keeps what is known of its counters."""
        return self.whole.own_bytes + _PLAN_BYTES + _HAND_BYTES * len(self.hot)

    @property
    def is_plain(self) -> bool:
        return True

    def within(self, patience_us: int) -> Any:
        return self.whole.within(patience_us)

    def once(self, request_id: bytes) -> Any:
        return self.whole.once(request_id)

    def at_most(self, hits: int) -> Any:
        return self.whole.at_most(hits)

    def returned(self, hits: int, charged_at_us: int) -> Any:
        return self.whole.returned(hits, charged_at_us)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeasedPlan) and self.whole == other.whole

    def __hash__(self) -> int:
        return hash(self.whole)


class Served(NamedTuple):
    """A call whose hot parts, or some of them, have taken their hits."""

    plan: LeasedPlan
    bits: int  # of these parts
    rest: Rest | None
    taken: Sequence[tuple[HotPart, Taken]]
    at_us: int  # on the process's own clock

    def answer(self, rest: Answer | None) -> Answer:
        """With what the store said of the rest. If that is a refusal, the hits are in hand again."""
        moments_us = [part.hand.moment_us(self.at_us, taken) for part, taken in self.taken]
        if rest is not None:
            # The earliest, since what is given back later must not go to a window that was never charged.
            moments_us.append(rest.now_us)
            if rest.refused:
                for part, taken in self.taken:
                    part.hand.put_back(taken)
        elif len(self.taken) == 1:
            return Answer(False, moments_us[0], tuple(self.taken[0][0].hand.readings(self.at_us)))
        readings: list[Any] = [None] * len(self.plan.whole.keys)
        for part, _ in self.taken:
            readings[part.numbers.start : part.numbers.stop] = part.hand.readings(self.at_us)
        if self.rest is not None and rest is not None:
            for number, reading in zip(self.rest.numbers, rest.readings, strict=True):
                readings[number] = reading
        refused, remembered = (rest.refused, rest.remembered) if rest is not None else (False, False)
        return Answer(refused, min(moments_us), tuple(readings), remembered=remembered)
