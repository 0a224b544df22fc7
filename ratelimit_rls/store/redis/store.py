"""Store on one Redis: a single server, or the current master of a Sentinel deployment.

    calls of one event loop iteration ─► runs of at most 128 limits ─► one FCALL or EVALSHA each ─► results

Several batches may be in flight on the one connection; Redis answers them in order. If a batch gets no reply in time,
the connection is closed: later replies would be late, too, and nothing must accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ratelimit_rls.core.model import Plan, PlanTemplate, StoreResult, construct
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.core.storage_keys import Location
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.redis.deployment import SingleNode
from ratelimit_rls.store.redis.keyspace import RedisKeyspace
from ratelimit_rls.store.redis.resp import bulk, bulk_value
from ratelimit_rls.store.script_codec import EncodedPlan, PlanLayout, make_layout


class RedisStore(RedisKeyspace):
    """A store whose counters are all on one server."""

    def __init__(self, server: SingleNode) -> None:
        super().__init__(server)
        self._server = server

    def locations(self, plan: Plan) -> list[Location]:
        """Return the place of each counter of a plan."""
        return [self.realms[0].location(key) for key in plan.keys]

    def prepare(self, plan: Plan) -> PreparedPlan:
        # `construct` takes half the time of calling the class, which matters when every request is new.
        keys = tuple([b"$%d\r\n%b\r\n" % (len(key), key) for key in plan.keys])  # as `bulk` encodes them
        return construct(EncodedPlan, (keys, layout(plan.template), None, None, None, None))

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        charged = cast("EncodedPlan[bytes]", prepared)
        own = tuple(charged.keys[number] for number in refund.numbers)
        # The earliest, since a refund must not go to a window that was never charged.
        charged_at_us = min(refund.charged_at_us)
        return EncodedPlan(
            own, layout(refund.template), charged_at_us=charged_at_us, idempotency_key=charged.idempotency_key
        )

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        plans = cast("Sequence[EncodedPlan[bytes]]", batch)
        results = await self._server.spend(plans, [0] * len(plans))
        self.publish_freed(plans)
        return results


@per_template
def layout(template: PlanTemplate) -> PlanLayout[bytes]:
    """Return the layout of plans whose keys are encoded as RESP."""
    return make_layout(template, bulk, bulk_value)
