"""Validation of responses: they must be decisions of the service, and traced where required."""

from __future__ import annotations

import time
from typing import Any

from bench import envoy
from bench.collector import fetch_received
from bench.connection import LoadError
from bench.fleet import TRACED_SHARE
from bench.scenarios import RequestKind, Scenario, Server
from ratelimit_rls.protos.messages import CheckResponse, RateLimitResponse

TOO_MANY_REQUESTS = 429
EXPORT_TIMEOUT_S = 10.0


def check_samples(scenario: Scenario, samples: list[bytes]) -> None:
    """Check that sampled responses are OK for every descriptor, decoded with protobuf."""
    if not samples:
        raise LoadError("no response was kept to be checked")
    if scenario.request_kind is RequestKind.CHECKS:
        for sample in samples:
            _check_authz_response(CheckResponse.FromString(sample))
        return
    for sample in samples:
        answer = RateLimitResponse.FromString(sample)
        if scenario.server is Server.LIMITADOR:  # no statuses; bench/limitador.py checked that it counts
            if answer.overall_code != RateLimitResponse.OK:
                raise LoadError(f"expected OK, got:\n{answer}")
            continue
        if scenario.some_are_denied and answer.overall_code == RateLimitResponse.OVER_LIMIT:
            continue
        if scenario.all_are_denied:
            raise LoadError(f"expected to be denied, got:\n{answer}")
        codes = [status.code for status in answer.statuses]
        if answer.overall_code != RateLimitResponse.OK or codes != [RateLimitResponse.OK] * scenario.descriptors:
            raise LoadError(f"expected OK for {scenario.descriptors} descriptors, got:\n{answer}")
        if not all(status.HasField("current_limit") for status in answer.statuses):
            raise LoadError(f"no limit applies to a descriptor, so nothing was decided:\n{answer}")


def check_exported(collector: str, calls: int) -> None:
    """Check that the service was scraped and exported the expected number of traces, except the last ones."""
    give_up = time.monotonic() + EXPORT_TIMEOUT_S
    while (result := fetch_received(collector)).calls < calls * TRACED_SHARE / 2 or not result.scrapes:
        if time.monotonic() > give_up:
            raise LoadError(f"of {calls} calls, {result.calls} were traced, and metrics scraped {result.scrapes} times")
        time.sleep(0.05)
    if result.calls > calls * TRACED_SHARE * 2:
        raise LoadError(f"of {calls} calls, {result.calls} were traced: not {TRACED_SHARE:.0%}")


def _check_authz_response(answer: Any) -> None:
    """Check that a response is a decision by a limit: rejecting unknown keys would be cheaper."""
    if answer.status.code == 0 and answer.HasField("ok_response"):
        return
    if answer.denied_response.status.code != TOO_MANY_REQUESTS:
        raise LoadError(f"expected a decision about a limit, got:\n{answer}")


def check_allowed(admin_port: int, requests: int) -> None:
    """Check that the service allowed every request that Envoy answered: none bypassed the filter."""
    allowed = envoy.allowed_requests(admin_port)
    if allowed != requests:
        raise LoadError(f"Envoy answered {requests} requests, of which the service allowed {allowed}")
