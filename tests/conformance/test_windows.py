"""Several limits on one descriptor, windows of any length, and calendar windows."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Code, Decision, Descriptor, Entry, Request, StoreResult
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.rules.compile import compile_documents
from tests.support.stores import StoreUnderTest

MINUTE_US = 60_000_000
DAY_US = 86_400_000_000


class Client:
    """Calls with one descriptor `k=v` under given rules."""

    def __init__(self, store: StoreUnderTest, rules: str) -> None:
        text = f"domain: d\ndescriptors:\n  - key: k\n    {rules}\n"
        self._planner = Planner(compile_documents({"f": text.encode()}).tree, Policy())
        self._store = store

    def ask(self, hits: int = 1) -> Decision:
        plan = self._planner.plan(Request("d", (Descriptor((Entry("k", "v"),), hits=hits),)))
        (answer,) = self._store.spend(plan)
        assert isinstance(answer, StoreResult)
        return decision_of(plan.template, answer)


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


PREMIUM = (
    "limits: [{unit: minute, requests_per_unit: 1000, algorithm: token_bucket, burst: 1500}, "
    "{unit: day, requests_per_unit: 100000, calendar: true}]"
)


def test_descriptor_with_three_limits(store: StoreUnderTest) -> None:
    store.now_us = at("2031-05-04T10:00:00")
    client = Client(store, PREMIUM)

    assert [client.ask(100).code for _ in range(15)] == [Code.OK] * 15
    denied = client.ask()
    assert (denied.code, denied.statuses[0].reset_s) == (Code.OVER_LIMIT, 1)
    # The denial charged nothing to the day, and a minute refills a thousand.
    store.now_us += MINUTE_US
    assert client.ask(0).statuses[0].remaining == 1000
    assert client.ask(1000).code is Code.OK
    assert client.ask().code is Code.OVER_LIMIT
    store.now_us += MINUTE_US
    assert client.ask(800).code is Code.OK

    for _ in range(96):
        store.now_us += 2 * MINUTE_US
        client.ask(1000)
    store.now_us += 2 * MINUTE_US
    assert client.ask(0).statuses[0].remaining == 100_000 - 1500 - 1000 - 800 - 96_000
    capped = client.ask(1000)
    assert capped.code is Code.OVER_LIMIT
    step = capped.statuses[0].step
    assert step is not None
    assert step.limit.timezone == "UTC"

    store.now_us = at("2031-05-04T23:59:59") + 999_999
    assert client.ask(1000).code is Code.OVER_LIMIT
    store.now_us += 1
    assert client.ask(1000).code is Code.OK


def test_status_is_of_denying_or_least_remaining_limit(store: StoreUnderTest) -> None:
    client = Client(store, "limits: [{unit: minute, requests_per_unit: 3}, {unit: day, requests_per_unit: 5}]")

    statuses = [client.ask().statuses[0] for _ in range(4)]

    assert [status.remaining for status in statuses] == [2, 1, 0, 0]
    assert [status.code for status in statuses] == [Code.OK, Code.OK, Code.OK, Code.OVER_LIMIT]
    store.now_us += MINUTE_US
    assert [client.ask().statuses[0].remaining for _ in range(2)] == [1, 0]
    denied = client.ask().statuses[0]
    assert denied.step is not None
    assert (denied.code, denied.step.limit.requests_per_unit) == (Code.OVER_LIMIT, 5)


def test_quota_with_two_limits_fails_once(store: StoreUnderTest) -> None:
    text = """
domain: d
descriptors:
  - {key: a, quota_mode: true, limits: [{unit: minute, requests_per_unit: 1}, {unit: hour, requests_per_unit: 9}]}
  - {key: b, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 2}}
