"""Planner: which counters a request changes, and by how much.

A plan does not depend on the current time, so it can be cached as long as the rules and the entitlements it was made
from stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from ratelimit_rls.core.entitlements import Entitlements, EntitlementValidity
from ratelimit_rls.core.identity import BLOCKED_STATUS
from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import (
    MAX_HITS,
    Charge,
    DerivedKey,
    Descriptor,
    DescriptorPlan,
    Limit,
    Match,
    OnStoreFailure,
    Plan,
    PlanTemplate,
    Purpose,
    Rejection,
    Request,
    Rule,
    Step,
    Unit,
    Watcher,
    construct,
)
from ratelimit_rls.core.storage_keys import TagEncoder, key_start, key_suffix, tag_encoder
from ratelimit_rls.core.subject_limits import AppliedLimits, SubjectLimits
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest

MAX_DESCRIPTORS = 1024
"""Maximum descriptors in one request. Its limits in one slot are decided in one atomic step, which must stay short."""

MAX_STATES = 1024
"""Maximum limits and watchers of one request.

The atomic step must stay short, and Lua accepts only a bounded number of arguments at once.
"""

MAX_SHARED_HITS = 16
"""Hits up to this number are assumed to be shared by many requests. Larger ones (tokens, bytes) vary too much."""

MAX_TEMPLATE_CACHE_BYTES = 16 * 2**20
"""Memory for the templates cached by one planner; when it is exceeded the cache is cleared.

