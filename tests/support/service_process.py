"""The service as a process, with access to its log, statistics, health, workers and exit code."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench import cpu
from tests.support.grpc_client import Reply, get, rate_limit_request
from tests.support.process import STOP_TIMEOUT_S
from tests.support.servers import Service

UNRESTRICTIVE_RULES = (
    "domain: roomy\ndescriptors: [{key: all, rate_limit: {unit: year, requests_per_unit: 4000000000}}]\n"
)
"""Rules under which nothing is denied during a test."""

HIT = bytes(rate_limit_request("roomy", {"all": "hits"}))


class ServiceProcess(Service):
    def wait_for_log(self, words: str, times: int = 1, timeout_s: float = 20.0) -> None:
        self.wait_until(lambda: self.log().count(words) >= times, f"logs {words!r}", timeout_s)

    def ended(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the process to exit and return its exit code."""
        assert self._child is not None
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log()[-4000:]}") from None

    def healthcheck(self) -> Reply:
        return get(f"http://127.0.0.1:{self.http_port}", "/healthcheck")

    def debug(self, path: str) -> Reply:
        return get(f"http://127.0.0.1:{self.debug_port}", path)

    def stat(self, name: str) -> int:
        """Return a counter of /stats; 0 if absent."""
        counters = dict(line.split(": ") for line in self.debug("/stats").body.splitlines())
        return int(counters.get(name, 0))

    def health(self, name: str = "ratelimit") -> str:
        """Return the status of the gRPC health service, on a new connection."""
        with grpc.insecure_channel(self.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5, wait_for_ready=True)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def family(self) -> list[int]:
        """Return the ids of this process and its descendants."""
        return cpu.family(self.pid)

    def workers(self) -> list[int]:
        """Return the worker process ids from the log, oldest first."""
        named = map(int, re.findall(r"msg=serving .*worker=(\d+)", self.log()))
        return list(filter(alive, named))

    @staticmethod
    def wait_until_exited(pids: list[int], timeout_s: float = STOP_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while any(map(alive, pids)):
            assert time.monotonic() < deadline, f"still there after {timeout_s} s: {list(filter(alive, pids))}"
            time.sleep(0.02)


class StartingService(ServiceProcess):
    """Service whose `with` block does not wait until it is ready."""

    def ready(self) -> bool:
        return True

    def wait_until_serving(self) -> None:
        self.wait_until(super().ready, "serves")


def connections(pid: int, port: int) -> int:
    """Return the number of connections of a process to a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = {f"socket:[{row[9]}]" for row in rows if row[3] == "01" and int(row[1].split(":")[1], 16) == port}
    descriptors = Path(f"/proc/{pid}/fd")
    return sum(os.readlink(descriptors / name) in established for name in os.listdir(descriptors))


def alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
