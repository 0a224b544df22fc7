"""Simulation of requests on a virtual clock, with the service's planner and the Lua script of its store.

No real counter changes. The work runs in short steps with a pause of the same length after each, because the requests
that the event loop serves meanwhile take precedence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from ratelimit_rls.admin.decisions import resolve_request
from ratelimit_rls.admin.rules import document_text
from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.entitlements import Block, Entitlements
from ratelimit_rls.core.identity import CredentialKind, Identity, Verifier
from ratelimit_rls.core.model import Code, Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest, TooManyRequests
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.store.embedded import EmbeddedStore

if TYPE_CHECKING:
    from ratelimit_rls.admin.backend import AdminBackend

MAX_STORE_BYTES = 32 * 2**20

STEP_S = 0.002
"""Longest time for which a simulation blocks the event loop."""

MAX_WAITING = 4
"""Simulations that wait. Each holds its parsed request body, which takes much more memory than its bytes."""

RETRY_AFTER_S = 2

_OK, _OVER_LIMIT = Code.OK.name.lower(), Code.OVER_LIMIT.name.lower()


class TimedRequest(NamedTuple):
    """A request and its timestamp."""

    at_s: float
    request: Request


class RuleCalls(NamedTuple):
    """Requests of a simulation that matched one rule."""

    rule: str
    calls: int
    denied: int


class SimulatedDecisions(NamedTuple):
    """The decisions of a simulation."""

    results: Sequence[str]  # ok or over_limit for each request, in the given order
    per_rule: Sequence[RuleCalls]

    @property
    def calls(self) -> int:
        return len(self.results)

    @property
    def admitted(self) -> int:
        return self.results.count(_OK)

    @property
    def denied(self) -> int:
        return self.results.count(_OVER_LIMIT)


class BoundedLock:
    """Admits one holder at a time in this process, and few waiters."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._entered = 0

    @asynccontextmanager
    async def acquire(self, what: str) -> AsyncIterator[None]:
        """Hold the lock. Raises TooManyRequests if too many wait already. `what` names the work in the error."""
        if self._entered > MAX_WAITING:
            raise TooManyRequests(f"too many concurrent {what}; retry in {RETRY_AFTER_S} s", RETRY_AFTER_S)
        self._entered += 1
        try:
            async with self._lock:
                yield
        finally:
            self._entered -= 1


class _Pacer:
    """Divides work into short steps with pauses."""

    def __init__(self) -> None:
        self._begun_s = monotonic()

    async def yield_to_loop(self) -> None:
        """Pause if the current step is over. To be called between any two pieces of work."""
        if monotonic() - self._begun_s >= STEP_S:
            await asyncio.sleep(STEP_S)
            self._begun_s = monotonic()


class _CachingVerifier:
    """Verifies each credential only once: a simulated request does not count as a use of it."""

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
    tree: Tree, entitlements: Entitlements, verifier: Verifier | None, given: Iterable[TimedRequest], now_s: float
) -> SimulatedDecisions:
    """Decide the requests in the order of their timestamps, and in the given order where these are equal.

    Users and keys have the limits and blocks that they have at `now_s`. `given` may be a generator that parses each
    request: the pauses are between its items, too.
    """
    pace = _Pacer()
    caching = _CachingVerifier(verifier) if verifier is not None else None
    requests: list[TimedRequest] = []
    for timed in given:
        requests.append(timed)
        await pace.yield_to_loop()
    now_us = 0
    store = EmbeddedStore(MAX_STORE_BYTES, clock=lambda: now_us)
    planner = Planner(tree, Policy(), entitlements)
    results = [""] * len(requests)
    calls: dict[str, int] = {}
    denied: dict[str, int] = {}
    for number in sorted(range(len(requests)), key=lambda number: requests[number].at_s):
        await pace.yield_to_loop()
        now_us = round(requests[number].at_s * 1e6)
        request, rejection, _ = resolve_request(requests[number].request, tree, caching, now_s)
        if rejection is not None:
            results[number] = _OVER_LIMIT
            continue
        try:
            plan = planner.plan(request)
        except BadRequest as error:
            raise BadRequest(str(error), field=f"requests[{number}]") from None
        result = store.spend_single(store.prepare_single(plan)) if plan.keys else None
        is_over = plan.template.rejection is not None or (
            result is not None and decision_of(plan.template, result).code is Code.OVER_LIMIT
        )
        results[number] = _OVER_LIMIT if is_over else _OK
        for rule in {one.rule.path for one in plan.template.descriptor_plans if one.rule is not None}:
            calls[rule] = calls.get(rule, 0) + 1
            denied[rule] = denied.get(rule, 0) + is_over
    return SimulatedDecisions(results, [RuleCalls(rule, calls[rule], denied[rule]) for rule in sorted(calls)])


async def compile_simulated(backend: AdminBackend, documents: Sequence[str | dict[str, Any]]) -> Tree:
    """Compile the rules of a simulation in a thread, as the service would compile files with the same content.

    Raises RulesError or BadRequest, which name the document.
    """
    named = {f"documents[{number}]": document for number, document in enumerate(documents)}
    sources = [SourceDocument(name, (await document_text(document, name)).encode()) for name, document in named.items()]
    return (await asyncio.to_thread(backend.compile_rules, sources)).tree
