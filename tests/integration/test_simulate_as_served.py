"""`simulate` on a log gives the same counts as a real server that receives the same requests over gRPC.

A server's clock cannot be controlled, so these rules do not depend on it: their windows last a day or a year, and their
buckets refill after half an hour. Nor do they depend on the order in which a server handles concurrent calls: at most
one of the limits of a call can deny it. Time-dependent behaviour is compared call by call in
tests/unit/simulation/test_replay.py, where the clock can be controlled.
"""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, NamedTuple

import pytest

from bench import wire
from bench.connection import Connection, Target
from ratelimit_rls.cli import main
from ratelimit_rls.simulation.clock import format_timestamp
from tests.support.service_process import ServiceProcess

if TYPE_CHECKING:
    from tests.support.servers import RedisServer

pytestmark = pytest.mark.slow

LINES = 100_000
IN_FLIGHT = 64
RULES = """\
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 40}}
  - {key: user, value: u1, rate_limit: {unlimited: true}}
  - {key: path, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 9000}}
  - {key: log, rate_limit: {unit: day, requests_per_unit: 30, algorithm: sliding_log}}
  - {key: slide, rate_limit: {unit: year, requests_per_unit: 30, algorithm: sliding_window}}
  - {key: token, rate_limit: {unit: day, requests_per_unit: 40, algorithm: token_bucket, burst: 20}}
  - {key: leaky, rate_limit: {unit: day, requests_per_unit: 40, algorithm: leaky_bucket}}
  - {key: gcra, rate_limit: {unit: day, requests_per_unit: 40, algorithm: gcra, burst: 10}}
"""
ALONE = ("log", "slide", "token", "leaky", "gcra", "nothing")
Fields = dict[str, str]


def traffic() -> Iterator[Fields]:
    drawn = random.Random(3)
    for _ in range(LINES):
        caller = f"u{int(drawn.random() ** 2 * 1000)}"
        if drawn.random() < 0.5:
            yield {"user": caller, "path": f"/{drawn.randrange(5)}"}
        else:
            yield {drawn.choice(ALONE): caller}


class Trial(NamedTuple):
    rules: Path
    lines: list[Fields]
    report: dict[str, object]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Simulate the log once; it is the same for every server."""
    directory = tmp_path_factory.mktemp("trial")
    rules = directory / "rules.yaml"
    rules.write_text(RULES)
    lines = list(traffic())
    with redirect_stdout(io.StringIO()) as out:
        simulate(lines, rules, directory / "access.log")
    return Trial(rules, lines, json.loads(out.getvalue()))


def simulate(lines: list[Fields], rules: Path, log: Path) -> None:
    now_us = time.time_ns() // 1000
    with log.open("w") as written:
        for number, line in enumerate(lines):
            written.write(json.dumps({"start_time": format_timestamp(now_us + 500 * number), **line}) + "\n")
    described = [word for key in ("user", "path", *ALONE) for word in ("--descriptor", f"{key}=%{key}%")]
    main(["simulate", str(rules), "--traffic", str(log), "--domain", "edge", *described, "--format", "json"])


def serve(service: ServiceProcess, lines: list[Fields]) -> int:
    """Return how many requests are denied."""
    messages = (wire.rate_limit_request("edge", [[entry] for entry in line.items()]) for line in lines)
    calls = map(wire.data, messages)
    connection = Connection(Target(("127.0.0.1", service.grpc_port)))
    try:
        connection.prime(calls, IN_FLIGHT)
        while connection.answered < len(lines):
            connection.send_calls(min(IN_FLIGHT, len(lines) - connection.answered) - connection.in_flight, calls)
            assert select([connection.socket], [], [], 10)[0], f"no answer after {connection.answered}"
            connection.receive()
        return connection.denied
    finally:
        connection.close()


@pytest.mark.parametrize("where", ["embedded", "redis"])
def test_simulated_counts_equal_those_of_a_real_server(where: str, any_redis: RedisServer, trial: Trial) -> None:
    rules, lines, report = trial
    variables = {"RLS_RULES": rules, **({"REDIS_URL": any_redis.address} if where == "redis" else {})}

    with ServiceProcess(variables) as service:
        denied = serve(service, lines)
        counters = {name: int(number) for name, number in map(_counter, service.debug("/stats").body.splitlines())}

    (rule_set,) = report["rule_sets"]  # type: ignore[misc]
    assert report["calls"] == LINES
    assert rule_set["denied"] == denied  # type: ignore[has-type]
    limited = [rule for rule in rule_set["per_rule"] if rule["rule"] != "edge.user_u1"]  # type: ignore[has-type]
    assert len(limited) == 7
    for rule in limited:
        counted = f"ratelimit.service.rate_limit.{rule['rule']}"
        over, shadowed = counters[f"{counted}.over_limit"], counters[f"{counted}.shadow_mode"]
        assert (rule["hits"], rule["denied"], rule["passed_over_limit"]) == (
            counters[f"{counted}.total_hits"],
            over - shadowed,
            shadowed,
        )
        assert rule["hits"] > over > 0, f"{rule['rule']} is not put to the test"


def _counter(line: str) -> list[str]:
    return line.split(": ")
