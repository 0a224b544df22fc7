"""Decisions on demand, under the active rules and accounts of this process: check and explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ratelimit_rls.admin.user_limits import UnblockedEntitlements
from ratelimit_rls.core import explain as matching
from ratelimit_rls.core.credential_resolution import ResolvedRequest, resolve_credentials
from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.identity import Verifier
from ratelimit_rls.core.model import Decision, Descriptor, DescriptorPlan, Plan, Rejection, Request, Rule, Subject
from ratelimit_rls.core.plan import Planner
from ratelimit_rls.core.refund import as_refund
from ratelimit_rls.core.subject_limits import TIER
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest, NotReady, StoreError

if TYPE_CHECKING:
    from ratelimit_rls.admin.backend import AdminBackend


class DecidedRequest(NamedTuple):
    """A request, with identities in place of credentials, and the decision about it."""

    request: Request
    decision: Decision


class CallerEntitlement(NamedTuple):
    """Limits and block of the user or key whose limits a rule applies."""

    limits_of: Subject
    source: str  # of the limits, regardless of a block; as in core.entitlements.Entitlement
    block: Block | None

    @property
    def blocked(self) -> bool:
        return self.block is not None


class ExplainedDescriptor(NamedTuple):
    """A descriptor with the rule it matched, and with limits and counters as if the caller were not blocked."""

    explanation: matching.Explanation
    plan: DescriptorPlan
    keys: Sequence[bytes]
    entitlement: CallerEntitlement | None  # None: the rule has no `limits_of`


class ExplainedRequest(NamedTuple):
    """Explanations of all descriptors of a request."""

    rejection: Rejection | None  # set if the caller is denied regardless of the limits
    descriptors: Sequence[ExplainedDescriptor]


async def check(backend: AdminBackend, request: Request, request_id: bytes | None = None) -> DecidedRequest:
    """Decide as the service would. Counts, unless the purpose is Purpose.LOOK; once for each `request_id`.

    An invalid credential is denied as the service denies it. Raises StoreError if there is no fallback.
    """
    request, rejection, _ = resolve_request(request, active_tree(backend), backend.verifier, backend.clock())
    call = backend.limiter.prepare(request) if rejection is None else backend.limiter.reject(request, rejection)
    once = None if request_id is None else [request_id]
    (decision,) = await backend.limiter.check([call], request_ids=once)
    if isinstance(decision, StoreError):
        raise decision
    return DecidedRequest(request, decision)


def explain(backend: AdminBackend, request: Request) -> ExplainedRequest:
    """Explain which rules the descriptors match, also for a blocked caller.

    Raises BadRequest if a credential is invalid.
    """
    tree = active_tree(backend)
    request, rejection, _ = resolve_known_caller(backend, request)
    rejection = rejection or backend.limiter.plan(request).template.rejection
    plan = plan_unblocked(backend, as_refund(request))
    keys = iter(plan.keys)
    explained = []
    for descriptor, descriptor_plan in zip(request.descriptors, plan.template.descriptor_plans, strict=True):
        own = [next(keys) for _ in (*descriptor_plan.steps, *descriptor_plan.watchers)]
        explanation = matching.explain(tree, request.domain, descriptor)
        explained.append(
            ExplainedDescriptor(
                explanation, descriptor_plan, own, _entitlement(backend, descriptor_plan.rule, descriptor)
            )
        )
    return ExplainedRequest(rejection, explained)


def active_tree(backend: AdminBackend) -> Tree:
    """Return the active rules. Raises NotReady if none are loaded yet."""
    if backend.rules.current is None:
        raise NotReady("no rules have been loaded yet")
    return backend.rules.current.tree


def resolve_request(request: Request, tree: Tree, verifier: Verifier | None, now_s: float) -> ResolvedRequest:
    """Replace credentials by the identities they prove, as the service does.

    No credential gets into a counter key, an audit entry or a response.
    """
    terms = tree.identities.get(request.domain)
    return ResolvedRequest(request) if terms is None else resolve_credentials(request, terms, verifier, now_s)


def resolve_known_caller(backend: AdminBackend, request: Request) -> ResolvedRequest:
    """Resolve credentials under the active rules, for operations about a caller.

    Raises BadRequest if a credential is invalid: there is no caller then.
    """
    known = resolve_request(request, active_tree(backend), backend.verifier, backend.clock())
    if known.rejection is not None and known.rejection.reason == "unauthorized":
        raise BadRequest(known.rejection.message, field=f"descriptors[{known.rejection.descriptor_index}]")
    return known


def plan_unblocked(backend: AdminBackend, request: Request) -> Plan:
    """Plan a request as if no caller were blocked: with the counters and limits that a blocked caller has otherwise."""
    return Planner(active_tree(backend), backend.policy, UnblockedEntitlements(backend.directory)).plan(request)


def _entitlement(backend: AdminBackend, rule: Rule | None, descriptor: Descriptor) -> CallerEntitlement | None:
    if rule is None or rule.limits_of is None:
        return None
    tier = next((entry.value for entry in descriptor.entries if entry.key == TIER), "")
    named = rule.limits_of, descriptor.entries[-1].value, tier
    unblocked = UnblockedEntitlements(backend.directory).of(*named)
    return CallerEntitlement(rule.limits_of, unblocked.source, backend.directory.of(*named).block)
