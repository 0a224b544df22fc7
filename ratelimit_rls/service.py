"""The whole service on one screen: prepare what a request asks, check a batch of what was prepared.

Request ─► prepare ─► Call      match and plan; kept by the transport for as long as the rules stand
Calls   ─► check ─► Decisions   one await for the whole batch, then words, then counters
Call    ─► instead ─► Decision  without the store, as the call's rules say: it failed, is late, or cannot be asked
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from time import monotonic
from typing import NamedTuple

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Answer, Decision, OnStoreFailure, Outline, Plan, Refusal, Request, Slot, filled
from ratelimit_rls.core.plan import Planner, Policy, check, per_outline, refused
from ratelimit_rls.core.refund import refund
from ratelimit_rls.core.standing import Standings, Validity
from ratelimit_rls.errors import NotReady, StoreError
from ratelimit_rls.failure import Fallback, Undecided
from ratelimit_rls.rules.snapshot import Loaded, Rules
from ratelimit_rls.store.base import Prepared, Store
from ratelimit_rls.telemetry.hot_keys import HotKeys
from ratelimit_rls.telemetry.ledger import Ledger, Line
from ratelimit_rls.telemetry.metrics import Counters, Metrics

MOST_IN_FLIGHT = 10_000


class Call(NamedTuple):
    """A request with everything that can be worked out before the moment it is decided.

    `outline` and `counters` are shared with every call of its kind, so that keeping many calls is cheap.
    """

    outline: Outline
    counters: Counters
    prepared: Prepared | None  # None: nothing to ask the store
    valid: Validity | None = None  # None: for as long as the rules stand
    line: Line | None = None  # what it is recorded under, where records are kept


NO_LIMIT = Call(Outline("", True, (), ()), (), None)
"""Of a request that asks for nothing: it passes."""


class RateLimiter:
    def __init__(
        self,
        rules: Rules,
        store: Store,
        metrics: Metrics,
        policy: Policy,
        fallback: Fallback | None = None,
        *,
        most_in_flight: int = MOST_IN_FLIGHT,
        hot_keys: HotKeys | None = None,
        standings: Standings | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`most_in_flight` is for callers to keep to: see `places_left`.

        `standings` knows the limits of callers that have their own, and `ledger` is told of every decision.
        """
        self._rules = rules
        self._store = store
        self._metrics = metrics
        self._policy = policy
        self._fallback = fallback or Fallback(metrics)
        self._most_in_flight = most_in_flight
        self._in_flight = 0
        self._hot_keys = hot_keys
        self._standings = standings
        self._ledger = ledger
        self._planned: Loaded | None = None  # the rules `_planner` plans by
        self._planner: Planner
        self._counters_of = per_outline(metrics.counters)

    @property
    def rules(self) -> Loaded | None:
        """What is in force now; a Call prepared under another must be prepared again."""
        return self._rules.current

    @property
    def knows_callers(self) -> bool:
        """Some have limits of their own, so that a call may cease to hold before the rules do."""
        return self._standings is not None

    @property
    def places_left(self) -> int:
        """How many more calls may wait for the store. Whoever is one too many is better told at once."""
        return self._most_in_flight - self._in_flight

    @property
    def decides_here(self) -> bool:
        """The store answers in the same turn of the loop: nobody's deadline is too near to ask it."""
        return self._store.decides_here

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield "ratelimit.store.calls_in_flight", self._in_flight
        yield from self._fallback.gauges()

    def plan(self, request: Request) -> Plan:
        """Which counters a request moves. Raises BadRequest if that has no meaning, NotReady if there are no rules."""
        loaded = self._rules.current
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        if loaded is not self._planned:
            self._planned, self._planner = loaded, Planner(loaded.tree, self._policy, self._standings)
        return self._planner.plan(request)

    def prepare(self, request: Request) -> Call:
        """Raises as `plan` does."""
        plan = self.plan(request)
        prepared = self._store.prepare(plan) if plan.keys else None
        self._fallback.learn(plan.outline)
        return self._call(request, plan.outline, prepared, plan.valid)

    def refuse(self, request: Request, refusal: Refusal) -> Call:
        """What becomes of a request that is not to be decided by its limits. Raises BadRequest as `prepare` does."""
        check(request)
        slots = tuple(Slot(None, (), 0) for _ in request.descriptors)
        return self._call(request, refused(request, slots, refusal, shadow_mode=self._policy.shadow_mode), None, None)

    def _call(self, request: Request, outline: Outline, prepared: Prepared | None, valid: Validity | None) -> Call:
        line = self._ledger.line(request, outline) if self._ledger is not None else None
        # In half the time of asking the class, as elsewhere on the way of requests that were never seen before.
        return filled(Call, (outline, self._counters_of(outline), prepared, valid, line))

    async def check(
        self,
        calls: Sequence[Call],
        waits_us: Sequence[int | None] | None = None,
        request_ids: Sequence[bytes | None] | None = None,
        answered: Collection[int] = (),
    ) -> list[Decision | StoreError]:
        """What to tell each caller, in order; a StoreError where the store did not say, and the rules say nothing else.

        `waits_us` says how long each caller can be held where the rules throttle (None: as long as they like). What
        would wait longer is refused. `request_ids` says under which id a call is counted once. `answered` has the
        numbers of calls that were told something else while the store was waited for: what it said of them is told
        here, and is neither counted nor replaced.
        """
        asked = _asked(calls, waits_us, request_ids)
        begun_s = monotonic() if waits_us is not None or self._ledger is not None else 0.0
        answers: Iterator[Answer | StoreError] = iter(())
        if asked:
            self._in_flight += len(asked)
            try:
                told = await self._store.spend(asked)
            finally:
                self._in_flight -= len(asked)
            if self._fallback.in_outage and not isinstance(told[0], StoreError):
                self._fallback.store_answered()
            answers = iter(told)
        decisions: list[Decision | StoreError] = []
        undecided: dict[int, Undecided] = {}
        for outline, counters, prepared, _, _ in calls:
            answer = next(answers) if prepared is not None else None
            if isinstance(answer, StoreError):
                assert prepared is not None
                number = len(decisions)
                if number not in answered:
                    wait_us = waits_us[number] if waits_us is not None else None
                    if wait_us is not None:  # the store has used some of it up
                        wait_us = max(0, wait_us - int((monotonic() - begun_s) * 1e6))
                    undecided[number] = Undecided(outline, counters, prepared, answer, wait_us)
                decisions.append(answer)
                continue
            decision = decide(outline, answer)
            is_retry = request_ids is not None and answer is not None and answer.again
            if not is_retry and (not answered or len(decisions) not in answered):
                self._metrics.record(decision, counters)
            decisions.append(decision)
        if undecided:
            for number, instead in zip(undecided, self._fallback.instead([*undecided.values()]), strict=True):
                decisions[number] = instead
        if self._hot_keys is not None:
            self._hot_keys.observe(calls, decisions)
        if self._ledger is not None:
            self._ledger.note([call.line for call in calls], decisions, monotonic() - begun_s, answered)
        return decisions

    def instead(self, calls: Sequence[tuple[Call, StoreError]]) -> list[Decision | StoreError]:
        """What to tell callers who cannot be held, without the store's word: as the rules of each call say."""
        undecided = [
            Undecided(call.outline, call.counters, call.prepared, why, 0)
            for call, why in calls
            if call.prepared is not None
        ]
        told = iter(self._fallback.instead(undecided))
        decisions: list[Decision | StoreError] = []
        for call, _ in calls:
            if call.prepared is not None:
                decisions.append(next(told))
            else:
                decision = decide(call.outline, None)
                self._metrics.record(decision, call.counters)
                decisions.append(decision)
        if self._ledger is not None:
            self._ledger.note([call.line for call, _ in calls], decisions, 0.0)
        return decisions

    async def give_back(self, call: Call, decision: Decision) -> None:
        """Take back what an admitted call was charged: its caller left before it was answered.

        Raises StoreError if the store did not say that it did; the charge then stands until it wears off.
        """
        if call.prepared is None:
            return
        if decision.without_store is OnStoreFailure.LOCAL:
            self._fallback.give_back(call.prepared, decision)
            return
        owed = refund(decision)
        if owed is None:
            return
        (answer,) = await self._store.spend([self._store.opposite(call.prepared, owed)])
        if isinstance(answer, StoreError):
            raise answer


def _asked(
    calls: Sequence[Call], waits_us: Sequence[int | None] | None, request_ids: Sequence[bytes | None] | None
) -> list[Prepared]:
    """What the store is asked, of those calls that need it."""
    if waits_us is None and request_ids is None:
        return [call.prepared for call in calls if call.prepared is not None]
    asked = []
    for number, (outline, _, prepared, _, _) in enumerate(calls):
        if prepared is None:
            continue
        wait_us = waits_us[number] if waits_us is not None else None
        request_id = request_ids[number] if request_ids is not None else None
        one = prepared if wait_us is None else prepared.within(wait_us)
        # Whoever only looks is told how things are now, and does not use up the id of the call that follows.
        asked.append(one if request_id is None or not _spends(outline) else one.once(request_id))
    return asked


def _spends(outline: Outline) -> bool:
    return any(step.cost for step in outline.steps)
