"""The store on one Redis: a single server, or the master that sentinels watch over.

    calls of one turn of the loop ─► runs of at most 128 limits ─► one EVALSHA each ─► answers

Several batches may be under way at once on the one connection; Redis answers them in order. A batch without an answer
in time takes the connection with it: everything behind it would be late too, and nothing piles up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ratelimit_rls.core.model import Answer, Outline, Plan, filled
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.batch import Form, PackedPlan, Spec, form_of, runs, unpack
from ratelimit_rls.store.redis.commands import bulk, word_of
from ratelimit_rls.store.redis.counters import RedisCounters
from ratelimit_rls.store.redis.servers import Servers, Work


class RedisStore(RedisCounters):
    def __init__(self, server: Servers) -> None:
        super().__init__(server)
        self._server = server

    def prepare(self, plan: Plan) -> Prepared:
        # In half the time of asking the class, which counts where every request is a new one.
        return filled(PackedPlan, (tuple(map(bulk, plan.keys)), form(plan.outline), None, None, None, None))

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        charged = cast("PackedPlan[bytes]", prepared)
        own = tuple(charged.keys[number] for number in refund.numbers)
        # The earliest, since what is given back must not go to a window that was never charged.
        moment_us = min(refund.charged_at_us)
        return PackedPlan(own, form(refund.outline), charged_at_us=moment_us, record=charged.record)

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        plans = cast("Sequence[PackedPlan[bytes]]", batch)
        pieces = list(runs(plans))
        replies = await self._server.decide([Work(0, piece) for piece in pieces])
        self.tell_freed(plans)
        answers: list[Answer | StoreError] = []
        for piece, reply in zip(pieces, replies, strict=True):
            answers += answers_of(piece, reply)
        return answers


def answers_of(piece: Sequence[PackedPlan[bytes]], reply: Any) -> Sequence[Answer | StoreError]:
    if isinstance(reply, StoreError):
        return [reply] * len(piece)
    try:
        return unpack(piece, reply)
    except (IndexError, TypeError):
        return [StoreUnavailable("Redis answered what the script never says")] * len(piece)


@per_outline
def form(outline: Outline) -> Form[bytes]:
    """Specs as RESP, so that a batch is joined from them as they are."""
    return form_of(outline, _spec, bulk, word_of)


def _spec(spec: Spec) -> bytes:
    return b"".join([bulk(word if isinstance(word, bytes) else b"%d" % word) for word in spec])
