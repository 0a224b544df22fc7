"""plan: which counters a request moves, and by how much.

Nothing here depends on the moment, so a plan can be kept for as long as the rules that made it, and the standings of
those it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ratelimit_rls.core.callers import Callers, Stood
from ratelimit_rls.core.identity import BLOCKED_STATUS
from ratelimit_rls.core.keys import Tags, ending_of, key_start
from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import (
    MAX_HITS,
    Charge,
    Descriptor,
    Limit,
    Match,
    OnStoreFailure,
    Outline,
    Plan,
    Purpose,
    Refusal,
    Request,
    Rule,
    Slot,
    Step,
    Unit,
    Watcher,
    filled,
)
from ratelimit_rls.core.standing import Standings, Validity
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest

MOST_DESCRIPTORS = 1024
"""In one request. All its limits are decided in one step that nothing may interrupt, so the step must stay short."""

MOST_STATES = 1024
"""Limits and watchers of one request: for the same reason, and since Lua takes only so many numbers at once."""

FEW_HITS = 16
"""Up to here, requests that differ in their hits are taken to be of few kinds. Tokens and bytes make many."""

MOST_KEPT_BYTES = 16 * 2**20
"""Of outlines, in a planner. Rules and hits make few; what makes many (limits and hits in requests, values in metrics)
is worth no more than being made again."""

# Weighed with tracemalloc on CPython 3.11, together with what stores, encoder and metrics make of an outline.
_OUTLINE_BYTES = 1450
_SLOT_BYTES = 210
_STEP_BYTES = 310
_WATCHER_BYTES = 130
_STYLE_BYTES = 1150  # where an answer is worded by the rules; and a step's own once more
_OWN_LIMIT_BYTES = 300

Made = TypeVar("Made")


def per_outline(make: Callable[[Outline], Made]) -> Callable[[Outline], Made]:
    """`make`, done once for an outline and remembered for as long as anybody keeps the outline.

    Kept in the outline itself: looking it up by a weak reference takes four times as long, for every new request."""

    def made_once(outline: Outline) -> Made:
        found: Made | None = outline.made_of_it.get(make)
        if found is None:
            found = outline.made_of_it[make] = make(outline)
        return found

    return made_once


@dataclass(frozen=True, slots=True)
class Policy:
    """The process-wide switches that change what a request means."""

    key_prefix: str = ""
    quota_mode: bool = False
    shadow_mode: bool = False
    override_charge: Charge = Charge.ALWAYS  # who pays for limits that arrive in the request
    on_store_failure: OnStoreFailure = OnStoreFailure.ERROR  # of rules that do not say it


class Planner:
    """Plans requests under one tree, and gives requests of one kind one and the same outline."""

    def __init__(self, tree: Tree, policy: Policy, standings: Standings | None = None) -> None:
        """Without `standings` nobody has limits but the rules'."""
        self._tree = tree
        self._policy = policy
        self._key_start = key_start(policy.key_prefix.encode())
        self._callers = Callers(standings) if standings is not None else None
        self._outlines: dict[object, Outline] = {}
        self._kept_bytes = 0

    def plan(self, request: Request) -> Plan:
        """Raises BadRequest if the request has no meaning."""
        check(request)
        matches = match(self._tree, request)
        valid, is_own = None, False
        if self._callers is not None:
            matches, standings, refusal, is_own = self._stood(self._callers, request, matches)
            valid = Validity(standings) if standings else None
            if refusal is not None:
                return Plan(self._refused(request, matches, refusal), (), valid)
        outline = self._outline(request, matches, is_own)
        if not outline.steps:
            return Plan(outline, (), valid)
        # Not by `per_outline`, which would hold this planner, and with it the tree, in a circle of its own outlines.
        tags, endings = outline.made_of_it.get(Tags) or self._key_parts(outline)
        keys: list[bytes] = []
        # Lists of one request's descriptors: to say `strict` would take 0.2 µs, here and below.
        for found, own in zip(matches, endings):  # noqa: B905
            if own:
                tag = tags.of(found.entries)
                for ending in own:
                    keys.append(tag + ending)
        return filled(Plan, (outline, tuple(keys), valid))

    def _stood(self, callers: Callers, request: Request, matches: tuple[Match, ...]) -> Stood:
        terms = self._tree.identities.get(request.domain)
        return callers.stand(request, matches, terms.blocked_status if terms else BLOCKED_STATUS)

    def _key_parts(self, outline: Outline) -> tuple[Tags, tuple[tuple[bytes, ...], ...]]:
        """What begins the keys of an outline with steps, and how those of each descriptor end, in the plan's order."""
        tags = Tags(self._key_start, outline.domain, self._tree.domains[outline.domain].shard_by)
        states = [(*(step.limit for step in slot.steps), *slot.watchers) for slot in outline.slots]
        parts = tags, tuple(tuple(b":" + ending_of(state) for state in own) for own in states)
        outline.made_of_it[Tags] = parts
        return parts

    def _refused(self, request: Request, matches: tuple[Match, ...], refusal: Refusal) -> Outline:
        slots = tuple(
            Slot(found.rule, (), _hits(request, descriptor), found.metric_path)
            for descriptor, found in zip(request.descriptors, matches, strict=True)
        )
        return refused(request, slots, refusal, shadow_mode=self._policy.shadow_mode)

    def _outline(self, request: Request, matches: tuple[Match, ...], is_own: bool) -> Outline:
        # A rule is known by its identity, which lasts as long as the tree. A limit in the request has a rule made for
        # it, so that is known by what it says.
        asked: list[object] = [request.domain, request.hits, id(request.purpose)]
        for (_, limit, hits, is_refund), (rule, _, metric_path) in zip(request.descriptors, matches):  # noqa: B905
            asked += limit or id(rule), metric_path, hits, is_refund
        kind = tuple(asked)
        outline = self._outlines.get(kind)
        if outline is None:
            outline = self._make_outline(request, matches, is_own)
            self._keep(kind, outline)
        return outline

    def _keep(self, kind: object, outline: Outline) -> None:
        self._kept_bytes += outline.own_bytes or _weight_bytes(outline.slots)
        if self._kept_bytes > MOST_KEPT_BYTES:
            self._outlines.clear()
            self._kept_bytes = 0
        else:
            self._outlines[kind] = outline

    def _make_outline(self, request: Request, matches: tuple[Match, ...], is_own: bool) -> Outline:
        replaced = frozenset[str]().union(*(found.rule.replaces for found in matches if found.rule))
        slots = tuple(
            self._slot(request, descriptor, found, replaced)
            for descriptor, found in zip(request.descriptors, matches, strict=True)
        )
        quota_mode = self._policy.quota_mode
        domain_known = request.domain in self._tree.domains
        brought_bytes = sum(map(_brought_bytes, request.descriptors, matches))
        brought_bytes += 0 if domain_known else len(request.domain)
        is_own = is_own or brought_bytes > 0 or _brings_hits(request)
        steps = tuple(step for slot in slots for step in slot.steps)
        states = len(steps) + sum(len(slot.watchers) for slot in slots)
        if states > MOST_STATES:
            raise BadRequest(f"the request meets {states} limits; at most {MOST_STATES} can be decided together")
        return Outline(
            domain=request.domain,
            domain_known=domain_known,
            steps=steps,
            slots=slots,
            quota_passes=quota_mode and any(not slot.steps and not slot.unlimited for slot in slots),
            shadow_mode=self._policy.shadow_mode,
            own_bytes=_weight_bytes(slots) + brought_bytes if is_own else 0,
            purpose=request.purpose,
            can_wait=any(step.max_delay_us and step.cost > 0 for step in steps),
            on_store_failure=self._on_store_failure(request, slots),
        )

    def _slot(self, request: Request, descriptor: Descriptor, found: Match, replaced: frozenset[str]) -> Slot:
        hits = 0 if request.purpose is Purpose.LOOK else _hits(request, descriptor)
        rule = found.rule
        if rule is None:
            return Slot(None, (), hits)
        steps = tuple(
            Step(
                limit=limit,
                cost=-hits if descriptor.is_refund else hits,
                charge=self._charge(request, descriptor, rule),
                shadow_mode=rule.shadow_mode,
                quota_mode=rule.quota_mode or self._policy.quota_mode,
                max_delay_us=self._max_delay_us(request, rule, limit),
            )
            for limit in rule.limits
            if not limit.name or limit.name not in replaced
        )
        if not steps:
            return Slot(rule, (), hits, unlimited=rule.unlimited)
        return Slot(rule, steps, hits, found.metric_path, watchers=tuple(self._watchers(request, rule)))

    def _charge(self, request: Request, descriptor: Descriptor, rule: Rule) -> Charge:
        if request.purpose is not Purpose.DECIDE:
            return Charge.ADMITTED if request.purpose is Purpose.LOOK else Charge.ALWAYS
        return self._policy.override_charge if descriptor.limit is not None else rule.charge

    def _max_delay_us(self, request: Request, rule: Rule, limit: Limit) -> int:
        """Only buckets have slots to wait for."""
        return rule.max_delay_us if limit.algorithm.has_burst and self._refusals_hold(request) else 0

    def _watchers(self, request: Request, rule: Rule) -> Iterator[Watcher]:
        if rule.penalty is not None and self._refusals_hold(request):
            yield rule.penalty
        if rule.warn_at is not None:
            yield rule.warn_at

    def _on_store_failure(self, request: Request, slots: Sequence[Slot]) -> OnStoreFailure:
        """The first, in the order of the enum, of what the rules say that the store would have been asked about."""
        said = {self._slot_on_store_failure(request, slot) for slot in slots if slot.steps}
        return next((policy for policy in OnStoreFailure if policy in said), self._policy.on_store_failure)

    def _slot_on_store_failure(self, request: Request, slot: Slot) -> OnStoreFailure:
        """What the store could not have refused is not refused for want of one: limits on trial, what has happened
        already, and what is given back."""
        said = slot.rule.on_store_failure if slot.rule else None
        policy = said or self._policy.on_store_failure
        if policy is not OnStoreFailure.DENY:
            return policy
        on_trial = self._policy.shadow_mode or all(step.shadow_mode for step in slot.steps)
        gives_back = all(step.cost < 0 for step in slot.steps)
        is_refused = not on_trial and not gives_back and request.purpose is not Purpose.REPORT
        return policy if is_refused else OnStoreFailure.ALLOW

    def _refusals_hold(self, request: Request) -> bool:
        """Where a refusal need not hold, or comes after the fact, nobody is made to wait for it, or penalised."""
        policy = self._policy
        return request.purpose is not Purpose.REPORT and not policy.shadow_mode and not policy.quota_mode


