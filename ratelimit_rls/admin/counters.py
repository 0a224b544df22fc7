"""Reading and resetting counters. Every reset has an audit entry, over HTTP as over gRPC.

The store and the database have no common transaction. So the audit entry is committed before the counters are reset: if
the database fails, nothing is reset; if the store fails after that, the caller gets the error and the entry stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ratelimit_rls.admin.decisions import DecidedRequest, plan_unblocked, resolve_known_caller
from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Descriptor, Request, StoreResult
from ratelimit_rls.core.refund import as_refund
from ratelimit_rls.database.administration import Role
from ratelimit_rls.database.repository import Actor, Repository, UnitOfWork
from ratelimit_rls.errors import StoreError, one_line

if TYPE_CHECKING:
    from ratelimit_rls.admin.auth import AccessControl
    from ratelimit_rls.admin.backend import AdminBackend, Counters
    from ratelimit_rls.transport.grpc.reset_limit import AdminCall

MAX_DESCRIPTOR_LENGTH = 1000
"""Characters of one descriptor in the audit entry."""

PENALTY_SUFFIX = b":penalty"


class CallerCounters(NamedTuple):
    """The counters that the descriptors of a request have, in use or not."""

    request: Request  # with identities in place of credentials
    keys: Sequence[bytes]


async def peek(backend: AdminBackend, request: Request) -> DecidedRequest:
    """Read the limits of a request without counting. `request` has Purpose.LOOK.

    Asks the store directly: the service would apply its fallback if the store fails. Raises StoreError.
    """
    request, rejection, _ = resolve_known_caller(backend, request)
    if rejection is not None:  # blocked, whatever the counters are
        return DecidedRequest(request, decision_of(backend.limiter.reject(request, rejection).template, None))
    plan = backend.limiter.plan(request)
    state: StoreResult | None = None
    if plan.keys:
        (result,) = await backend.store.spend([backend.store.prepare(plan)])
        if isinstance(result, StoreError):
            raise result
        state = result
    return DecidedRequest(request, decision_of(plan.template, state))


def find_counters(backend: AdminBackend, request: Request, *, penalty_only: bool = False) -> CallerCounters:
    """Return the counters of a request, also of a blocked caller. `penalty_only`: only violations and cooldowns."""
    request = resolve_known_caller(backend, as_refund(request)).request
    keys = plan_unblocked(backend, request).keys
    if penalty_only:
        keys = tuple(key for key in keys if key.endswith(PENALTY_SUFFIX))
    return CallerCounters(request, keys)


async def record_reset(change: UnitOfWork, store: Counters, found: CallerCounters) -> None:
    """Write the audit entry of a reset, with the number of counters in use. It must be committed before `reset`."""
    in_use = await store.present(found.keys) if found.keys else []
    descriptors = [_format_descriptor(descriptor) for descriptor in found.request.descriptors]
    await change.note(
        "reset", "counters", found.request.domain, {"descriptors": descriptors, "counters_reset": len(in_use)}
    )


async def reset(store: Counters, found: CallerCounters, *, dry_run: bool = False) -> Sequence[bytes]:
    """Reset counters. Return the keys of those in use, which a dry run leaves as they are. Raises StoreError."""
    if not found.keys:
        return []
    return await (store.present(found.keys) if dry_run else store.forget(found.keys))


class ResetAdministration:
    """Implements transport.grpc.reset_limit.Administration with the tokens, limits and audit log of the admin API."""

    def __init__(self, access: AccessControl, repository: Repository, store: Counters) -> None:
        self._access = access
        self._repository = repository
        self._store = store

    async def admit(self, call: AdminCall) -> Actor:
        caller = await self._access.admit(call.token, call.address, Role.WRITE)
        return Actor(caller.name, caller.token_id, call.address, call.request_id)

    async def reset(self, actor: Actor, request: Request, keys: Sequence[bytes]) -> int:
        found = CallerCounters(request, keys)
        async with self._repository.change(actor) as change:
            await record_reset(change, self._store, found)
        return len(await reset(self._store, found))


def _format_descriptor(descriptor: Descriptor) -> str:
    return one_line(",".join(f"{key}={value}" for key, value in descriptor.entries)[:MAX_DESCRIPTOR_LENGTH])
