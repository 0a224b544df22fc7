"""Calls over two Redis servers end as on one: the same verdicts, and the same counters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Algorithm, Answer, Charge, Plan, Unit
from ratelimit_rls.core.refund import refund
from tests.servers import RedisServer
from tests.stores import Asked, StoreUnderTest, call, redis_store, split_store, step


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RedisServer]]:
    with RedisServer() as one, RedisServer() as main, RedisServer() as seconds:
        yield [one, main, seconds]


@pytest.fixture
def stores(servers: list[RedisServer]) -> Iterator[tuple[StoreUnderTest, StoreUnderTest]]:
    """One Redis, and two."""
    for server in servers:
        server.flush()
    one, main, seconds = servers
    with redis_store(one) as single, split_store(main, seconds) as split:
        yield single, split


def main(limit: int = 10, **more: object) -> Asked:
    return step("main", limit, **more)  # type: ignore[arg-type]


def second(limit: int = 10, **more: object) -> Asked:
    return step("second", limit, unit=Unit.SECOND, **more)  # type: ignore[arg-type]


ALWAYS = {"charge": Charge.ALWAYS}
BUCKET = {"algorithm": Algorithm.TOKEN_BUCKET}


@pytest.mark.parametrize(
    ("before", "asked"),
    [
        pytest.param([call(main(cost=5))], call(main(cost=-3), second(0)), id="refund, refused elsewhere"),
        pytest.param([call(main(cost=5))], call(main(cost=-3), second()), id="refund, admitted"),
        pytest.param(
            [call(main(cost=5), second(cost=5))],
            call(main(cost=-3), step("other", 0), second(cost=-2)),
            id="refunds on both, refused on one",
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
            id="a slot to wait for, refused elsewhere",
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
        pytest.param([], call(main(), second(0)), id="refused elsewhere"),
        pytest.param([], call(main(0), second(**ALWAYS)), id="always elsewhere"),
    ],
)
def test_twoservers_say_and_count_what_one_does(
    stores: tuple[StoreUnderTest, StoreUnderTest], before: list[Plan], asked: Plan
) -> None:
    told: list[tuple[bool, list[int], list[int]]] = []
    for store in stores:
        for plan in before:
            store.spend(plan)
        (answer,) = store.spend(asked)
        looks = [
            store.ask(Asked(key, step(limit=one.limit.requests_per_unit, algorithm=one.limit.algorithm, cost=0).step))
            for key, one in zip(asked.keys, asked.outline.steps, strict=True)
        ]
        told.append(
            (
                answer.refused,
                [reading.left for reading in answer.readings],
                [look.readings[0].left for look in looks],
            )
        )

    assert told[0] == told[1]


def test_what_is_given_back_names_the_moment_of_each_server(stores: tuple[StoreUnderTest, StoreUnderTest]) -> None:
    """The answer of the second may come from the other side of a minute; the first's charge is of the old one."""
    _, store = stores
    store.now_us += 60_000_000 - store.now_us % 60_000_000 - 1
    limits = call(main(1), second(5))
    (answer,) = store.spend(limits)
    moments_us = (answer.moments_us[0], answer.moments_us[1] + 1)
    assert answer.moments_us == (store.now_us, store.now_us)

    store.now_us += 1
    assert not store.spend(call(main(1)))[0].refused
    late = answer._replace(now_us=max(moments_us), moments_us=moments_us)
    owed = refund(decide(limits.outline, late))
    assert owed is not None
    store.answered(store.store.opposite(store.store.prepare(limits), owed))

    assert store.spend(call(main(1)))[0].refused


def test_a_record_that_one_server_has_lost_does_not_admit_what_was_given_back(
    stores: tuple[StoreUnderTest, StoreUnderTest], servers: list[RedisServer]
) -> None:
    _, store = stores
    store.spend(call(second(1)))
    prepared = store.store.prepare(call(main(1), second(1))).once(b"id")
    assert store.answered(prepared)[0].refused
    servers[2].flush()
    (again,) = store.answered(prepared)

    assert not again.refused
    assert store.spend(call(main(1)))[0].refused  # the retry was charged for


def test_an_id_cannot_be_written_so_that_it_is_another_calls(stores: tuple[StoreUnderTest, StoreUnderTest]) -> None:
    _, store = stores
    both = store.store.prepare(call(main(), second()))
    one = store.store.prepare(call(second()))
    store.answered(both.once(b"x"))
    (other,) = store.answered(one.once(b"x\n" + bytes(both.keys[0])))

    assert isinstance(other, Answer)
    assert not other.again
