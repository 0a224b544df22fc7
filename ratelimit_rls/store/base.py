"""What every store does: decide a batch of plans, each in one atomic step, in order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, Self

from ratelimit_rls.core.model import Answer, Plan
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.batch import Form


class Prepared(Protocol):
    """A plan in the form its store likes best. Two are equal if they ask the same of the same counters."""

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What tells the plan's counters from others, one for each key of the plan."""
        ...

    @property
    def form(self) -> Form[Any]:
        """What it shares with all plans of its outline."""
        ...

    @property
    def gives_back(self) -> bool:
        """Whether others may find more room after it."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether it asks what its plan says and nothing more, as `prepare` made it: see the methods below."""
        ...

    @property
    def own_bytes(self) -> int:
        """What it weighs beside its keys and what it shares with others, for whoever keeps many."""
        ...

    def within(self, patience_us: int) -> Self:
        """The same for a caller that can wait so long and no longer; as it is, any wait the rules allow will do."""
        ...

    def once(self, request_id: bytes) -> Self:
        """The same for a call that is counted once, however often it comes under this id: it is answered as then."""
        ...

    def at_most(self, hits: int) -> Self:
        """The same to take as many hits as every limit has left, up to so many (Answer.granted); never refused."""
        ...

    def returned(self, hits: int, charged_at_us: int) -> Self:
        """What gives back so many of the hits that were taken at a moment of the store's clock."""
        ...


class Store(Protocol):
    """Counts.

    Guarantee: each plan is decided as if alone, all of its limits together; plans of one batch in list order. A plan
    that was answered with a StoreError may or may not have been counted, and is never sent again by the store itself
    unless the server said that it did not run.
    """

    @property
    def decides_here(self) -> bool:
        """Whether it answers in the same turn of the loop: nobody's deadline is too near to ask it."""
        ...

    def prepare(self, plan: Plan) -> Prepared:
        """Work that depends on the plan alone, done once and kept beside it. The plan has at least one step."""
        ...

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        """The answer to each plan, in order, or why there is none; the trouble of one run is not another's."""
        ...

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        """What gives back what `prepared` was charged. Never refused; what is over by then is not given back."""
        ...

    async def close(self) -> None: ...
