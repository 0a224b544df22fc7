"""Runs the steps of a test case on a store and reports differences from the expected results.

Steps run in time order, whatever their order in the file; at equal times, in file order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from ratelimit_rls.core.duration import format_duration_us
from ratelimit_rls.core.model import Code, Decision, Descriptor, Request, Rule, Status, WarningState
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import StoreError
from ratelimit_rls.pipeline.limiter import NO_LIMIT, PlannedCall, RateLimiter
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.simulation.case import NEVER_US, Case, CaseStep, Expected, Suite
from ratelimit_rls.simulation.clock import VirtualClock
from ratelimit_rls.store.base import Store
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Difference:
    """A step with an unexpected result: expected and actual values, in the same order."""

    step: CaseStep
    expected: tuple[str, ...]
    got: tuple[str, ...]
    statuses: tuple[tuple[Descriptor, Status], ...]  # all descriptors of the call, with their statuses


@dataclass(frozen=True, slots=True)
class CaseResult:
    case: Case
    differences: tuple[Difference, ...]
    matched_rules: tuple[Rule, ...]  # all rules matched by one of the steps

    @property
    def passed(self) -> bool:
        return not self.differences


class _ScheduledCall(NamedTuple):
    """One call of one step."""

    at_us: int
    step_number: int
    call: PlannedCall


class _StepResult(NamedTuple):
    """Result of one step."""

    passes: int
    last: Decision


def make_limiter(tree: Tree, store: Store, policy: Policy | None = None) -> RateLimiter:
    """Return the service's own limiter with these rules active."""
    rules = ActiveRules()
    rules.swap(tree, digest="", files=0, loaded_at=datetime.fromtimestamp(0, UTC))
    return RateLimiter(rules, store, Metrics(), policy or Policy())


async def run_suite(suite: Suite, cases: tuple[Case, ...] | None = None) -> list[CaseResult]:
    """Run the cases (default: all of the suite) on an embedded store of their own."""
    clock = VirtualClock()
    store = EmbeddedStore(clock=clock)
    return [
        await run_case(suite.tree, case, store, clock.advance_to) for case in (suite.cases if cases is None else cases)
    ]


async def run_case(tree: Tree, case: Case, store: Store, set_clock: Callable[[int], None]) -> CaseResult:
    """Run one case. Each case has its own key prefix, so it starts with empty counters."""
    place = f"{case.position.line}.{case.position.column}"
    limiter = make_limiter(tree, store, Policy(key_prefix=f"{case.position.file}:{place}:"))
    results: dict[int, _StepResult] = {}
    for at_us, number, call in sorted(_schedule(case, limiter), key=lambda turn: turn.at_us):
        set_clock(at_us)
        (decision,) = await limiter.check([call])
        if isinstance(decision, StoreError):
            raise decision
        before = results[number].passes if number in results else 0
        results[number] = _StepResult(before + (decision.code is not Code.OVER_LIMIT), decision)
    matched = {id(rule): rule for one in results.values() for rule in _matched_rules(one.last)}
    differences = [found for number, step in enumerate(case.steps) for found in compare(step, *results[number])]
    return CaseResult(case, tuple(differences), tuple(matched.values()))


def _schedule(case: Case, limiter: RateLimiter) -> Iterator[_ScheduledCall]:
    for number, step in enumerate(case.steps):
        call = limiter.prepare(Request(case.domain, step.descriptors)) if step.descriptors else NO_LIMIT
        for i in range(step.times):
            yield _ScheduledCall(step.at_us + i * step.every_us, number, call)


def _matched_rules(decision: Decision) -> Iterator[Rule]:
    yield from (status.descriptor_plan.rule for status in decision.statuses if status.descriptor_plan.rule is not None)


def compare(step: CaseStep, passes: int, last: Decision) -> Iterator[Difference]:
    """Yield at most one difference per step, with all of its expectations."""
    expected, got = [_verdicts(step.passes, step.times)], [_verdicts(passes, step.times)]
    if step.delay_us is not None:
        expected.append(f"delay {format_duration_us(step.delay_us)}")
        got.append(f"delay {format_duration_us(last.wait_us)}")
    for index, wanted in enumerate(step.statuses):
        label = f"[{index}] " if len(step.statuses) > 1 else ""
        for expected_text, actual_text in _fields(wanted, last.statuses[index]):
            expected.append(label + expected_text)
            got.append(label + actual_text)
    if expected != got:
        statuses = zip(step.descriptors, last.statuses, strict=True)
        yield Difference(step, tuple(expected), tuple(got), tuple(statuses))


def _verdicts(passes: int, times: int) -> str:
    if times == 1:
        return "ok" if passes else "over_limit"
    counts = {"ok": passes, "over_limit": times - passes}
    return " and ".join(f"{count:,} {code}" for code, count in counts.items() if count)


def _fields(wanted: Expected, status: Status) -> Iterator[tuple[str, str]]:
    """Yield each expected value of a descriptor with the actual one."""
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
        rule = status.descriptor_plan.rule
        names = (rule.path, *(limit.name for limit in rule.limits)) if rule is not None else ("",)
        name = wanted.rule if wanted.rule in names else names[0]
        yield f"rule {wanted.rule or 'none'}", f"rule {name or 'none'}"


def _named(state: WarningState | None) -> str:
    return "none" if state is None else state.name.lower()


def _wait(us: int) -> str:
    return "never" if us == NEVER_US else format_duration_us(us)
