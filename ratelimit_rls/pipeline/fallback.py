"""Decisions without the store: what happens to a call that the store did not decide (`on_store_failure`).

    deny    it is denied, with a wait of one second
    error   it fails, and Envoy's own `failure_mode_deny` decides
    local   it is decided here, by this process's share of every limit
    allow   it passes

If the rules of a call differ, the first of these applies (core/plan.py).

This is not a store: a call gets the same response whether its store failed or is late, and stores know no deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, NamedTuple, cast

import structlog

from ratelimit_rls.core.decision import allow_without_store, decision_of, deny_without_store
from ratelimit_rls.core.model import (
    Decision,
    DescriptorPlan,
    Limit,
    OnStoreFailure,
    Plan,
    PlanTemplate,
    Step,
    StoreResult,
)
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.core.refund import refund
from ratelimit_rls.errors import CallerDeadlineExceeded, Overloaded, StoreError, UnknownState
from ratelimit_rls.store.embedded import EmbeddedStore, wall_clock_us
from ratelimit_rls.store.script_codec import EncodedPlan
from ratelimit_rls.telemetry.metrics import Metrics

_log = structlog.get_logger()

MAX_LOCAL_BYTES = 32 * 2**20
"""Memory for the counters of `local`: some hundred thousand. They matter only during an outage, and a client whose
counter is evicted starts again with its share."""

OUTAGE_QUIET_S = 1.0
"""An outage is over when the store has decided every call for this long. Otherwise a store that is late for some calls
only would fill the log."""


UNKNOWN_STATE_INTERVAL_S = 10.0
"""Minimum interval between log lines about states of an unknown form. The metric counts every call."""


class UndecidedCall(NamedTuple):
    """A call that the store should have decided, but did not."""

    template: PlanTemplate
    keys: tuple[bytes, ...]  # of its plan
    error: StoreError
    wait_us: int | None = None  # how long the caller can be delayed by throttling; None: as long as the rules allow


@dataclass(slots=True)
class _Outage:
    """Facts to be logged when it is over."""

    since_s: float
    last_s: float
    calls: int = 0


class Fallback:
    """Decides calls without the store.

    Guarantee: it never waits, and uses at most `MAX_LOCAL_BYTES`. Under `local` each of `shares` processes admits its
    part of a limit, rounded up: together the limit, plus less than one for each of them. Local counts are never sent to
    the store.
    """

    def __init__(self, metrics: Metrics, shares: int = 1, *, clock: Callable[[], int] = wall_clock_us) -> None:
        """`shares`: replicas of the service times the processes of each. The clock is the time in microseconds."""
        self._metrics = metrics
        self._shares = shares
        self._clock = clock
        self._store: EmbeddedStore | None = None  # created by `warm_up` or when first needed
        self._next_unknown_state_s = 0.0  # when the next one may be logged
        self.outage: _Outage | None = None  # the store has failed, and did not answer since
        self._share = per_template(self._divide) if shares > 1 else _undivided

    def warm_up(self) -> None:
        """Create the local store, which takes tens of milliseconds: a call that is late has three."""
        if self._store is None:
            self._store = EmbeddedStore(MAX_LOCAL_BYTES, self._clock)

    def prime(self, template: PlanTemplate) -> None:
        """Prepare the local plan for calls of this template."""
        if self._store is not None and template.on_store_failure is OnStoreFailure.LOCAL:
            self._store.prepare(Plan(self._share(template), ()))

    def apply(self, calls: Sequence[UndecidedCall]) -> list[Decision | StoreError]:
        """Return the decision for each call, in order; its error, if its rules say `error`."""
        service = self._metrics.service
        decisions: list[Decision | StoreError] = []
        local: list[int] = []
        for template, _, error, _ in calls:
            self._note_failure(error)
            match template.on_store_failure:
                case OnStoreFailure.ERROR:
                    service.store_failure_error += 1
                    decisions.append(error)
                case OnStoreFailure.ALLOW:
                    service.store_failure_allow += 1
                    decisions.append(allow_without_store(template))
                case OnStoreFailure.DENY:
                    service.store_failure_deny += 1
                    decisions.append(deny_without_store(template, self._clock()))
                case OnStoreFailure.LOCAL:
                    service.store_failure_local += 1
                    local.append(len(decisions))
                    decisions.append(error)
        if local:
            for number, decision in zip(local, self._decide_locally([calls[number] for number in local]), strict=True):
                decisions[number] = decision
        return decisions

    def _decide_locally(self, calls: Sequence[UndecidedCall]) -> Iterator[Decision]:
        """Decide all calls in one batch: one by one, each would take four times as long."""
        self.warm_up()
        assert self._store is not None
        shares = [self._share(call.template) for call in calls]
        plans = [self._plan(share, call) for share, call in zip(shares, calls, strict=True)]
        for call, share, result in zip(calls, shares, self._store.spend_now(plans), strict=True):
            assert isinstance(result, StoreResult), "the embedded store never fails"
            # The response reports the configured limit; metrics count against the share, to which the result refers.
            yield decision_of(call.template, result)._replace(
                without_store=OnStoreFailure.LOCAL,
                share=None if share is call.template else decision_of(share, result),
            )

    def _plan(self, share: PlanTemplate, call: UndecidedCall) -> EncodedPlan[Any]:
        assert self._store is not None
        plan = self._store.prepare(Plan(share, call.keys))
        return plan if call.wait_us is None else plan.with_max_wait(call.wait_us)

    def give_back(self, keys: tuple[bytes, ...], decision: Decision) -> None:
        """Refund the charge of a call that was decided locally. `keys` are those of its plan."""
        charged = refund(decision)
        if charged is None or self._store is None:
            return
        plan = self._store.prepare(Plan(self._share(decision.template), keys))
        local_refund = self._store.refund_of(plan, charged._replace(template=self._divide(charged.template)))
        self._store.spend_now([cast("EncodedPlan[Any]", local_refund)])

    def _divide(self, template: PlanTemplate) -> PlanTemplate:
        descriptor_plans = tuple(self._divide_descriptor(one) for one in template.descriptor_plans)
        return replace(
            template,
            descriptor_plans=descriptor_plans,
            steps=tuple(step for one in descriptor_plans for step in one.steps),
        )

    def _divide_descriptor(self, descriptor_plan: DescriptorPlan) -> DescriptorPlan:
        return replace(descriptor_plan, steps=tuple(self._divide_step(step) for step in descriptor_plan.steps))

    def _divide_step(self, step: Step) -> Step:
        return replace(step, limit=self._divide_limit(step.limit))

    def _divide_limit(self, limit: Limit) -> Limit:
        """Round up, so that only a limit of 0 becomes 0."""
        shares = self._shares
        return replace(limit, requests_per_unit=-(-limit.requests_per_unit // shares), burst=-(-limit.burst // shares))

    def _note_failure(self, error: StoreError) -> None:
        service = self._metrics.service
        service.redis_error += 1
        if isinstance(error, UnknownState):  # concerns one counter: the store is available
            service.unknown_state += 1
            self._log_unknown_state(error)
            return
        service.overloaded += isinstance(error, Overloaded)
        service.deadline_exceeded += isinstance(error, CallerDeadlineExceeded)
        service.unavailable += not isinstance(error, Overloaded | CallerDeadlineExceeded)
        now_s = monotonic()
        if self.outage is None:
            self.outage = _Outage(now_s, now_s)
            _log.warning("store_fallback_started", error=str(error))
        self.outage.calls += 1
        self.outage.last_s = now_s

    def _log_unknown_state(self, error: UnknownState) -> None:
        now_s = monotonic()
        if now_s >= self._next_unknown_state_s:
            self._next_unknown_state_s = now_s + UNKNOWN_STATE_INTERVAL_S
            _log.error("store_state_unknown", key=error.key, error=str(error))

    def note_store_success(self) -> None:
        """End the outage after a quiet time. Call it during an outage when the store has decided a batch."""
        outage, now_s = self.outage, monotonic()
        if outage is not None and now_s - outage.last_s > OUTAGE_QUIET_S:
            self.outage = None
            duration_s = outage.last_s - outage.since_s
            _log.info("store_fallback_ended", calls=outage.calls, duration_s=round(duration_s, 1))

    def gauges(self) -> Iterator[tuple[str, int]]:
        if self._store is not None:
            size = self._store.size()
            yield "ratelimit.fallback.keys", size.keys
            yield "ratelimit.fallback.size", size.bytes
            yield "ratelimit.fallback.evictions", size.evicted


def _undivided(template: PlanTemplate) -> PlanTemplate:
    return template
