"""Plays the steps of a case on a store and tells where what came differs from what was expected.

Steps happen at their moments, whatever the order they are written in; at one moment, in the order written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from ratelimit_rls.core.model import Code, Decision, Descriptor, Request, Rule, State, Status
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.span import format_span
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import StoreError
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import NO_LIMIT, Call, RateLimiter
from ratelimit_rls.store.base import Store
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.trial.case import NEVER_US, Case, CaseStep, Expected, Suite
from ratelimit_rls.trial.moments import VirtualClock


@dataclass(frozen=True, slots=True)
class Difference:
    """A step that went otherwise: the same things in the same order, as they should be and as they are."""

    step: CaseStep
    expected: tuple[str, ...]
    got: tuple[str, ...]
    told: tuple[tuple[Descriptor, Status], ...]  # of the call in question, every descriptor


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    differences: tuple[Difference, ...]
    met: tuple[Rule, ...]  # every rule that one of the steps met

    @property
    def passed(self) -> bool:
        return not self.differences


class _Turn(NamedTuple):
    """One call of one step."""

    at_us: int
    step_number: int
    call: Call


class _Told(NamedTuple):
    """How one step went."""

    passes: int
    last: Decision


def limiter_on(tree: Tree, store: Store, policy: Policy | None = None) -> RateLimiter:
    """The service, as it runs, with these rules in force."""
    rules = Rules()
    rules.swap(tree, digest="", files=0, loaded_at=datetime.fromtimestamp(0, UTC))
    return RateLimiter(rules, store, Metrics(), policy or Policy())


async def play_suite(suite: Suite, cases: tuple[Case, ...] | None = None) -> list[Outcome]:
    """The cases (all, unless some are named) on an embedded store of their own."""
    clock = VirtualClock()
    store = EmbeddedStore(clock=clock)
    return [await play(suite.tree, case, store, clock.turn) for case in (suite.cases if cases is None else cases)]


async def play(tree: Tree, case: Case, store: Store, turn_clock: Callable[[int], None]) -> Outcome:
    """Every case counts under a prefix of its own: nothing is left to it from the one before."""
    place = f"{case.position.line}.{case.position.column}"
    limiter = limiter_on(tree, store, Policy(key_prefix=f"{case.position.file}:{place}:"))
    told: dict[int, _Told] = {}
    for at_us, number, call in sorted(_turns(case, limiter), key=lambda turn: turn.at_us):
        turn_clock(at_us)
        (decision,) = await limiter.check([call])
        if isinstance(decision, StoreError):
            raise decision
        before = told[number].passes if number in told else 0
        told[number] = _Told(before + (decision.code is not Code.OVER_LIMIT), decision)
    met = {id(rule): rule for one in told.values() for rule in _rules_met(one.last)}
    differences = [found for number, step in enumerate(case.steps) for found in compare(step, *told[number])]
    return Outcome(case, tuple(differences), tuple(met.values()))


def _turns(case: Case, limiter: RateLimiter) -> Iterator[_Turn]:
    for number, step in enumerate(case.steps):
        call = limiter.prepare(Request(case.domain, step.descriptors)) if step.descriptors else NO_LIMIT
        for i in range(step.times):
            yield _Turn(step.at_us + i * step.every_us, number, call)


def _rules_met(decision: Decision) -> Iterator[Rule]:
    yield from (status.slot.rule for status in decision.statuses if status.slot.rule is not None)


def compare(step: CaseStep, passes: int, last: Decision) -> Iterator[Difference]:
    """At most one difference for each step, with everything that was expected of it."""
    expected, got = [_verdicts(step.passes, step.times)], [_verdicts(passes, step.times)]
    if step.delay_us is not None:
        expected.append(f"delay {format_span(step.delay_us)}")
        got.append(f"delay {format_span(last.wait_us)}")
    for index, wanted in enumerate(step.statuses):
        label = f"[{index}] " if len(step.statuses) > 1 else ""
        for should, told in _fields(wanted, last.statuses[index]):
            expected.append(label + should)
            got.append(label + told)
    if expected != got:
        shown = zip(step.descriptors, last.statuses, strict=True)
        yield Difference(step, tuple(expected), tuple(got), tuple(shown))


def _verdicts(passes: int, times: int) -> str:
    if times == 1:
        return "ok" if passes else "over_limit"
    counts = {"ok": passes, "over_limit": times - passes}
    return " and ".join(f"{count:,} {code}" for code, count in counts.items() if count)


def _fields(wanted: Expected, status: Status) -> Iterator[tuple[str, str]]:
    """What was expected of one descriptor, each beside what came."""
    if wanted.code is not None:
        yield wanted.code.name.lower(), status.code.name.lower()
    if wanted.remaining is not None:
        yield f"remaining {wanted.remaining}", f"remaining {status.remaining}"
    if wanted.retry_us is not None:
        reading = status.reading
        retry_us = 0 if reading is None or reading.allowed else reading.retry_us
        yield f"retry_after {_wait(wanted.retry_us)}", f"retry_after {_wait(retry_us)}"
    if wanted.state is not None:
        yield f"state {_named(wanted.state)}", f"state {_named(status.state)}"
    if wanted.violations is not None:
        yield f"violations {wanted.violations}", f"violations {status.violations}"
    if wanted.rule is not None:
        rule = status.slot.rule
        names = (rule.path, *(limit.name for limit in rule.limits)) if rule is not None else ("",)
        met = wanted.rule if wanted.rule in names else names[0]
        yield f"rule {wanted.rule or 'none'}", f"rule {met or 'none'}"


def _named(state: State | None) -> str:
    return "none" if state is None else state.name.lower()


def _wait(us: int) -> str:
    return "never" if us == NEVER_US else format_span(us)