def refused(request: Request, slots: tuple[Slot, ...], refusal: Refusal, *, shadow_mode: bool = False) -> Outline:
    """Of a call that does not pass whatever its limits say."""
    return Outline(
        domain=request.domain,
        domain_known=True,
        steps=(),
        slots=slots,
        shadow_mode=shadow_mode,
        own_bytes=_weight_bytes(slots),
        purpose=request.purpose,
        refusal=refusal,
    )


def check(request: Request) -> None:
    """Refuse what has no meaning, in the order and (where it has one) with the sentence of the reference."""
    if not request.domain:
        raise BadRequest("rate limit domain must not be empty")
    if not request.descriptors:
        raise BadRequest("rate limit descriptor list must not be empty")
    if len(request.descriptors) > MOST_DESCRIPTORS:
        raise BadRequest(
            f"{len(request.descriptors)} descriptors in one request; at most {MOST_DESCRIPTORS} can be decided together"
        )
    for index, descriptor in enumerate(request.descriptors):
        if descriptor.hits is not None and descriptor.hits > MAX_HITS:
            raise BadRequest(f"descriptor {index}: hits_addend {descriptor.hits} is too large; at most {MAX_HITS}")
        if descriptor.limit is not None and descriptor.limit.unit is Unit.UNKNOWN:
            raise BadRequest(
                f"descriptor {index}: the limit's unit is unknown; use SECOND, MINUTE, HOUR, DAY, WEEK, MONTH or YEAR"
            )