Rules and hits produce few templates. What produces many (limits and hits in requests, values in metrics) is not worth
caching for long.
"""

# Measured with tracemalloc on CPython 3.11, including what stores, encoders and metrics derive from a template.
_TEMPLATE_BYTES = 1450
_DESCRIPTOR_BYTES = 210
_UNMATCHED_BYTES = 100  # of a descriptor without a rule, whose plan is shared
_STEP_BYTES = 450
_WATCHER_BYTES = 130
_RESPONSE_POLICY_BYTES = 1150  # if the rules define response headers or bodies; each step then counts twice
_OWN_LIMIT_BYTES = 650

Derived = TypeVar("Derived")


def per_template(make: Callable[[PlanTemplate], Derived]) -> Callable[[PlanTemplate], Derived]:
    """Decorate `make` so that it runs once per template and its result lives as long as the template.

    The result is stored in the template itself, under a key of its own: looking it up by a weak reference takes four
    times as long, for every new request.
    """
    key: DerivedKey[Derived] = DerivedKey()

    def made_once(template: PlanTemplate) -> Derived:
        found = template.derived.get(key)
        if found is None:
            found = template.derived[key] = make(template)
        return found

    return made_once


KeySuffixes = tuple[tuple[bytes, ...], ...]
"""For each descriptor, the ends of its keys in plan order: one per step, then one per watcher."""

KeyParts = tuple[TagEncoder, KeySuffixes]
"""Encoder for the tags of a template with steps, and its key suffixes."""

_KEY_PARTS: DerivedKey[KeyParts] = DerivedKey()


@lru_cache(64)
def _unmatched(hits: int) -> DescriptorPlan:
    """Return the plan of a descriptor without a rule. Shared: a request may have hundreds of them."""
    return DescriptorPlan(None, (), hits)


@dataclass(frozen=True, slots=True)
class Policy:
    """Process-wide settings that change how requests are planned."""

    key_prefix: str = ""
    quota_mode: bool = False
    shadow_mode: bool = False
    override_charge: Charge = Charge.ALWAYS  # for limits carried by requests
    on_store_failure: OnStoreFailure = OnStoreFailure.ERROR  # for rules that do not set it


class Planner:
    """Plans requests for one rules tree. Requests that match the same rules with the same hits share a template."""

    def __init__(self, tree: Tree, policy: Policy, entitlements: Entitlements | None = None) -> None:
        """Create a planner. Without `entitlements`, only the limits of the rules apply."""
        self._tree = tree
        self._policy = policy
        self._key_start = key_start(policy.key_prefix.encode())
        self._subject_limits = SubjectLimits(entitlements) if entitlements is not None else None
        self._templates: dict[object, PlanTemplate] = {}
        self._cached_bytes = 0

    def plan(self, request: Request) -> Plan:
        """Return the plan of a request. Raises BadRequest if the request is invalid."""
        validate_request(request)
        matches = match(self._tree, request)
        valid, is_own = None, False
        if self._subject_limits is not None:
            matches, entitlements, rejection, is_own = self._apply_limits(self._subject_limits, request, matches)
            valid = EntitlementValidity(entitlements) if entitlements else None
            if rejection is not None:
                return Plan(self._rejected_template(request, matches, rejection), (), valid)
        template = self._template(request, matches, is_own)
        if not template.steps:
            return Plan(template, (), valid)
        # Not `per_template`: its closure would keep this planner and its tree alive in a reference cycle.
        tags, suffixes = template.derived.get(_KEY_PARTS) or self._key_parts(template)
        keys: list[bytes] = []
        # Both have one item per descriptor. `strict=True` would cost 0.2 µs, here and below.
        for found, own in zip(matches, suffixes):  # noqa: B905
            if own:
                tag = tags.of(found.entries)
                for suffix in own:
                    keys.append(tag + suffix)
        return construct(Plan, (template, tuple(keys), valid))

    def _apply_limits(
        self, subject_limits: SubjectLimits, request: Request, matches: tuple[Match, ...]
    ) -> AppliedLimits:
        config = self._tree.identities.get(request.domain)
        return subject_limits.apply(request, matches, config.blocked_status if config else BLOCKED_STATUS)

    def tag_encoder(self, domain: str) -> TagEncoder:
        """Return the encoder of the tags of a domain of the tree."""
        return tag_encoder(self._key_start, domain, self._tree.domains[domain].shard_by)

    def _key_parts(self, template: PlanTemplate) -> KeyParts:
        parts = self.tag_encoder(template.domain), key_suffixes(template)
        template.derived[_KEY_PARTS] = parts
        return parts

    def _rejected_template(self, request: Request, matches: tuple[Match, ...], rejection: Rejection) -> PlanTemplate:
        descriptor_plans = tuple(
            DescriptorPlan(found.rule, (), _hits(request, descriptor), found.metric_path)
            for descriptor, found in zip(request.descriptors, matches, strict=True)
        )
        return rejected_template(request, descriptor_plans, rejection, shadow_mode=self._policy.shadow_mode)

    def _template(self, request: Request, matches: tuple[Match, ...], is_own: bool) -> PlanTemplate:
        # Rules are compared by identity, which is stable as long as the tree. A limit carried by the request gets a
        # rule of its own, so it is compared by value.
        key: list[object] = [request.domain, request.hits, id(request.purpose)]
        for (_, limit, hits, is_refund), (rule, _, metric_path) in zip(request.descriptors, matches):  # noqa: B905
            key += limit or id(rule), metric_path, hits, is_refund
        kind = tuple(key)
        template = self._templates.get(kind)
        if template is None:
            template = self._make_template(request, matches, is_own)
            self._cache(kind, template)
        return template

    def _cache(self, kind: object, template: PlanTemplate) -> None:
        self._cached_bytes += template_bytes(template)
        if self._cached_bytes > MAX_TEMPLATE_CACHE_BYTES:
            self._templates.clear()
            self._cached_bytes = 0
        else:
            self._templates[kind] = template

    def _make_template(self, request: Request, matches: tuple[Match, ...], is_own: bool) -> PlanTemplate:
        replaced = frozenset[str]().union(*(found.rule.replaces for found in matches if found.rule))
        descriptor_plans = tuple(
            self._descriptor_plan(request, descriptor, found, replaced)
            for descriptor, found in zip(request.descriptors, matches, strict=True)
        )
        quota_mode = self._policy.quota_mode
        domain_known = request.domain in self._tree.domains
        request_bytes = sum(map(_request_specific_bytes, request.descriptors, matches))
        request_bytes += 0 if domain_known else len(request.domain)
        is_own = is_own or request_bytes > 0 or _has_unusual_hits(request)
        steps = tuple(step for descriptor_plan in descriptor_plans for step in descriptor_plan.steps)
        states = len(steps) + sum(len(descriptor_plan.watchers) for descriptor_plan in descriptor_plans)
        if states > MAX_STATES:
            raise BadRequest(f"the request matches {states} limits; at most {MAX_STATES} can be decided together")
        return PlanTemplate(
            domain=request.domain,
            domain_known=domain_known,
            steps=steps,
            descriptor_plans=descriptor_plans,
            quota_passes=quota_mode and any(not one.steps and not one.unlimited for one in descriptor_plans),
            shadow_mode=self._policy.shadow_mode,
            own_bytes=_estimate_bytes(descriptor_plans) + request_bytes if is_own else 0,
            purpose=request.purpose,
            can_wait=any(step.max_delay_us and step.cost > 0 for step in steps),
            is_plain=not self._policy.shadow_mode and _is_plain(request, steps, states),
            on_store_failure=self._on_store_failure(request, descriptor_plans),
        )

    def _descriptor_plan(
        self, request: Request, descriptor: Descriptor, found: Match, replaced: frozenset[str]
    ) -> DescriptorPlan:
        hits = 0 if request.purpose is Purpose.LOOK else _hits(request, descriptor)
        rule = found.rule
        if rule is None:
            return _unmatched(hits)
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
            return DescriptorPlan(rule, (), hits, unlimited=rule.unlimited)
        return DescriptorPlan(rule, steps, hits, found.metric_path, watchers=tuple(self._watchers(request, rule)))

    def _charge(self, request: Request, descriptor: Descriptor, rule: Rule) -> Charge:
        if request.purpose is not Purpose.DECIDE:
            return Charge.ADMITTED if request.purpose is Purpose.LOOK else Charge.ALWAYS
        return self._policy.override_charge if descriptor.limit is not None else rule.charge

    def _max_delay_us(self, request: Request, rule: Rule, limit: Limit) -> int:
        """Return the maximum delay; 0 unless the algorithm is a bucket, since only buckets have slots to wait for."""
        return rule.max_delay_us if limit.algorithm.has_burst and self._denials_are_enforced(request) else 0

    def _watchers(self, request: Request, rule: Rule) -> Iterator[Watcher]:
        if rule.penalty is not None and self._denials_are_enforced(request):
            yield rule.penalty
        if rule.warn_at is not None:
            yield rule.warn_at

    def _on_store_failure(self, request: Request, descriptor_plans: Sequence[DescriptorPlan]) -> OnStoreFailure:
        """Return the first policy, in enum order, among the rules that need the store."""
        policies = {self._descriptor_on_store_failure(request, one) for one in descriptor_plans if one.steps}
        return next((policy for policy in OnStoreFailure if policy in policies), self._policy.on_store_failure)

    def _descriptor_on_store_failure(self, request: Request, descriptor_plan: DescriptorPlan) -> OnStoreFailure:
        """Return the policy of one descriptor; DENY becomes ALLOW where the store could not have denied the call.

        That is the case in shadow mode, for reports of what has already happened, and for refunds.
        """
        own = descriptor_plan.rule.on_store_failure if descriptor_plan.rule else None
        policy = own or self._policy.on_store_failure
        if policy is not OnStoreFailure.DENY:
            return policy
        in_shadow_mode = self._policy.shadow_mode or all(step.shadow_mode for step in descriptor_plan.steps)
        is_refund = all(step.cost < 0 for step in descriptor_plan.steps)
        can_deny = not in_shadow_mode and not is_refund and request.purpose is not Purpose.REPORT
        return policy if can_deny else OnStoreFailure.ALLOW

    def _denials_are_enforced(self, request: Request) -> bool:
        """Return whether denials take effect. If not, calls are neither delayed nor penalised."""
        policy = self._policy
        return request.purpose is not Purpose.REPORT and not policy.shadow_mode and not policy.quota_mode


def key_suffixes(template: PlanTemplate) -> KeySuffixes:
    """Return the ends of the keys of a template's counters."""
    states = [(*(step.limit for step in one.steps), *one.watchers) for one in template.descriptor_plans]
    return tuple(tuple(b":" + key_suffix(state) for state in own) for own in states)


