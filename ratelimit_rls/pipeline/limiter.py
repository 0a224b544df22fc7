"""The rate limiter: prepares requests, asks the store about prepared calls, and decides them.

Request      ─► prepare ─► PlannedCall              match and plan; cached by codecs while the rules are in force
PlannedCalls ─► spend ─► decide ─► Decisions        one await for a whole batch; the fallback where the store failed
PlannedCall  ─► decide_without_store ─► Decision    by the call's rules: the store is late, or cannot be asked
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from time import monotonic
from typing import NamedTuple

from ratelimit_rls.core.decision import decision_of, passes
from ratelimit_rls.core.entitlements import Entitlement, Entitlements, EntitlementValidity
from ratelimit_rls.core.model import (
    Decision,
    DescriptorPlan,
    Entry,
    OnStoreFailure,
    Outcome,
    Plan,
    PlanTemplate,
    Rejection,
    Request,
    StoreResult,
    Validity,
    construct,
)
from ratelimit_rls.core.plan import Planner, Policy, per_template, rejected_template, validate_request
from ratelimit_rls.core.refund import refund
from ratelimit_rls.errors import NotReady, StoreError
from ratelimit_rls.pipeline.fallback import Fallback, UndecidedCall
from ratelimit_rls.rules.active_rules import ActiveRules, RulesVersion
from ratelimit_rls.store.base import PreparedPlan, Store
from ratelimit_rls.telemetry.decision_recorder import DecisionRecorder
from ratelimit_rls.telemetry.decision_records import RECORDED_KEYS
from ratelimit_rls.telemetry.hot_keys import HotKeys
from ratelimit_rls.telemetry.metrics import MetricCounters, Metrics
from ratelimit_rls.telemetry.usage_recorder import UsageEntry, UsageRecorder

MAX_IN_FLIGHT = 10_000


class PlannedCall(NamedTuple):
    """A request with everything that can be computed before it is decided.

    `template` and `metric_counters` are shared by all calls of the same kind, so that caching many calls is cheap.
    """

    template: PlanTemplate
    metric_counters: MetricCounters
    prepared: PreparedPlan | None  # None: the store is not needed
    valid: Validity | None = None  # None: for as long as the rules are in force
    usage_entry: UsageEntry | None = None  # where its usage is recorded, if usage is recorded


NO_LIMIT = PlannedCall(PlanTemplate("", True, (), ()), (), None)
"""The call of a request without limits: it passes."""


class RateLimiter:
    """Decides requests by the rules in force and the counters of a store."""

    def __init__(
        self,
        rules: ActiveRules,
        store: Store,
        metrics: Metrics,
        policy: Policy,
        fallback: Fallback | None = None,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        hot_keys: HotKeys | None = None,
        entitlements: Entitlements | None = None,
        usage_recorder: UsageRecorder | None = None,
    ) -> None:
        """`max_in_flight` is not enforced here: callers observe `remaining_capacity`.

        `entitlements` has the limits of subjects that have their own, and `usage_recorder` records every decision.
        """
        self._rules = rules
        self._store = store
        self._metrics = metrics
        self._policy = policy
        self._fallback = fallback or Fallback(metrics)
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self.entitlements = entitlements
        self._usage_recorder = usage_recorder
        self.recorder = DecisionRecorder(metrics, hot_keys, usage_recorder)
        self._planned: RulesVersion | None = None  # the rules of `_planner`
        self._planner: Planner
        self._metric_counters_of = per_template(metrics.metric_counters)

    @property
    def rules(self) -> RulesVersion | None:
        """The rules in force; a PlannedCall prepared under others must be prepared again."""
        return self._rules.current

    @property
    def remaining_capacity(self) -> int:
        """The number of further calls that may wait for the store. Answer calls beyond it immediately."""
        return self._max_in_flight - self._in_flight

    @property
    def is_synchronous(self) -> bool:
        """Return True if the store answers in the same event loop iteration: no deadline is too close to ask it."""
        return self._store.is_synchronous

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield "ratelimit.store.calls_in_flight", self._in_flight
        yield from self._fallback.gauges()

    @property
    def recorded_keys(self) -> Collection[str]:
        """The keys of the descriptor entries that are recorded with calls."""
        return RECORDED_KEYS if self._usage_recorder is not None else ()

    @property
    def planner(self) -> Planner:
        """The planner for the rules in force. Raises NotReady without rules."""
        current_rules = self._rules.current
        if current_rules is None:
            raise NotReady("no rate limit configuration loaded")
        if current_rules is not self._planned:
            self._planned, self._planner = current_rules, Planner(current_rules.tree, self._policy, self.entitlements)
        return self._planner

    def plan(self, request: Request) -> Plan:
        """Return the counters that a request uses. Raises BadRequest if it is invalid, NotReady without rules."""
        return self.planner.plan(request)

    def prepare(self, request: Request) -> PlannedCall:
        """Plan a request and encode the plan for the store. Raises BadRequest or NotReady like `plan`."""
        plan = self.plan(request)
        prepared = self._store.prepare(plan) if plan.keys else None
        self._fallback.prime(plan.template)
        return self._call(request, plan.template, prepared, plan.valid)

    def prepare_like(
        self,
        call: PlannedCall,
        keys: tuple[bytes, ...],
        recorded: Sequence[Entry],
        entitlements: Sequence[Entitlement],
    ) -> PlannedCall:
        """Return a call that differs from another one in the keys of its counters, its recorded entries, and the
        entitlements that it was made from."""
        template, metric_counters, _, _, _ = call
        prepared = self._store.prepare(construct(Plan, (template, keys, None))) if keys else None
        recorder, usage_entry = self._usage_recorder, None
        if recorder is not None:
            usage_entry = recorder.usage_entry_of(recorded, template, template.domain)
        valid = EntitlementValidity(tuple(entitlements)) if entitlements else None
        return construct(PlannedCall, (template, metric_counters, prepared, valid, usage_entry))

    def reject(self, request: Request, rejection: Rejection) -> PlannedCall:
        """Return a call that is denied whatever its limits are. Raises BadRequest like `prepare`."""
        validate_request(request)
        descriptor_plans = tuple(DescriptorPlan(None, (), 0) for _ in request.descriptors)
        return self._call(
            request,
            rejected_template(request, descriptor_plans, rejection, shadow_mode=self._policy.shadow_mode),
            None,
            None,
        )

    def _call(
        self, request: Request, template: PlanTemplate, prepared: PreparedPlan | None, valid: Validity | None
    ) -> PlannedCall:
        usage_entry = self._usage_recorder.usage_entry(request, template) if self._usage_recorder is not None else None
        # `construct` takes half the time of calling the class, which matters for requests that are not cached.
        return construct(PlannedCall, (template, self._metric_counters_of(template), prepared, valid, usage_entry))

    async def spend(self, plans: Sequence[PreparedPlan]) -> Sequence[StoreResult | StoreError]:
        """Ask the store about a batch of plans. Return the result of each, in order, or its error."""
        if not plans:
            return ()
        self._in_flight += len(plans)
        try:
            results = await self._store.spend(plans)
        finally:
            self._in_flight -= len(plans)
        if self._fallback.outage is not None and not isinstance(results[0], StoreError):
            self._fallback.note_store_success()
        return results

    def decide(
        self,
        calls: Sequence[PlannedCall],
        results: Sequence[StoreResult | StoreError],
        wait_left_us: Callable[[int], int | None] = lambda index: None,
        answered: Collection[int] = (),
    ) -> list[Outcome | StoreError]:
        """Return the outcome of each call, in order; a StoreError if the store failed and its rules say `error`.

        `results` are those of the calls that need the store. `wait_left_us` returns how long a caller, by its index,
        can still be throttled by the fallback (None: as long as its rules allow). The fallback does not decide the
        calls in `answered`: they have their response.
        """
        remaining_results = iter(results)
        decisions: list[Outcome | StoreError] = []
        undecided: dict[int, UndecidedCall] = {}
        for template, _, prepared, _, _ in calls:
            result = next(remaining_results) if prepared is not None else None
            if result.__class__ is StoreResult and passes(template, result):  # nearly always
                decisions.append(result)
                continue
            if not isinstance(result, StoreError):
                decisions.append(decision_of(template, result))
                continue
            assert prepared is not None
            index = len(decisions)
            if index not in answered:
                undecided[index] = UndecidedCall(template, self._storage_keys(prepared), result, wait_left_us(index))
            decisions.append(result)
        if undecided:
            for index, decision in zip(undecided, self._fallback.apply([*undecided.values()]), strict=True):
                decisions[index] = decision
        return decisions

    def decide_without_store(self, calls: Sequence[tuple[PlannedCall, StoreError]]) -> list[Decision | StoreError]:
        """Decide calls that cannot wait for the store, nor be delayed, as the rules of each say."""
        undecided = [
            UndecidedCall(call.template, self._storage_keys(call.prepared), error, 0)
            for call, error in calls
            if call.prepared is not None
        ]
        results = iter(self._fallback.apply(undecided))
        return [next(results) if call.prepared is not None else decision_of(call.template, None) for call, _ in calls]

    async def check(
        self, calls: Sequence[PlannedCall], request_ids: Sequence[bytes | None] | None = None
    ) -> list[Decision | StoreError]:
        """Decide and record calls that no pipeline has decoded: those of the admin API and of simulations."""
        begun_s = monotonic()
        outcomes = self.decide(calls, await self.spend(plans_to_spend(calls, None, request_ids)))
        self.recorder.record(calls, outcomes, begun_s)
        return [
            decision_of(call.template, outcome) if isinstance(outcome, StoreResult) else outcome
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    async def give_back(self, call: PlannedCall, decision: Decision) -> None:
        """Refund what an admitted call was charged: its caller disconnected before the response.

        Raises StoreError if the store did not confirm it; the charge then stays until it expires.
        """
        if call.prepared is None:
            return
        if decision.without_store is OnStoreFailure.LOCAL:
            self._fallback.give_back(self._storage_keys(call.prepared), decision)
            return
        charged = refund(decision)
        if charged is None:
            return
        (result,) = await self._store.spend([self._store.refund_of(call.prepared, charged)])
        if isinstance(result, StoreError):
            raise result

    def _storage_keys(self, prepared: PreparedPlan) -> tuple[bytes, ...]:
        return tuple(map(self._store.decode_key, prepared.keys))


def plans_to_spend(
    calls: Sequence[PlannedCall], waits_us: Sequence[int | None] | None, request_ids: Sequence[bytes | None] | None
) -> list[PreparedPlan]:
    """Return the plans of those calls that need the store.

    `waits_us` is how long each caller can be delayed by throttling (None: as long as the rules allow); a call that
    would wait longer is denied. `request_ids` are the ids under which calls are counted once.
    """
    if waits_us is None and request_ids is None:
        return [call.prepared for call in calls if call.prepared is not None]
    plans = []
    for number, (template, _, prepared, _, _) in enumerate(calls):
        if prepared is None:
            continue
        wait_us = waits_us[number] if waits_us is not None else None
        request_id = request_ids[number] if request_ids is not None else None
        one = prepared if wait_us is None else prepared.with_max_wait(wait_us)
        # A look reports the current state, and does not use up the id of the call that follows.
        plans.append(one if request_id is None or not _charges(template) else one.idempotent(request_id))
    return plans


def _charges(template: PlanTemplate) -> bool:
    return any(step.cost for step in template.steps)