"""
    planner = Planner(compile_documents({"f": text.encode()}).tree, Policy())
    both = planner.plan(Request("d", (Descriptor((Entry("a", "1"),)), Descriptor((Entry("b", "1"),)))))
    alone = planner.plan(Request("d", (Descriptor((Entry("a", "2"),)),)))

    assert [store.spend(both)[0].denied for _ in range(3)] == [False, False, True]
    assert [store.spend(alone)[0].denied for _ in range(2)] == [False, True]


def test_exhausted_quota_does_not_fail_another_quota(store: StoreUnderTest) -> None:
    text = """
domain: d
descriptors:
  - {key: a, quota_mode: true, limits: [{unit: minute, requests_per_unit: 1}, {unit: hour, requests_per_unit: 1}]}
  - {key: b, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 9}}
"""
    planner = Planner(compile_documents({"f": text.encode()}).tree, Policy())
    both = planner.plan(Request("d", (Descriptor((Entry("a", "1"),)), Descriptor((Entry("b", "1"),)))))

    assert [store.spend(both)[0].denied for _ in range(3)] == [False, False, False]


def test_longest_of_several_denials_is_reported(store: StoreUnderTest) -> None:
    client = Client(store, "limits: [{unit: minute, requests_per_unit: 1}, {unit: hour, requests_per_unit: 1}]")
    client.ask()

    assert client.ask().statuses[0].reset_s == 3600


@pytest.mark.parametrize(
    ("rule", "seconds"), [("unit: second, unit_multiplier: 30", 30), ("unit: minute, unit_multiplier: 5", 300)]
)
def test_unit_multiplier(store: StoreUnderTest, rule: str, seconds: int) -> None:
    client = Client(store, f"rate_limit: {{{rule}, requests_per_unit: 2}}")

    assert [client.ask().code for _ in range(3)] == [Code.OK, Code.OK, Code.OVER_LIMIT]
    store.now_us += seconds * 1_000_000 - 1
    assert client.ask().code is Code.OVER_LIMIT
    store.now_us += 1
    assert client.ask().code is Code.OK


@pytest.mark.parametrize(
    ("unit", "zone", "used", "before", "after"),
    [
        ("month", "Europe/Berlin", "2032-03-01T00:00:00", "2032-03-31T21:59:59", "2032-03-31T22:00:00"),  # summer time
        ("month", "America/New_York", "2032-02-01T05:00:00", "2032-03-01T04:59:59", "2032-03-01T05:00:00"),  # 29 days
        ("month", "Asia/Tokyo", "2033-01-31T15:00:00", "2033-02-28T14:59:59", "2033-02-28T15:00:00"),
        ("day", "Europe/Berlin", "2033-03-26T23:00:00", "2033-03-27T21:59:59", "2033-03-27T22:00:00"),  # 23 hours
        ("week", "UTC", "2033-05-02T00:00:00", "2033-05-08T23:59:59", "2033-05-09T00:00:00"),
        ("year", "UTC", "2032-01-01T00:00:00", "2032-12-31T23:59:59", "2033-01-01T00:00:00"),  # 366 days
    ],
)
def test_calendar_window_end(store: StoreUnderTest, unit: str, zone: str, used: str, before: str, after: str) -> None:
    client = Client(store, f"rate_limit: {{unit: {unit}, requests_per_unit: 2, calendar: true, timezone: {zone}}}")
    store.now_us = at(used)
    assert [client.ask().code for _ in range(3)] == [Code.OK, Code.OK, Code.OVER_LIMIT]

    store.now_us = at(before)
    denied = client.ask().statuses[0]
    assert (denied.code, denied.reset_s) == (Code.OVER_LIMIT, 1)
    store.now_us = at(after)
    assert client.ask().code is Code.OK


def test_clock_set_back_over_end_of_month_frees_nothing(store: StoreUnderTest) -> None:
    client = Client(store, "rate_limit: {unit: month, requests_per_unit: 1, calendar: true}")
    store.now_us = at("2034-02-01T00:00:01")
    client.ask()

    store.now_us -= 2_000_000
    assert client.ask().code is Code.OVER_LIMIT