def template_bytes(template: PlanTemplate) -> int:
    """Estimate the memory of a template and what is derived from it."""
    return template.own_bytes or _estimate_bytes(template.descriptor_plans)


def rejected_template(
    request: Request, descriptor_plans: tuple[DescriptorPlan, ...], rejection: Rejection, *, shadow_mode: bool = False
) -> PlanTemplate:
    """Return the template of a call that is rejected regardless of its limits."""
    return PlanTemplate(
        domain=request.domain,
        domain_known=True,
        steps=(),
        descriptor_plans=descriptor_plans,
        shadow_mode=shadow_mode,
        own_bytes=_estimate_bytes(descriptor_plans),
        purpose=request.purpose,
        rejection=rejection,
    )


def validate_request(request: Request) -> None:
    """Raise BadRequest for an invalid request.

    The order of the checks, and the messages where it has them, are those of envoyproxy/ratelimit.
    """
    if not request.domain:
        raise BadRequest("rate limit domain must not be empty")
    if not request.descriptors:
        raise BadRequest("rate limit descriptor list must not be empty")
    if len(request.descriptors) > MAX_DESCRIPTORS:
        raise BadRequest(
            f"{len(request.descriptors)} descriptors in one request; at most {MAX_DESCRIPTORS} can be decided together"
        )
    for index, descriptor in enumerate(request.descriptors):
        if descriptor.hits is not None and descriptor.hits > MAX_HITS:
            raise BadRequest(f"descriptor {index}: hits_addend {descriptor.hits} is too large; at most {MAX_HITS}")
        if descriptor.limit is not None and descriptor.limit.unit is Unit.UNKNOWN:
            raise BadRequest(
                f"descriptor {index}: the limit's unit is unknown; use SECOND, MINUTE, HOUR, DAY, WEEK, MONTH or YEAR"
            )


