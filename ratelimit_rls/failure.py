"""What a call is told when the store has not answered: one of four things, as its rules say (`on_store_failure`).

    error   nothing, and Envoy's own `failure_mode_deny` decides
    allow   it passes
    deny    it is refused, and told to come back in a second
    local   it is decided here, by this process's share of every limit

Not a store: a call whose store failed and one whose store is late are told the same, and a store knows no deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, NamedTuple, cast

import structlog

from ratelimit_rls.core.decide import allowed, decide, denied
from ratelimit_rls.core.model import Answer, Decision, Limit, OnStoreFailure, Outline, Plan, Slot, Step
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.core.refund import refund
from ratelimit_rls.errors import Late, Overloaded, StoreError
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.batch import PackedPlan
from ratelimit_rls.store.embedded import EmbeddedStore, wall_clock_us
from ratelimit_rls.telemetry.metrics import Counters, Metrics

log = structlog.get_logger()

LOCAL_BYTES = 32 * 2**20
"""For the counters of `local`: some hundred thousand. They matter for as long as an outage lasts, and whoever is
forgotten for want of room begins again with its share."""

QUIET_S = 1.0
"""An outage is over when the store has answered every call for so long. A store that is late for some calls and not for
others would otherwise fill the log."""


class Undecided(NamedTuple):
    """A call that the store would have decided, and has not."""

    outline: Outline
    counters: Counters
    prepared: Prepared
    why: StoreError
    wait_us: int | None = None  # how long its caller can be held where the rules throttle; None: as long as they like


@dataclass(slots=True)
class _Outage:
    """What is told when it is over."""

    since_s: float
    last_s: float
    calls: int = 0


class Fallback:
    """Guarantee: an answer at once, and never more than `LOCAL_BYTES` kept.

    Under `local` each of `shares` processes lets pass its part of a limit, rounded up: together the limit, and less
    than one more for each of them. What is counted here is not told to the store afterwards.
    """

    def __init__(self, metrics: Metrics, shares: int = 1, *, clock: Callable[[], int] = wall_clock_us) -> None:
        """`shares`: replicas of the service, times the processes of each. The clock is in microseconds, of the day."""
        self._metrics = metrics
        self._shares = shares
        self._clock = clock
        self._store: EmbeddedStore | None = None  # until it is needed, or `get_ready`
        self._outage: _Outage | None = None
        self._share = per_outline(self._divided) if shares > 1 else _whole

    def get_ready(self) -> None:
        """Make now what takes tens of milliseconds to make: who is late has three."""
        if self._store is None:
            self._store = EmbeddedStore(LOCAL_BYTES, self._clock)

    def learn(self, outline: Outline) -> None:
        """Work out now what calls of this kind will need."""
        if self._store is not None and outline.on_store_failure is OnStoreFailure.LOCAL:
            self._store.prepare(Plan(self._share(outline), ()))

    def instead(self, calls: Sequence[Undecided]) -> list[Decision | StoreError]:
        """What to tell each, in order; its error, if its rules want no other word."""
        service = self._metrics.service
        told: list[Decision | StoreError] = []
        local: list[int] = []
        for outline, counters, _, why, _ in calls:
            self._count(why)
            match outline.on_store_failure:
                case OnStoreFailure.ERROR:
                    service.store_failure_error += 1
                    told.append(why)
                case OnStoreFailure.ALLOW:
                    service.store_failure_allow += 1
                    told.append(self._by_policy(allowed(outline), counters))
                case OnStoreFailure.DENY:
                    service.store_failure_deny += 1
                    told.append(self._by_policy(denied(outline, self._clock()), counters))
                case OnStoreFailure.LOCAL:
                    service.store_failure_local += 1
                    local.append(len(told))
                    told.append(why)
        if local:
            for number, decision in zip(local, self._decided_here([calls[number] for number in local]), strict=True):
                told[number] = decision
        return told

    def _by_policy(self, decision: Decision, counters: Counters) -> Decision:
        self._metrics.record_policy(decision, counters)
        return decision

    def _decided_here(self, calls: Sequence[Undecided]) -> Iterator[Decision]:
        """All together: alone, each would take four times as long."""
        self.get_ready()
        assert self._store is not None
        shares = [self._share(call.outline) for call in calls]
        plans = [self._plan(share, call) for share, call in zip(shares, calls, strict=True)]
        for call, share, answer in zip(calls, shares, self._store.decide(plans), strict=True):
            assert isinstance(answer, Answer), "the embedded store always has one"
            decision = decide(call.outline, answer)._replace(without_store=OnStoreFailure.LOCAL)
            # Hits are counted against the share, of which the answer tells; the caller is told of the limit it knows.
            counted = decision if share is call.outline else decide(share, answer)
            self._metrics.record(counted, call.counters, without_store=True)
            yield decision

    def _plan(self, share: Outline, call: Undecided) -> PackedPlan[Any]:
        assert self._store is not None
        plan = self._store.prepare(Plan(share, cast("tuple[bytes, ...]", call.prepared.keys)))
        return plan if call.wait_us is None else plan.within(call.wait_us)

    def give_back(self, prepared: Prepared, decision: Decision) -> None:
        """What a call that was decided here took."""
        owed = refund(decision)
        if owed is None or self._store is None:
            return
        plan = self._store.prepare(Plan(self._share(decision.outline), cast("tuple[bytes, ...]", prepared.keys)))
        opposite = self._store.opposite(plan, owed._replace(outline=self._divided(owed.outline)))
        self._store.decide([cast("PackedPlan[Any]", opposite)])

    def _divided(self, outline: Outline) -> Outline:
        slots = tuple(self._divided_slot(slot) for slot in outline.slots)
        return replace(outline, slots=slots, steps=tuple(step for slot in slots for step in slot.steps))

    def _divided_slot(self, slot: Slot) -> Slot:
        return replace(slot, steps=tuple(self._divided_step(step) for step in slot.steps))

    def _divided_step(self, step: Step) -> Step:
        return replace(step, limit=self._divided_limit(step.limit))

    def _divided_limit(self, limit: Limit) -> Limit:
        """Rounded up, so that nothing but nothing becomes nothing."""
        shares = self._shares
        return replace(limit, requests_per_unit=-(-limit.requests_per_unit // shares), burst=-(-limit.burst // shares))

    @property
    def in_outage(self) -> bool:
        return self._outage is not None

    def _count(self, why: StoreError) -> None:
        service = self._metrics.service
        service.redis_error += 1
        service.overloaded += isinstance(why, Overloaded)
        service.late += isinstance(why, Late)
        service.unavailable += not isinstance(why, Overloaded | Late)
        now_s = monotonic()
        if self._outage is None:
            self._outage = _Outage(now_s, now_s)
            log.warning("calls are answered without the store", error=str(why))
        self._outage.calls += 1
        self._outage.last_s = now_s

    def store_answered(self) -> None:
        """To be called now and then while in an outage, when the store has answered."""
        outage, now_s = self._outage, monotonic()
        if outage is not None and now_s - outage.last_s > QUIET_S:
            self._outage = None
            lasted_s = outage.last_s - outage.since_s
            log.warning("the store decides again", calls_without_it=outage.calls, for_s=round(lasted_s, 1))

    def gauges(self) -> Iterator[tuple[str, int]]:
        if self._store is not None:
            for name, number in self._store.size()._asdict().items():
                yield f"ratelimit.store_failure.local_{name}", number


def _whole(outline: Outline) -> Outline:
    return outline
