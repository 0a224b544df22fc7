"""The whole service on one screen: prepare what a request asks, check a batch of what was prepared.

Request ─► prepare ─► Call      match and plan; kept by the transport for as long as the rules stand
Calls   ─► check ─► Decisions   one await for the whole batch, then words, then counters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Decision, Outline, Request
from ratelimit_rls.core.plan import Planner, Policy, per_outline
from ratelimit_rls.core.refund import refund
from ratelimit_rls.errors import NotReady, StoreError
from ratelimit_rls.rules.snapshot import Loaded, Rules
from ratelimit_rls.store.base import Prepared, Store
from ratelimit_rls.telemetry.metrics import LimitCounters, Metrics

Counters = tuple[LimitCounters | None, ...]
"""One per descriptor; None where nothing is counted."""


class Call(NamedTuple):
    """A request with everything that can be worked out before the moment it is decided.

    Only `prepared` is its own; the rest is shared with every call of its kind, so that keeping many calls is cheap.
    """

    outline: Outline
    counters: Counters
    prepared: Prepared | None  # None: nothing to ask the store


class RateLimiter:
    def __init__(self, rules: Rules, store: Store, metrics: Metrics, policy: Policy) -> None:
        self._rules = rules
        self._store = store
        self._metrics = metrics
        self._policy = policy
        self._planned: Loaded | None = None  # the rules `_planner` plans by
        self._planner: Planner
        self._counters_of = per_outline(self._counters)

    @property
    def rules(self) -> Loaded | None:
        """What is in force now; a Call prepared under another must be prepared again."""
        return self._rules.current

    def prepare(self, request: Request) -> Call:
        """Raises BadRequest if the request has no meaning, NotReady if there are no rules yet."""
        loaded = self._rules.current
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        if loaded is not self._planned:
            self._planned, self._planner = loaded, Planner(loaded.tree, self._policy)
        plan = self._planner.plan(request)
        prepared = self._store.prepare(plan) if plan.keys else None
        return Call(plan.outline, self._counters_of(plan.outline), prepared)

    def _counters(self, outline: Outline) -> Counters:
        return tuple(self._metrics.limit(slot.metric_path) if slot.steps else None for slot in outline.slots)

    async def check(
        self, calls: Sequence[Call], waits_us: Sequence[int | None] | None = None
    ) -> list[Decision | StoreError]:
        """What to tell each caller, in order; a StoreError where the store did not say.

        `waits_us` says how long each caller can be held where the rules throttle (None: as long as they like). What
        would wait longer is refused.
        """
        if waits_us is None:
            asked = [call.prepared for call in calls if call.prepared is not None]
        else:
            asked = [
                call.prepared if wait_us is None else call.prepared.within(wait_us)
                for call, wait_us in zip(calls, waits_us, strict=True)
                if call.prepared is not None
            ]
        answers = iter(await self._store.spend(asked)) if asked else iter(())
        decisions: list[Decision | StoreError] = []
        for outline, counters, prepared in calls:
            answer = next(answers) if prepared is not None else None
            if isinstance(answer, StoreError):
                self._metrics.service.redis_error += 1
                decisions.append(answer)
                continue
            decision = decide(outline, answer)
            self._metrics.record(decision, counters)
            decisions.append(decision)
        return decisions

    async def give_back(self, call: Call, decision: Decision) -> None:
        """Take back what an admitted call was charged: its caller left before it was answered.

        Raises StoreError if the store did not say that it did; the charge then stands until it wears off.
        """
        owed = refund(decision)
        if call.prepared is None or owed is None:
            return
        (answer,) = await self._store.spend([self._store.opposite(call.prepared, owed)])
        if isinstance(answer, StoreError):
            raise answer
