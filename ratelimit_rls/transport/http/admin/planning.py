"""Requests as administrators write them, and what the service makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from ratelimit_rls.core.credentials import Resolved, resolve
from ratelimit_rls.core.identity import Verifier
from ratelimit_rls.core.model import Descriptor, Entry, Plan, Purpose, Refusal, Request
from ratelimit_rls.core.plan import Planner
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import NotReady
from ratelimit_rls.transport.http.admin.backend import AdminBackend
from ratelimit_rls.transport.http.admin.models import Asked, CheckBody, DescriptorBody
from ratelimit_rls.transport.http.admin.problems import wrong_field
from ratelimit_rls.transport.http.admin.unblocked import Unblocked


def tree_in_force(backend: AdminBackend) -> Tree:
    """Raises NotReady if there is none yet."""
    if backend.rules.current is None:
        raise NotReady("no rules have been loaded yet")
    return backend.rules.current.tree


def request_of(asked: Asked, purpose: Purpose = Purpose.DECIDE) -> Request:
    hits = asked.hits_addend if isinstance(asked, CheckBody) else None
    return Request(asked.domain, tuple(descriptors_of(asked.descriptors, hits)), purpose=purpose)


def descriptors_of(bodies: Sequence[DescriptorBody], hits: int | None = None) -> list[Descriptor]:
    return [Descriptor(tuple(Entry(entry.key, entry.value) for entry in body.entries), hits=hits) for body in bodies]


def resolved(request: Request, tree: Tree, verifier: Verifier | None, now_s: float) -> Resolved:
    """With who is calling in place of credentials, as the service reads it: none goes into a key, a record or an
    answer."""
    terms = tree.identities.get(request.domain)
    return Resolved(request) if terms is None else resolve(request, terms, verifier, now_s)


def known_caller(backend: AdminBackend, request: Request) -> Resolved:
    """The same by the rules in force, for those who ask about a caller: one whose credential is nobody's is none.

    Raises a Fault (422) then.
    """
    known = resolved(request, tree_in_force(backend), backend.verifier, backend.clock())
    if known.refusal is not None and known.refusal.reason == "unauthorized":
        raise _nobodys(known.refusal)
    return known


def whoever(request: Request) -> Request:
    """As if something were given back: of a blocked caller nothing else is asked of the counters."""
    return request._replace(descriptors=tuple([one._replace(is_refund=True) for one in request.descriptors]))


def plan_unblocked(backend: AdminBackend, request: Request) -> Plan:
    """The counters that are the callers', and the limits that wait for them, should they be blocked."""
    return Planner(tree_in_force(backend), backend.policy, Unblocked(backend.directory)).plan(request)


def _nobodys(refusal: Refusal) -> Exception:
    return wrong_field(f"descriptors[{refusal.slot}]", refusal.message)
