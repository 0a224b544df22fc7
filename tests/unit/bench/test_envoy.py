"""Envoy makes of the load's requests what the load would ask itself, and only what the service allowed is counted."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from itertools import cycle
from pathlib import Path

import pytest
from hpack import Decoder

from bench import answers, envoy, wire, workload
from bench.connection import Connection, LoadError, Target
from bench.load import Load
from bench.pace import Paced
from bench.servers import Servers, StartedEnvoy
from tests.servers import Service

KEYS = 50


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    started = Servers(tmp_path, 0, 0)
    yield started
    started.close()


def service(tmp_path: Path, most: int) -> Service:
    workload.write_rules(tmp_path, workload.RuleSet(most=most))
    return Service({"RUNTIME_ROOT": tmp_path, "RUNTIME_SUBDIRECTORY": workload.SUBDIRECTORY, "USE_STATSD": "false"})


def through(started: StartedEnvoy) -> Target:
    return Target(started.address, None, wire.HTTP)


def ask_two(started: StartedEnvoy, requests: list[bytes]) -> None:
    """One after the other."""
    connection = Connection(through(started))
    with closing(connection):
        connection.prime(iter(requests), 1)


def test_a_request_is_one_frame_of_headers_that_leaves_no_mark_in_the_table() -> None:
    decoder = Decoder()
    for number, request in enumerate(envoy.requests(3)):
        length, kind, flags = int.from_bytes(request[:3], "big"), request[3], request[4]
        assert (length, kind, flags) == (len(request) - 9, wire.HEADERS, wire.END_HEADERS | wire.END_STREAM)
        assert [(str(name), str(value)) for name, value in decoder.decode(request[9:])] == [
            (":method", "GET"),
            (":scheme", "http"),
            (":path", f"/route-00000{number}"),
            (":authority", "api.example.com"),
            ("x-tenant", f"tenant-0{number}"),
            ("x-user", f"user-00000{number}"),
        ]
        assert not decoder.header_table.dynamic_entries


def test_requests_without_a_body_need_no_window() -> None:
    ours, theirs = socket.socketpair()

    class Paired(Target):
        def connect(self) -> socket.socket:
            return ours

    with theirs, closing(Connection(Paired("nowhere", None, wire.HTTP))) as connection:
        theirs.sendall(wire.settings({}))
        connection.receive()
        ours.setblocking(False)
        # Over twice what a window has room for by default, of which no more is given.
        assert connection.ask(2_000, cycle(envoy.requests(1))) == 2_000


@pytest.mark.e2e
def test_the_service_is_asked_once_about_each_request(tmp_path: Path, servers: Servers) -> None:
    with service(tmp_path, workload.PLENTY) as asked:
        started = servers.envoy("envoy", asked.grpc_port)
        with Load(through(started), envoy.requests(KEYS), in_flight=16, connections=2) as load:
            load.run(0, at_least_calls=2_000)
            answered = load.drain()
        assert answered >= 2_000
        answers.check_allowed(started.admin_port, answered)
        with pytest.raises(
            LoadError, match=f"answered {answered + 1} requests, of which the service allowed {answered}"
        ):
            answers.check_allowed(started.admin_port, answered + 1)
        with Paced(through(started), envoy.requests(KEYS), connections=1) as paced:
            assert paced.run(500, 0.1).calls == 50


@pytest.mark.e2e
def test_both_descriptors_of_a_request_meet_their_limits(tmp_path: Path, servers: Servers) -> None:
    """Each with a key of its own: the first of two callers who share one of them has used it up."""
    ours = wire.get({":path": "/a", ":authority": "api", "x-tenant": "t", "x-user": "alice"})
    same_route = wire.get({":path": "/a", ":authority": "api", "x-tenant": "t", "x-user": "bob"})
    same_user = wire.get({":path": "/b", ":authority": "api", "x-tenant": "t", "x-user": "alice"})
    for another in (same_route, same_user):
        with service(tmp_path, 1) as asked:
            started = servers.envoy("envoy", asked.grpc_port)
            with pytest.raises(LoadError, match=r"a call failed: .*x-envoy-ratelimited: true"):
                ask_two(started, [ours, another])


@pytest.mark.e2e
def test_a_service_that_does_not_answer_gives_no_figures(tmp_path: Path, servers: Servers) -> None:
    with service(tmp_path, workload.PLENTY) as asked:
        started = servers.envoy("envoy", asked.grpc_port)
    with pytest.raises(LoadError, match="a call failed"):
        ask_two(started, envoy.requests(2))


@pytest.mark.e2e
def test_an_envoy_without_the_filter_asks_nobody(servers: Servers) -> None:
    started = servers.envoy("envoy", None)
    with Load(through(started), envoy.requests(KEYS), in_flight=16, connections=2) as load:
        load.run(0, at_least_calls=2_000)
        assert load.drain() >= 2_000
    answers.check_allowed(started.admin_port, 0)
