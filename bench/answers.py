"""What answers must be for the figures to count: decisions, traced where they are to be, and made by the service."""

from __future__ import annotations

import time
from typing import Any

from bench import envoy
from bench.collector import taken
from bench.connection import LoadError
from bench.fleet import TRACED_SHARE
from bench.scenarios import Asked, Scenario
from ratelimit_rls.transport.grpc.messages import CheckResponse, RateLimitResponse

TOO_MANY_REQUESTS = 429
TOLD_WITHIN_S = 10.0


def look_at(scenario: Scenario, samples: list[bytes]) -> None:
    """Some answers, taken under load, say OK to every descriptor when read with real protobuf."""
    if not samples:
        raise LoadError("no answer was kept to be looked at")
    if scenario.asked is Asked.CHECKS:
        for sample in samples:
            _look_at_check(CheckResponse.FromString(sample))
        return
    for sample in samples:
        answer = RateLimitResponse.FromString(sample)
        if scenario.some_are_refused and answer.overall_code == RateLimitResponse.OVER_LIMIT:
            continue
        if scenario.all_are_refused:
            raise LoadError(f"expected to be refused, got:\n{answer}")
        codes = [status.code for status in answer.statuses]
        if answer.overall_code != RateLimitResponse.OK or codes != [RateLimitResponse.OK] * scenario.descriptors:
            raise LoadError(f"expected OK for {scenario.descriptors} descriptors, got:\n{answer}")
        if not all(status.HasField("current_limit") for status in answer.statuses):
            raise LoadError(f"a descriptor met no limit, so nothing was decided:\n{answer}")


def check_told(collector: str, calls: int) -> None:
    """The service was scraped and has traced as many calls as it was to, but for the last, which are not sent yet."""
    give_up = time.monotonic() + TOLD_WITHIN_S
    while (told := taken(collector)).calls < calls * TRACED_SHARE / 2 or not told.scrapes:
        if time.monotonic() > give_up:
            raise LoadError(f"of {calls} calls, {told.calls} were traced, and metrics scraped {told.scrapes} times")
        time.sleep(0.05)
    if told.calls > calls * TRACED_SHARE * 2:
        raise LoadError(f"of {calls} calls, {told.calls} were traced: not {TRACED_SHARE:.0%}")


def _look_at_check(answer: Any) -> None:
    """Passed or refused by a limit, and for no other reason: a key that nobody knows would be quick to deal with."""
    if answer.status.code == 0 and answer.HasField("ok_response"):
        return
    if answer.denied_response.status.code != TOO_MANY_REQUESTS:
        raise LoadError(f"expected a decision about a limit, got:\n{answer}")


def check_allowed(admin_port: int, requests: int) -> None:
    """Each request that Envoy answered was one that the service allowed: none went past the filter."""
    allowed = envoy.allowed_requests(admin_port)
    if allowed != requests:
        raise LoadError(f"Envoy answered {requests} requests, of which the service allowed {allowed}")
