"""Plan of which some descriptors can be served from hits taken in advance, and its remainder."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from ratelimit_rls.core.model import Charge, DescriptorPlan, Limit, PlanTemplate, Purpose, Reading, StoreResult
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.leases.lease import Lease, TakenHits
from ratelimit_rls.store.script_codec import PlanLayout

MAX_LEASED_DESCRIPTORS = 3
"""Maximum number of leased descriptors per call, so that a call has at most eight kinds of remainder."""

# Measured with tracemalloc on CPython 3.11.
_PLAN_BYTES = 500
_LEASE_BYTES = 1600


@per_template
def leased_descriptors(template: PlanTemplate) -> tuple[int, ...]:
    """Return the indexes of the descriptors that can be served from a lease; most templates have none.

    The store decides where a denial need not be final or one quota may replace another. A call that costs more than the
    limit's capacity would request all of it repeatedly, and could not use it.
    """
    decides = template.purpose is Purpose.DECIDE and not template.shadow_mode and not template.quota_passes
    if not decides or any(step.quota_mode for step in template.steps):
        return ()
    return tuple(number for number, one in enumerate(template.descriptor_plans) if _is_leased(one))[
        :MAX_LEASED_DESCRIPTORS
    ]


def _is_leased(descriptor_plan: DescriptorPlan) -> bool:
    if (
        descriptor_plan.rule is None
        or descriptor_plan.rule.hot is None
        or not descriptor_plan.steps
        or descriptor_plan.watchers
    ):
        return False
    return all(
        step.charge is Charge.ADMITTED
        and not step.shadow_mode
        and not step.max_delay_us
        and 0 < step.cost <= _max_cost(step.limit)
        for step in descriptor_plan.steps
    )


def _max_cost(limit: Limit) -> int:
    return limit.burst if limit.algorithm.has_burst else limit.requests_per_unit


class HotPart(NamedTuple):
    """A descriptor of a call that can be served from a lease."""

    lease: Lease
    hits: int
    numbers: range  # of its keys in the plan
    bit: int  # identifies it in bit masks of hot parts


class Remainder(NamedTuple):
    """The part of a call that the store decides."""

    plan: PreparedPlan
    numbers: tuple[int, ...]  # of its keys in the plan


class LeasedPlan:
    """A plan that may be served from leases.

    Calls with a request id or a maximum wait are sent to the store: it keeps the results for request ids.
    """

    __slots__ = ("_make_remainder", "_remainders", "hot", "whole")

    def __init__(
        self, whole: PreparedPlan, hot: tuple[HotPart, ...], make_remainder: Callable[[int], Remainder | None]
    ) -> None:
        """`make_remainder` returns the plan without the hot parts whose bits are set; None if nothing remains."""
        self.whole = whole
        self.hot = hot
        self._make_remainder = make_remainder
        self._remainders: dict[int, Remainder | None] = {}

    def short_leases(self, bits: int) -> list[Lease]:
        """Return the leases of these hot parts that have too few hits."""
        return [part.lease for part in self.hot if part.bit & bits and part.lease.available < part.hits]

    def serve(self, bits: int, now_us: int) -> ServedCall:
        """Take the hits of these hot parts, at least one. All must be available."""
        if bits not in self._remainders:
            self._remainders[bits] = self._make_remainder(bits)
        taken = [(part, part.lease.take(part.hits)) for part in self.hot if part.bit & bits]
        return ServedCall(self, bits, self._remainders[bits], taken, now_us)

    def local_denial(self, now_us: int) -> StoreResult | None:
        """Return a denial without asking the store, or None if the store must decide more than the hot parts."""
        if sum(len(part.numbers) for part in self.hot) < len(self.whole.keys):
            return None
        waits_us = [0 if lease.available >= hits else lease.denies_for_us(now_us) for lease, hits, *_ in self.hot]
        if not any(waits_us):
            return None
        readings = [
            reading._replace(retry_us=wait_us)
            for (lease, *_), wait_us in zip(self.hot, waits_us, strict=True)
            for reading in lease.readings(now_us)
        ]
        if len(readings) < len(self.whole.keys):
            return None  # the store has never reported one of them
        store_time_us = min(part.lease.store_time_us(now_us) for part in self.hot)
        return StoreResult.of(True, store_time_us, tuple(readings), remembered=True)

    def denied_leases(self, served: int, readings: Sequence[Reading]) -> Iterator[tuple[Lease, Sequence[Reading]]]:
        """Yield the leases of hot parts that the store denied, except for those that were served."""
        for lease, _, numbers, bit in self.hot:
            own = readings[numbers.start : numbers.stop]
            if not bit & served and not all(reading.allowed for reading in own):
                yield lease, own

    @property
    def keys(self) -> tuple[Hashable, ...]:
        return self.whole.keys

    @property
    def layout(self) -> PlanLayout[Any]:
        return self.whole.layout

    @property
    def frees_capacity(self) -> bool:
        return self.whole.frees_capacity

    @property
    def own_bytes(self) -> int:
        """Estimated memory, with its leases: a cached call keeps the state of its counters."""
        return self.whole.own_bytes + _PLAN_BYTES + _LEASE_BYTES * len(self.hot)

    @property
    def is_unmodified(self) -> bool:
        return True

    def with_max_wait(self, max_wait_us: int) -> Any:
        return self.whole.with_max_wait(max_wait_us)

    def idempotent(self, request_id: bytes) -> Any:
        return self.whole.idempotent(request_id)

    def take_up_to(self, hits: int) -> Any:
        return self.whole.take_up_to(hits)

    def refund(self, hits: int, charged_at_us: int) -> Any:
        return self.whole.refund(hits, charged_at_us)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeasedPlan) and self.whole == other.whole

    def __hash__(self) -> int:
        return hash(self.whole)


class ServedCall(NamedTuple):
    """A call some or all of whose hot parts have taken their hits."""

    plan: LeasedPlan
    bits: int  # of these parts
    remainder: Remainder | None
    taken: Sequence[tuple[HotPart, TakenHits]]
    at_us: int  # on the process's own clock

    def result(self, rest: StoreResult | None) -> StoreResult:
        """Combine with the store's result for the remainder. If that is a denial, the hits return to their leases."""
        store_times_us = [part.lease.store_time_us(self.at_us, taken) for part, taken in self.taken]
        if rest is not None:
            # The earliest, since a later refund must not go to a window that was never charged.
            store_times_us.append(rest.now_us)
            if rest.denied:
                for part, taken in self.taken:
                    part.lease.put_back(taken)
        elif len(self.taken) == 1:
            return StoreResult.of(False, store_times_us[0], tuple(self.taken[0][0].lease.readings(self.at_us)))
        readings: list[Any] = [None] * len(self.plan.whole.keys)
        for part, _ in self.taken:
            readings[part.numbers.start : part.numbers.stop] = part.lease.readings(self.at_us)
        if self.remainder is not None and rest is not None:
            for number, reading in zip(self.remainder.numbers, rest.readings, strict=True):
                readings[number] = reading
        denied, remembered = (rest.denied, rest.remembered) if rest is not None else (False, False)
        return StoreResult.of(denied, min(store_times_us), tuple(readings), remembered=remembered)
