"""Requests decided on a clock of their own, by the service's planner and the Lua of its store; nothing real is counted.

In small steps with a turn of the event loop between any two, since those whom it serves meanwhile come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Code, Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.standing import Standings
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.transport.http.admin.problems import wrong_field
from ratelimit_rls.transport.http.admin.told import Simulated, SimulatedRule, code_word

BUDGET_BYTES = 32 * 2**20
STEP = 25


class Timed(NamedTuple):
    at_s: float
    request: Request


async def simulate(tree: Tree, standings: Standings, requests: Sequence[Timed]) -> Simulated:
    """In the order of their moments; at one moment, as they were given."""
    now_us = 0
    store = EmbeddedStore(BUDGET_BYTES, clock=lambda: now_us)
    planner = Planner(tree, Policy(), standings)
    results = [""] * len(requests)
    calls: dict[str, int] = {}
    refused: dict[str, int] = {}
    turns = sorted(range(len(requests)), key=lambda number: requests[number].at_s)
    for turn, number in enumerate(turns):
        if turn % STEP == 0:
            await asyncio.sleep(0)
        now_us = round(requests[number].at_s * 1e6)
        try:
            plan = planner.plan(requests[number].request)
        except BadRequest as fault:
            raise wrong_field(f"requests[{number}]", str(fault)) from None
        answer = store.decide_alone(store.prepare_alone(plan)) if plan.keys else None
        is_over = plan.outline.refusal is not None or (
            answer is not None and decide(plan.outline, answer).code is Code.OVER_LIMIT
        )
        results[number] = code_word(Code.OVER_LIMIT if is_over else Code.OK)
        for rule in {slot.rule.path for slot in plan.outline.slots if slot.rule is not None}:
            calls[rule] = calls.get(rule, 0) + 1
            refused[rule] = refused.get(rule, 0) + is_over
    over = results.count(code_word(Code.OVER_LIMIT))
    return Simulated(
        calls=len(results),
        admitted=len(results) - over,
        refused=over,
        results=results,
        per_rule=[SimulatedRule(rule=rule, calls=calls[rule], refused=refused[rule]) for rule in sorted(calls)],
    )
