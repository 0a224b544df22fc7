"""Limits for Limitador are those of the default rules, and a server that does not count is not measured."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from bench import answers, limitador, workload
from bench.connection import LoadError
from bench.scenarios import MIXED, of_limitador
from ratelimit_rls.protos.messages import RateLimitResponse
from tests.unit.bench.test_load import OK, OVER_LIMIT, front


@contextmanager
def counters(number: int) -> Iterator[int]:
    """A server that responds with this number of counters; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/counters/bench"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([{"remaining": 1}] * number).encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_every_descriptor_has_its_own_limit(tmp_path: Path) -> None:
    limits = yaml.safe_load(limitador.write_limits(tmp_path).read_text())
    assert [limit["variables"] for limit in limits] == [
        [f"descriptors[{index}]['tenant']", f"descriptors[{index}]['{key}']"]
        for index, key in enumerate(workload.LIMITED_BY)
    ]
    assert {(limit["namespace"], limit["max_value"], limit["seconds"]) for limit in limits} == {
        (workload.DOMAIN, workload.PLENTY, 3600)
    }


def test_server_that_counts_every_descriptor_is_accepted(tmp_path: Path) -> None:
    observed: list[bytes] = []
    with front(tmp_path / "grpc.sock", OK, observed) as target, counters(10) as port:
        limitador.check_counters(target.address, port, 5)
    assert observed == [workload.request(number, 5) for number in range(2)]


def test_server_without_limits_is_not_measured(tmp_path: Path) -> None:
    with (
        front(tmp_path / "grpc.sock", OK, []) as target,
        counters(0) as port,
        pytest.raises(LoadError, match="expected 10 counters of two calls in Limitador"),
    ):
        limitador.check_counters(target.address, port, 5)


def test_responses_of_limitador_have_no_statuses_but_must_be_ok() -> None:
    scenario = of_limitador(MIXED)
    answers.check_samples(scenario, [OK])
    with pytest.raises(LoadError, match="expected OK"):
        answers.check_samples(scenario, [OK, OVER_LIMIT])
    with pytest.raises(LoadError, match="expected OK for 5 descriptors"):
        answers.check_samples(MIXED, [RateLimitResponse(overall_code=RateLimitResponse.OK).SerializeToString()])
