"""Calls over two Redis servers: the same verdicts and counters as on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Algorithm, Charge, Plan, StoreResult, Unit
from ratelimit_rls.core.refund import refund
from tests.support.servers import RedisServer
from tests.support.stores import KeyedOp, StoreUnderTest, call, redis_store, split_store, step


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RedisServer]]:
    with RedisServer() as one, RedisServer() as main, RedisServer() as seconds:
        yield [one, main, seconds]


@pytest.fixture
def stores(servers: list[RedisServer]) -> Iterator[tuple[StoreUnderTest, StoreUnderTest]]:
    """Return a store on one Redis, and a store on two."""
    for server in servers:
        server.flush()
    one, main, seconds = servers
    with redis_store(one) as single, split_store(main, seconds) as split:
        yield single, split


def main(limit: int = 10, **more: object) -> KeyedOp:
    return step("main", limit, **more)  # type: ignore[arg-type]


def second(limit: int = 10, **more: object) -> KeyedOp:
    return step("second", limit, unit=Unit.SECOND, **more)  # type: ignore[arg-type]


ALWAYS: dict[str, Any] = {"charge": Charge.ALWAYS}
BUCKET = {"algorithm": Algorithm.TOKEN_BUCKET}


@pytest.mark.parametrize(
    ("before", "plan"),
    [
        pytest.param([call(main(cost=5))], call(main(cost=-3), second(0)), id="refund, denied elsewhere"),
        pytest.param([call(main(cost=5))], call(main(cost=-3), second()), id="refund, admitted"),
        pytest.param(
            [call(main(cost=5), second(cost=5))],
            call(main(cost=-3), step("other", 0), second(cost=-2)),
            id="refunds on both, denied on one",
        ),
        pytest.param(
            [call(main(cost=5))],
            call(main(cost=-3), step("other", 10, **ALWAYS), second(0)),
            id="refund beside what is always charged",
        ),
        pytest.param([call(main(cost=5))], call(main(cost=-3, **ALWAYS), second(0)), id="refund under always"),
        pytest.param([call(main(cost=5))], call(main(cost=-3), second(0), shadow_mode=True), id="global shadow mode"),
        pytest.param(
            [call(main(cost=5))],
            call(main(cost=-3, **ALWAYS), second(3, cost=9, **ALWAYS)),
            id="a report over the limit",
        ),
        pytest.param(
            [],
            call(main(2, cost=3, max_delay_us=60_000_000, **BUCKET), second(0), step("other", 5, cost=-1)),
            id="a slot to wait for, denied elsewhere",
        ),
        pytest.param(
            [call(main(1, quota=True), second(1, quota=True))],
            call(main(1, quota=True), second(1, quota=True), step("other", 5, cost=-1)),
            id="quotas that fail together",
        ),
        pytest.param(
            [call(main(1, quota=True))],
            call(main(1, quota=True), second(2, quota=True)),
            id="a quota that passes elsewhere",
        ),
        pytest.param([], call(main(), second(0, shadow=True)), id="shadow elsewhere"),
        pytest.param([], call(main(), second(0)), id="denied elsewhere"),
        pytest.param([], call(main(0), second(**ALWAYS)), id="always elsewhere"),
    ],
)
def test_two_servers_give_the_same_results_and_counters_as_one(
    stores: tuple[StoreUnderTest, StoreUnderTest], before: list[Plan], plan: Plan
) -> None:
    results: list[tuple[bool, list[int], list[int]]] = []
    for store in stores:
        for earlier in before:
            store.spend(earlier)
        (answer,) = store.spend(plan)
        looks = [
            store.ask(KeyedOp(key, step(limit=one.limit.requests_per_unit, algorithm=one.limit.algorithm, cost=0).step))
            for key, one in zip(plan.keys, plan.template.steps, strict=True)
        ]
        results.append(
            (
                answer.denied,
                [reading.left for reading in answer.readings],
                [look.readings[0].left for look in looks],
            )
        )

    assert results[0] == results[1]


def test_a_refund_uses_the_charge_time_of_each_server(stores: tuple[StoreUnderTest, StoreUnderTest]) -> None:
    """The second server may decide in the next minute; the first one's charge belongs to the old minute."""
    _, store = stores
    store.now_us += 60_000_000 - store.now_us % 60_000_000 - 1
    limits = call(main(1), second(5))
    (answer,) = store.spend(limits)
    moments_us = (answer.decided_at_us[0], answer.decided_at_us[1] + 1)
    assert answer.decided_at_us == (store.now_us, store.now_us)

    store.now_us += 1
    assert not store.spend(call(main(1)))[0].denied
    late = answer._replace(now_us=max(moments_us), decided_at_us=moments_us)
    charged = refund(decision_of(limits.template, late))
    assert charged is not None
    store.answered(store.store.refund_of(store.store.prepare(limits), charged))

    assert store.spend(call(main(1)))[0].denied


def test_a_lost_idempotency_record_does_not_admit_a_refunded_call(
    stores: tuple[StoreUnderTest, StoreUnderTest], servers: list[RedisServer]
) -> None:
    _, store = stores
    store.spend(call(second(1)))
    prepared = store.store.prepare(call(main(1), second(1))).idempotent(b"id")
    assert store.answered(prepared)[0].denied
    servers[2].flush()
    (again,) = store.answered(prepared)

    assert not again.denied
    assert store.spend(call(main(1)))[0].denied  # the retry was charged


def test_a_request_id_cannot_collide_with_another_call(stores: tuple[StoreUnderTest, StoreUnderTest]) -> None:
    _, store = stores
    both = store.store.prepare(call(main(), second()))
    one = store.store.prepare(call(second()))
    store.answered(both.idempotent(b"x"))
    (other,) = store.answered(one.idempotent(b"x\n" + bytes(both.keys[0])))  # type: ignore[call-overload]

    assert isinstance(other, StoreResult)
    assert not other.replayed