def _weight_bytes(slots: Sequence[Slot]) -> int:
    steps = sum(len(slot.steps) for slot in slots)
    watchers = sum(len(slot.watchers) for slot in slots)
    weight = _OUTLINE_BYTES + _SLOT_BYTES * len(slots) + _STEP_BYTES * steps + _WATCHER_BYTES * watchers
    is_styled = any(slot.rule is not None and (slot.rule.style.headers or slot.rule.deny) for slot in slots)
    return weight + _STYLE_BYTES + _STEP_BYTES * steps if is_styled else weight


def _brings_hits(request: Request) -> bool:
    """Whether few requests will have the same hits."""
    own = [descriptor.hits for descriptor in request.descriptors if descriptor.hits is not None and descriptor.hits > 1]
    return len(own) > 1 or max([request.hits, *own]) > FEW_HITS


def _brought_bytes(descriptor: Descriptor, found: Match) -> int:
    """What a descriptor brought that is not in the rules: a limit, or values for its metrics."""
    if descriptor.limit is not None:
        return _OWN_LIMIT_BYTES + len(found.metric_path)
    return 0 if found.rule is None or found.metric_path is found.rule.path else len(found.metric_path)


def _hits(request: Request, descriptor: Descriptor) -> int:
    """The descriptor's own hits, 0 included; else the request's, where 0 means 1 (reference behaviour)."""
    return descriptor.hits if descriptor.hits is not None else max(1, request.hits)
