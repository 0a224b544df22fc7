"""Injection of Redis faults into real servers, one at a time, with a record of each."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import mixed_load
from tests.support.servers import RedisServer, Service
from tests.support.tcp_proxy import SlowProxy

SLOW_MS = 50.0
MAX_PAUSED_S = 2.0
MAX_DOWN_S = 1.5


class Fault(NamedTuple):
    """An injected fault: from its start to the recovery of Redis."""

    name: str
    begun_s: float  # wall clock
    ended_s: float
    away: tuple[float, float] | None = None  # period without any server, if so
    forgets: bool = False  # True if counters were lost or reset


class Faults:
    """Injects faults. When a method returns, every server runs, responds and accepts writes again."""

    def __init__(
        self,
        servers: Sequence[RedisServer],
        service: Service,
        rules: Path,
        seed: int,
        *,
        relay: SlowProxy | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`relay` is a proxy in front of the only server; without one, the network is not slowed down.

        `settle` waits until all servers agree that all of them are available.
        """
        self.done: list[Fault] = []
        self._servers = servers
        self._service = service
        self._rules = rules
        self._relay = relay
        self._settle = settle
        self._drawn = random.Random(seed)
        self._versions = 0

    def kinds(self) -> list[Callable[[], None]]:
        """Return the available kinds of faults."""
        usual = [self.kill, self.pause, self.flush_scripts, self.cut, self.fill_memory, self.reload, self.reset]
        return usual + ([self.slow] if self._relay is not None else [])

    def any(self) -> None:
        self._drawn.choice(self.kinds())()

    def kill(self) -> None:
        """Kill a server and restart it empty."""
        server, begun_s = self._server(), time.time()
        server.kill()
        down_s = time.time()
        time.sleep(self._drawn.uniform(0.1, MAX_DOWN_S))
        away = down_s, time.time()
        server.start()
        self._settle()
        self._note("killed and restarted", begun_s, away=away if len(self._servers) == 1 else None, forgets=True)

    def pause(self) -> None:
        server, begun_s = self._server(), time.time()
        server.pause()
        time.sleep(self._drawn.uniform(0.1, MAX_PAUSED_S))
        server.resume()
        self._settle()
        self._note("paused", begun_s)

    def slow(self) -> None:
        assert self._relay is not None
        begun_s, self._relay.delay_ms = time.time(), SLOW_MS
        time.sleep(self._drawn.uniform(0.5, 1.5))
        self._relay.delay_ms = 0.0
        self._note("slow by 50 ms", begun_s)

    def flush_scripts(self) -> None:
        begun_s = time.time()
        self._server().cli("SCRIPT", "FLUSH")
        self._note("scripts flushed", begun_s)

    def cut(self) -> None:
        """Close all client connections, including subscribers."""
        server, begun_s = self._server(), time.time()
        for kind in ("normal", "pubsub"):
            server.cli("CLIENT", "KILL", "TYPE", kind)
        self._note("connections cut", begun_s)

    def fill_memory(self) -> None:
        server, begun_s = self._server(), time.time()
        server.cli("CONFIG", "SET", "maxmemory", 1)
        time.sleep(1.0)
        server.cli("CONFIG", "SET", "maxmemory", 0)
        self._note("out of memory", begun_s)

    def reload(self) -> None:
        begun_s = time.time()
        self._versions += 1
        new = self._rules.with_suffix(".new")
        new.write_text(mixed_load.rules(self._versions))
        new.replace(self._rules)
        os.kill(self._service.pid, signal.SIGHUP)
        self._note("rules reloaded", begun_s)

    def reset(self) -> None:
        """Reset all counters of one kind, as an operator does."""
        begun_s = time.time()
        kind = self._drawn.choice([kind.name for kind in mixed_load.KINDS if kind.audited])
        matching = ("--domain", mixed_load.DOMAIN, "--match", f"{kind}=*", "--yes")
        where = {**os.environ, "REDIS_URL": ",".join(server.address for server in self._servers)}
        if len(self._servers) > 1:
            where["REDIS_TYPE"] = "CLUSTER"
        command = [sys.executable, "-m", "ratelimit_rls", "reset", *matching]
        subprocess.run(command, env=where, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._note("reset", begun_s, forgets=True)

    def _server(self) -> RedisServer:
        return self._drawn.choice(self._servers)

    def _note(
        self, name: str, begun_s: float, *, away: tuple[float, float] | None = None, forgets: bool = False
    ) -> None:
        self.done.append(Fault(name, begun_s, time.time(), away, forgets))