def _is_plain(request: Request, steps: Sequence[Step], states: int) -> bool:
    has_watchers = states > len(steps)
    return request.purpose is not Purpose.REPORT and not has_watchers and all(step.cost >= 0 for step in steps)


def _estimate_bytes(descriptor_plans: Sequence[DescriptorPlan]) -> int:
    steps = sum(len(descriptor_plan.steps) for descriptor_plan in descriptor_plans)
    watchers = sum(len(descriptor_plan.watchers) for descriptor_plan in descriptor_plans)
    unmatched = sum(descriptor_plan.rule is None for descriptor_plan in descriptor_plans)
    size = _TEMPLATE_BYTES + _DESCRIPTOR_BYTES * (len(descriptor_plans) - unmatched) + _UNMATCHED_BYTES * unmatched
    size += _STEP_BYTES * steps + _WATCHER_BYTES * watchers
    has_response_policy = any(
        one.rule is not None and (one.rule.response_policy.headers or one.rule.deny) for one in descriptor_plans
    )
    return size + _RESPONSE_POLICY_BYTES + _STEP_BYTES * steps if has_response_policy else size


def _has_unusual_hits(request: Request) -> bool:
    """Return whether few other requests will have the same hits."""
    own = [descriptor.hits for descriptor in request.descriptors if descriptor.hits is not None and descriptor.hits > 1]
    return len(own) > 1 or max([request.hits, *own]) > MAX_SHARED_HITS


def _request_specific_bytes(descriptor: Descriptor, found: Match) -> int:
    """Return the size of the data that a descriptor adds to the rules: a limit, or values for its metrics."""
    if descriptor.limit is not None:
        return _OWN_LIMIT_BYTES + len(found.metric_path)
    return 0 if found.rule is None or found.metric_path is found.rule.path else len(found.metric_path)


def _hits(request: Request, descriptor: Descriptor) -> int:
    """Return the descriptor's own hits, including 0; otherwise the request's.

    As in envoyproxy/ratelimit, 0 hits in a request mean 1.
    """
    return descriptor.hits if descriptor.hits is not None else max(1, request.hits)
