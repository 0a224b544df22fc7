"""Load through Envoy: it sends the same descriptors as the direct load, and only allowed requests are counted."""

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
from bench.pace import PacedLoad
from bench.servers import Servers, StartedEnvoy
from tests.support.servers import Service

KEYS = 50


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    started = Servers(tmp_path, 0, 0)
    yield started
    started.close()


def service(tmp_path: Path, most: int) -> Service:
    workload.write_rules(tmp_path, workload.RuleSet(limit=most))
    return Service({"RUNTIME_ROOT": tmp_path, "RUNTIME_SUBDIRECTORY": workload.SUBDIRECTORY, "USE_STATSD": "false"})


def through(started: StartedEnvoy) -> Target:
    return Target(started.address, None, wire.HTTP)


def ask_two(started: StartedEnvoy, requests: list[bytes]) -> None:
    """Send the requests one after the other."""
    connection = Connection(through(started))
    with closing(connection):
        connection.prime(iter(requests), 1)


def test_request_is_one_headers_frame_without_table_changes() -> None:
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


def test_requests_without_body_need_no_flow_control_window() -> None:
    client, server = socket.socketpair()

    class Paired(Target):
        def connect(self) -> socket.socket:
            return client

    with server, closing(Connection(Paired("nowhere", None, wire.HTTP))) as connection:
        server.sendall(wire.settings({}))
        connection.receive()
        client.setblocking(False)
        # More than twice the default window, which is never enlarged.
        assert connection.send_calls(2_000, cycle(envoy.requests(1))) == 2_000


@pytest.mark.e2e
def test_envoy_calls_the_service_once_per_request(tmp_path: Path, servers: Servers) -> None:
    with service(tmp_path, workload.PLENTY) as requested:
        started = servers.envoy("envoy", requested.grpc_port)
        with Load(through(started), envoy.requests(KEYS), in_flight=16, connections=2) as load:
            load.run(0, at_least_calls=2_000)
            answered = load.drain()
        assert answered >= 2_000
        answers.check_allowed(started.admin_port, answered)
        with pytest.raises(
            LoadError, match=f"answered {answered + 1} requests, of which the service allowed {answered}"
        ):
            answers.check_allowed(started.admin_port, answered + 1)
        with PacedLoad(through(started), envoy.requests(KEYS), connections=1) as paced:
            assert paced.run(500, 0.1).calls == 50


@pytest.mark.e2e
def test_both_descriptors_of_a_request_are_limited(tmp_path: Path, servers: Servers) -> None:
    """Each descriptor has its own key: of two callers that share one, the first uses it up."""
    client = wire.get({":path": "/a", ":authority": "api", "x-tenant": "t", "x-user": "alice"})
    same_route = wire.get({":path": "/a", ":authority": "api", "x-tenant": "t", "x-user": "bob"})
    same_user = wire.get({":path": "/b", ":authority": "api", "x-tenant": "t", "x-user": "alice"})
    for another in (same_route, same_user):
        with service(tmp_path, 1) as requested:
            started = servers.envoy("envoy", requested.grpc_port)
            with pytest.raises(LoadError, match=r"a call failed: .*x-envoy-ratelimited: true"):
                ask_two(started, [client, another])


@pytest.mark.e2e
def test_no_figures_if_the_service_does_not_respond(tmp_path: Path, servers: Servers) -> None:
    with service(tmp_path, workload.PLENTY) as requested:
        started = servers.envoy("envoy", requested.grpc_port)
    with pytest.raises(LoadError, match="a call failed"):
        ask_two(started, envoy.requests(2))


@pytest.mark.e2e
def test_envoy_without_filter_makes_no_calls(servers: Servers) -> None:
    started = servers.envoy("envoy", None)
    with Load(through(started), envoy.requests(KEYS), in_flight=16, connections=2) as load:
        load.run(0, at_least_calls=2_000)
        assert load.drain() >= 2_000
    answers.check_allowed(started.admin_port, 0)
