"""Redis Sentinel and Redis Cluster deployments for tests.

All are real servers, of any version that tests/support/servers.py finds. Sentinels and clusters take seconds to be
ready, so the tests that use them are `slow` or `chaos`.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import redis
from redis.crc import key_slot

from tests.support.ports import free_port
from tests.support.process import START_TIMEOUT_S, Process
from tests.support.servers import ONCE, RedisServer

SLOTS = 16_384
_BUS = 10_000
"""Offset of the cluster bus port from the port of a node."""


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    ends = time.monotonic() + timeout_s
    while not _holds(holds):
        assert time.monotonic() < ends, f"not so after {timeout_s:g} s: {what}"
        time.sleep(0.01)


def _holds(condition: Callable[[], bool]) -> bool:
    """Return the condition; False while the server cannot respond yet."""
    try:
        return condition()
    except redis.RedisError:
        return False


class Sentinel(Process):
    """One sentinel, configured with the other sentinels and replicas: discovery would take seconds."""

    has_last_words = False

    def __init__(self, binary: Path, password: str) -> None:
        super().__init__("sentinel")
        self.binary = binary
        self.port = free_port()
        self.id = secrets.token_hex(20)
        self.password = password
        self.lines: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> Sequence[str | Path]:
        config = self.directory / "sentinel.conf"
        if not config.exists():  # a sentinel stores its state there, and continues from it after a restart
            lines = ["bind 127.0.0.1", f"port {self.port}", f"dir {self.directory}", f"sentinel myid {self.id}"]
            lines += [f"requirepass {self.password}"] if self.password else []
            config.write_text("\n".join([*lines, *self.lines, ""]))
        return [self.binary, config, "--sentinel"]

    def cli(self, *command: str | int) -> Any:
        with redis.Redis(port=self.port, password=self.password or None, socket_timeout=5, retry=ONCE) as client:
            return client.execute_command(*command)

    def ready(self) -> bool:
        return _holds(lambda: bool(self.cli("PING")))


class RedisSentinels:
    """A master, its replicas, and three sentinels with a quorum of two.

    `password` is for the data servers, `sentinel_password` for the sentinels.
    """

    def __init__(
        self, binary: Path | None = None, *, replicas: int = 1, password: str = "", sentinel_password: str = ""
    ) -> None:
        self.name = "main"
        first = RedisServer(binary, password=password, extra=_replication(password))
        replica_of = ["--replicaof", "127.0.0.1", str(first.port)]
        copies = [
            RedisServer(binary, password=password, extra=[*_replication(password), *replica_of])
            for _ in range(replicas)
        ]
        self.servers = [first, *copies]
        self.sentinels = [Sentinel(first.binary, sentinel_password) for _ in range(3)]
        watched = self.name
        for sentinel in self.sentinels:
            sentinel.lines += [
                f"sentinel monitor {watched} 127.0.0.1 {first.port} 2",
                f"sentinel down-after-milliseconds {watched} 500",
                f"sentinel failover-timeout {watched} 2000",
            ]
            sentinel.lines += [f"sentinel auth-pass {watched} {password}"] if password else []
            # Sentinels authenticate to each other with their own password.
            sentinel.lines += [f"sentinel sentinel-pass {sentinel_password}"] if sentinel_password else []
            sentinel.lines += [f"sentinel known-replica {watched} 127.0.0.1 {copy.port}" for copy in copies]
            sentinel.lines += [
                f"sentinel known-sentinel {watched} 127.0.0.1 {other.port} {other.id}"
                for other in self.sentinels
                if other is not sentinel
            ]

    @property
    def url(self) -> str:
        """Address for REDIS_URL, name,host:port,…."""
        return ",".join([self.name, *(sentinel.address for sentinel in self.sentinels)])

    @property
    def master(self) -> RedisServer:
        """Return the master according to most sentinels; it may be down."""
        ports = sorted(self._reported_master(sentinel) for sentinel in self.sentinels if sentinel.running)
        port = ports[len(ports) // 2]
        return next(server for server in self.servers if server.port == port)

    def _reported_master(self, sentinel: Sentinel) -> int:
        return int(sentinel.cli("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)[1])

    def failover(self) -> RedisServer:
        """Perform a manual failover; returns the new master once every sentinel knows it."""
        before = self.master
        wait_until(lambda: bool(self.sentinels[0].cli("SENTINEL", "FAILOVER", self.name)), "a replica fit to take over")
        return self.wait_for_another(before)

    def kill_master(self) -> RedisServer:
        """Kill the master and return it."""
        killed = self.master
        killed.kill()
        return killed

    def wait_for_another(self, before: RedisServer, but: Sequence[Sentinel] = ()) -> RedisServer:
        """Return the new master once every sentinel (except `but`) knows it and it accepts writes."""
        alive = [sentinel for sentinel in self.sentinels if sentinel.running and sentinel not in but]
        wait_until(lambda: all(self._reported_master(sentinel) != before.port for sentinel in alive), "another master")
        port = self._reported_master(alive[0])
        now = next(server for server in self.servers if server.port == port)
        wait_until(lambda: now.cli("ROLE")[0] == b"master", "the new master is one")
        return now

    def _in_sync(self) -> bool:
        attached = self.servers[0].cli("INFO", "replication")
        return all(attached.get(f"slave{n}", {}).get("state") == "online" for n in range(len(self.servers) - 1))

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for server in self.servers:
                server.start()
            wait_until(self._in_sync, "the replicas are in sync")
            for sentinel in self.sentinels:
                sentinel.start()
            undo.pop_all()
        return self

    def close(self) -> None:
        for process in (*self.sentinels, *self.servers):
            process.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _replication(password: str) -> list[str]:
    quick = ["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]
    return [*quick, "--masterauth", password] if password else quick


class RedisCluster:
    """Masters with equal shares of the slots, and `replicas` for each. `nodes` contains all, masters first."""

    def __init__(self, binary: Path | None = None, *, masters: int = 3, replicas: int = 0, password: str = "") -> None:
        self._binary = binary
        self._password = password
        self._masters = masters
        self.nodes = [self._new() for _ in range(masters * (1 + replicas))]

    def _new(self) -> RedisServer:
        extra = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", *_replication(self._password)]
        server = RedisServer(self._binary, password=self._password, databases=1, extra=extra)
        while not _can_have_a_bus(server.port):
            server.port = free_port()
        return server

    @property
    def url(self) -> str:
        """Address for REDIS_URL, host:port,…."""
        return ",".join(node.address for node in self.nodes)

    @property
    def running(self) -> list[RedisServer]:
        return [node for node in self.nodes if node.running]

    @staticmethod
    def slot_of(key: str | bytes) -> int:
        return key_slot(key.encode() if isinstance(key, str) else key)

    def node_of(self, key: str | bytes) -> RedisServer:
        """Return the master of the key, according to the other nodes."""
        return self.owner(self.slot_of(key))

    def owner(self, slot: int) -> RedisServer:
        port = _owner(self.running[0], slot)
        return next(node for node in self.nodes if node.port == port)

    def move_slot(self, slot: int, to: RedisServer) -> None:
        """Move a slot completely, also under load."""
        self.begin_move(slot, to)
        self.move_keys(slot, to)
        self.finish_move(slot, to)

    def begin_move(self, slot: int, to: RedisServer) -> None:
        """Start moving a slot: the old master now responds with ASK for missing keys."""
        owner = self.owner(slot)
        to.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", _id(owner))
        owner.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", _id(to))

    def move_keys(self, slot: int, to: RedisServer, most: int = 1 << 30) -> int:
        """Move some keys of the slot; returns their number."""
        owner = self.owner(slot)
        auth = ["AUTH", self._password] if self._password else []
        moved = 0
        while moved < most and (keys := owner.cli("CLUSTER", "GETKEYSINSLOT", slot, min(100, most - moved))):
            owner.cli("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, *auth, "KEYS", *keys)
            moved += len(keys)
        return moved

    def finish_move(self, slot: int, to: RedisServer) -> None:
        """Finish moving a slot: the old master now responds with MOVED."""
        owner = self.owner(slot)
        to.cli("CLUSTER", "SETSLOT", slot, "NODE", _id(to))
        with contextlib.suppress(redis.ResponseError):  # a master without slots has become a replica
            owner.cli("CLUSTER", "SETSLOT", slot, "NODE", _id(to))
        wait_until(lambda: all(_owner(node, slot) == to.port for node in self.running), "all know who has the slot")

    def add_node(self) -> RedisServer:
        """Add a master without slots that all nodes know."""
        node = self._new().start()
        self.nodes.append(node)
        node.cli("CLUSTER", "MEET", "127.0.0.1", self.running[0].port)
        wait_until(self._all_know_all, "everybody knows the new node")
        self.wait_until_ok()
        return node

    def kill(self, node: RedisServer) -> None:
        """Kill a node. The others notice within seconds, and a replica, if any, takes over."""
        node.kill()

    def wait_until_ok(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every running node reports that all slots are served."""
        wait_until(
            lambda: all("cluster_state:ok" in _info(node) for node in self.running), "the cluster is ok", timeout_s
        )

    def _all_know_all(self) -> bool:
        return all(f"cluster_known_nodes:{len(self.nodes)}" in _info(node) for node in self.running)

    def _form(self) -> None:
        masters = self.nodes[: self._masters]
        edges = [SLOTS * n // len(masters) for n in range(len(masters) + 1)]
        for epoch, node in enumerate(self.nodes, 1):
            node.cli("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node, (first, end) in zip(masters, itertools.pairwise(edges), strict=True):
            node.cli("CLUSTER", "ADDSLOTS", *range(first, end))
        for node in self.nodes[1:]:
            for earlier in self.nodes[: self.nodes.index(node)]:  # meeting all nodes is faster than gossip
                node.cli("CLUSTER", "MEET", "127.0.0.1", earlier.port)
        wait_until(self._all_know_all, "the nodes know each other")
        for place, node in enumerate(self.nodes[self._masters :]):
            self._attach(node, masters[place % len(masters)])
        self.wait_until_ok()

    def _attach(self, replica: RedisServer, master: RedisServer) -> None:
        wait_until(lambda: bool(replica.cli("CLUSTER", "REPLICATE", _id(master))), "the replica knows its master")
        wait_until(lambda: replica.cli("INFO", "replication")["master_link_status"] == "up", "the replica is in sync")

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for node in self.nodes:
                node.start()
            self._form()
            undo.pop_all()
        return self

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _can_have_a_bus(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port + _BUS))
        return port + _BUS < 32_768  # the ephemeral port range starts above
    return False


def _id(node: RedisServer) -> str:
    return str(node.cli("CLUSTER", "MYID").decode())


def _owner(node: RedisServer, slot: int) -> int | None:
    """Return the port of the master of the slot, according to this node."""
    ranges = node.cli("CLUSTER", "SLOTS")
    return next((int(master[1]) for first, last, master, *_ in ranges if first <= slot <= last), None)


def _info(node: RedisServer) -> list[str]:
    return str(node.cli("CLUSTER", "INFO").decode()).splitlines()
