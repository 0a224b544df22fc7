"""Plans over several slots: how their parts are merged, and when the short way may be taken."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Reading, StoreResult
from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.cluster import Cluster
from ratelimit_rls.store.redis.script_node import RedisOptions
from ratelimit_rls.store.redis.sharded_store import ShardedPlan, ShardedStore, in_full, merge, merge_passing
from tests.support.stores import KeyedOp, call, long_step, step

SERVERS = RedisServers("cluster", (RedisAddress("127.0.0.1", 1),))
USER, ROUTE, PLAN = long_step("user", 10), long_step("route", 10), long_step("plan", 10)


def prepared(*limits: KeyedOp) -> ShardedPlan:
    return ShardedStore(Cluster(SERVERS, RedisOptions())).prepare(call(*limits))


def passing(now_us: int, left: int) -> StoreResult:
    return StoreResult.of(False, now_us, (Reading(left, 0, 7),))


RESULTS = [passing(1_000, 3), passing(3_000, 1), passing(2_000, 2)]


def test_parts_that_pass_are_merged_as_any_others_are() -> None:
    plan = prepared(USER, ROUTE, PLAN)
    merged, refunds = merge(plan, RESULTS)

    assert merge_passing(RESULTS) == merged
    assert not refunds
    assert isinstance(merged, StoreResult)
    assert [reading.left for reading in merged.readings] == [3, 1, 2]
    assert merged.decided_at_us == (1_000, 3_000, 2_000)
    assert merged.now_us == 3_000


def test_parts_that_pass_may_have_their_time_and_numbers_only() -> None:
    short = [(result.now_us, result.numbers) for result in RESULTS]

    assert merge_passing(short) == merge_passing(RESULTS)
    assert merge_passing([short[0], *RESULTS[1:]]) == merge_passing(RESULTS)
    assert [in_full(one) for one in short] == RESULTS
    assert [in_full(one) for one in RESULTS] == RESULTS


@pytest.mark.parametrize(
    "other",
    [
        StoreResult.of(True, 2_000, (Reading(0, 5, 5),)),
        passing(2_000, 2)._replace(replayed=True),
        StoreUnavailable("no connection"),
    ],
)
def test_results_with_a_denial_replay_or_failure_are_not_merged_as_passing(
    other: StoreResult | StoreUnavailable,
) -> None:
    assert merge_passing([RESULTS[0], other, RESULTS[2]]) is None


def test_quota_calls_are_not_decided_from_the_results_of_their_parts() -> None:
    assert prepared(USER, ROUTE).split.passes_with_its_parts
    assert not prepared(USER, step("quota", 10, quota=True)).split.passes_with_its_parts


def test_calls_with_equal_parts_share_their_split() -> None:
    template = call(USER, ROUTE)
    store = ShardedStore(Cluster(SERVERS, RedisOptions()))
    first, second = (store.prepare(template._replace(keys=keys)) for keys in ((b"{a}", b"{b}"), (b"{c}", b"{d}")))
    together = store.prepare(template._replace(keys=(b"{a}1", b"{a}2")))

    assert first.split is second.split
    assert [part.numbers for part in first.split.parts] == [(0,), (1,)]
    assert [part.numbers for part in together.split.parts] == [(0, 1)]
    assert together.split.parts[0].template is template.template
