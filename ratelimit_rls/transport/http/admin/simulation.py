"""Requests decided on a clock of their own, by the service's planner and the Lua of its store; nothing real is counted.

In short steps with as long a pause after each, since those whom the event loop serves meanwhile come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ratelimit_rls.core.accounts import Block
from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.identity import CredentialKind, Identity, Verifier
from ratelimit_rls.core.model import Code, Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.standing import Standings
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.transport.http.admin.models import SimulatedRequest
from ratelimit_rls.transport.http.admin.planning import request_of, resolved
from ratelimit_rls.transport.http.admin.problems import wrong_field
from ratelimit_rls.transport.http.admin.told import Simulated, SimulatedRule, code_word

BUDGET_BYTES = 32 * 2**20

STEP_S = 0.002
"""For so long others wait at most."""


class _Timed(NamedTuple):
    at_s: float
    request: Request


class _Pace:
    def __init__(self) -> None:
        self._begun_s = monotonic()

    async def give_way(self) -> None:
        """Between any two pieces of work."""
        if monotonic() - self._begun_s >= STEP_S:
            await asyncio.sleep(STEP_S)
            self._begun_s = monotonic()


class _Asked:
    """Whose credentials they are, asked once for each: to simulate is not to use them."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._known: dict[tuple[CredentialKind, str], Identity | None] = {}

    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        at = kind, credential
        if at not in self._known:
            self._known[at] = self._verifier.identify(kind, credential, now_s)
        return self._known[at]

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        return self._verifier.block_of(identity, now_s)


async def simulate(
    tree: Tree, standings: Standings, verifier: Verifier | None, bodies: Sequence[Any], now_s: float
) -> Simulated:
    """In the order of their moments; at one moment, as they were given. Callers stand as they do at `now_s`."""
    pace = _Pace()
    asked = _Asked(verifier) if verifier is not None else None
    requests: list[_Timed] = []
    for number, body in enumerate(bodies):
        await pace.give_way()
        requests.append(_read(number, body))
    now_us = 0
    store = EmbeddedStore(BUDGET_BYTES, clock=lambda: now_us)
    planner = Planner(tree, Policy(), standings)
    results = [""] * len(requests)
    calls: dict[str, int] = {}
    refused: dict[str, int] = {}
    for number in sorted(range(len(requests)), key=lambda number: requests[number].at_s):
        await pace.give_way()
        now_us = round(requests[number].at_s * 1e6)
        request, refusal, _ = resolved(requests[number].request, tree, asked, now_s)
        if refusal is not None:
            results[number] = code_word(Code.OVER_LIMIT)
            continue
        try:
            plan = planner.plan(request)
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


def _read(number: int, body: Any) -> _Timed:
    """Raises RequestValidationError, as if all had been looked at at once."""
    try:
        asked = SimulatedRequest.model_validate(body)
    except ValidationError as fault:
        errors = fault.errors(include_url=False)
        raise RequestValidationError(
            [{**error, "loc": ("body", "requests", number, *error["loc"])} for error in errors]
        ) from None
    return _Timed(asked.at, request_of(asked))
