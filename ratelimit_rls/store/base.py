"""The interface of a store: decide a batch of plans in order, each atomically, on a cluster the part in each slot."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, Self

from ratelimit_rls.core.model import Plan, StoreResult
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.script_codec import PlanLayout


class PreparedPlan(Protocol):
    """A plan encoded for its store. Two are equal if they perform the same operation on the same counters."""

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Identify the plan's counters, one for each key of the plan. Opaque: `Store.decode_key` returns the key."""
        ...

    @property
    def layout(self) -> PlanLayout[Any]:
        """The encoding that it shares with all plans of its template."""
        ...

    @property
    def frees_capacity(self) -> bool:
        """Return True if other calls may find more capacity after this plan."""
        ...

    @property
    def is_unmodified(self) -> bool:
        """Return True if the plan is as `prepare` made it, and none of the methods below has changed it."""
        ...

    @property
    def own_bytes(self) -> int:
        """Estimated memory in bytes beyond its keys and what it shares with others, for caches of plans."""
        ...

    def with_max_wait(self, max_wait_us: int) -> Self:
        """Return a copy for a caller that can wait at most this long, not as long as the rules allow."""
        ...

    def idempotent(self, request_id: bytes) -> Self:
        """Return a copy that is counted once per request id. A repetition gets the result of the first call."""
        ...

    def take_up_to(self, hits: int) -> Self:
        """Return a copy that takes what every limit has left, up to `hits` (StoreResult.granted). Never denied."""
        ...

    def refund(self, hits: int, charged_at_us: int) -> Self:
        """Return a copy that refunds this many of the hits charged at `charged_at_us` of the store's clock."""
        ...


class Store(Protocol):
    """Holds the counters.

    Guarantee: each plan is decided in isolation, all of its limits together; plans of one batch in list order. A plan
    whose result is a StoreError may or may not have been counted. The store itself never sends it again unless the
    server reported that it did not run it.
    """

    @property
    def is_synchronous(self) -> bool:
        """Return True if results arrive in the same event loop iteration, so that no deadline is too close to ask."""
        ...

    def prepare(self, plan: Plan) -> PreparedPlan:
        """Do the work that depends on the plan alone. The caller caches the result. The plan has at least one step."""
        ...

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        """Return the result of each plan, in order, or the error. An error of one run does not affect other runs."""
        ...

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        """Return a plan that refunds what `prepared` was charged. It is never denied, and skips windows that ended."""
        ...

    def decode_key(self, key: Hashable) -> bytes:
        """Return the key of the plan that one of the `keys` of a prepared plan stands for."""
        ...

    async def close(self) -> None: ...
