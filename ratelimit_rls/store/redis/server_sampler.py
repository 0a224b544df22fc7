"""Periodic observation of the Redis servers: INFO of every node, for metrics and for `top`.

INFO travels on the connection of the decisions, so observation needs no connection of its own; a node spends as long on
it as on a few decisions. The nodes are queried one after the other, so that their replies are not parsed in one go.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import structlog

from ratelimit_rls.errors import StoreError, StoreUnavailable, one_line
from ratelimit_rls.store.redis.connection import ReplyError
from ratelimit_rls.store.redis.deployment import Deployment, ServerNode
from ratelimit_rls.store.redis.resp import command
from ratelimit_rls.store.redis.server_info import ServerInfo, parse_server_info
from ratelimit_rls.telemetry import instruments
from ratelimit_rls.telemetry.instruments import Instrument
from ratelimit_rls.telemetry.series import Collected, Distribution, Series, Value, merge, quantile

_log = structlog.get_logger()

MAX_NODES = 100
"""Nodes that are observed; of a larger cluster, the others have no metrics."""

QUERY_TIMEOUT_S = 2.0

JITTER = 0.25
"""Random share by which an interval is shorter or longer, so that processes do not all ask at once."""

_INFO = command(b"INFO")
_CLUSTER_INFO = command(b"CLUSTER", b"INFO")


def _number(flag: bool | None) -> int | None:
    return None if flag is None else int(flag)


_VALUES: tuple[tuple[Instrument, tuple[str, ...], Callable[[ServerInfo], float | None]], ...] = (
    (instruments.REDIS_MEMORY_USED, (), lambda info: info.used_memory_bytes),
    (instruments.REDIS_MEMORY_LIMIT, (), lambda info: info.maxmemory_bytes or None),
    (instruments.REDIS_MEMORY_UTILIZATION, (), lambda info: info.memory_utilization),
    (instruments.REDIS_KEYS_EVICTED, (), lambda info: info.evicted_keys),
    (instruments.REDIS_KEYS_EXPIRED, (), lambda info: info.expired_keys),
    (instruments.REDIS_KEYSPACE_HITS, (), lambda info: info.keyspace_hits),
    (instruments.REDIS_KEYSPACE_MISSES, (), lambda info: info.keyspace_misses),
    (instruments.REDIS_CPU_TIME, ("user",), lambda info: info.cpu_user_s),
    (instruments.REDIS_CPU_TIME, ("system",), lambda info: info.cpu_system_s),
    (instruments.REDIS_CLIENTS, (), lambda info: info.clients),
    (instruments.REDIS_COMMANDS, (), lambda info: info.commands),
    (instruments.REDIS_MASTER, (), lambda info: _number(info.is_master)),
    (instruments.REDIS_REPLICAS, (), lambda info: info.replicas),
    (instruments.REDIS_REPLICATION_LAG, (), lambda info: info.replication_lag_bytes),
    (instruments.REDIS_REPLICATION_ACK_AGE, (), lambda info: info.replication_ack_age_s),
    (instruments.REDIS_REPLICATION_LINK, (), lambda info: _number(info.master_link_up)),
    (instruments.REDIS_CLUSTER_SLOTS, ("assigned",), lambda info: info.slots and info.slots.assigned),
    (instruments.REDIS_CLUSTER_SLOTS, ("ok",), lambda info: info.slots and info.slots.ok),
)


class Sample(NamedTuple):
    """State of a node at a moment."""

    at_s: float  # monotonic
    info: ServerInfo
    durations: Distribution  # of our own commands so far


class NodeReport(NamedTuple):
    """State of a node for `top`. Rates are those between the last two samples; None if they are unknown."""

    node: str
    memory_bytes: int | None
    memory_share: float | None  # of maxmemory
    commands_per_second: float | None
    clients: int | None
    cpu_cores: float | None
    evicted_per_second: float | None
    p95_ms: float | None  # of the commands of this process


class ServerSampler:
    def __init__(
        self,
        deployments: Sequence[Deployment],
        interval_s: float,
        *,
        clock: Callable[[], float] = monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """With an interval of 0, INFO is never sent, and only the durations of our own commands are measured."""
        self._deployments = deployments
        self._interval_s = interval_s
        self._clock = clock
        self._chance = chance
        self._samples: dict[str, tuple[Sample | None, Sample]] = {}  # the last two of each node
        self._error_logged = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sample in the background. Returns immediately."""
        if self._interval_s:
            self._task = asyncio.create_task(self._run(), name="redis-info")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(self._interval_s * (1 + JITTER * (2 * self._chance() - 1)))

    async def sample(self) -> None:
        """Query every connected node once. Never raises: the first error is logged, and the node has no metrics."""
        sampled: dict[str, tuple[Sample | None, Sample]] = {}
        error = ""
        for node in self._nodes():
            if not node.connection.connected:
                continue  # the loss of a connection is logged where it is noticed
            try:
                info = await _query(node)
            except StoreError as exc:
                error = error or str(exc)
                continue
            _, before = self._samples.get(str(node), (None, None))
            sampled[str(node)] = before, Sample(self._clock(), info, node.connection.durations.value)
        self._samples = sampled
        if error and not self._error_logged:
            _log.warning("redis_info_unavailable", error=error)
        self._error_logged = bool(error)

    def _nodes(self) -> list[ServerNode]:
        return [node for deployment in self._deployments for node in deployment.nodes()][:MAX_NODES]

    def measured(self) -> Iterable[tuple[Series, Value]]:
        """Return the metrics of the nodes that are connected now."""
        return merge(map(self._node_series, self._nodes())).items()

    def _node_series(self, node: ServerNode) -> Collected:
        labels = node.address, node.port
        found: Collected = {Series(instruments.REDIS_DURATION.name, labels): node.connection.durations.value}
        if node.connection.connected and str(node) in self._samples:
            _, (_, info, _) = self._samples[str(node)]
            for instrument, more, value_of in _VALUES:
                if (value := value_of(info)) is not None:
                    found[Series(instrument.name, (*labels, *more))] = value
        return found

    def report(self) -> list[NodeReport]:
        """Return the connected nodes in order of their names."""
        connected = {str(node) for node in self._nodes() if node.connection.connected}
        return [node_report(name, *both) for name, both in sorted(self._samples.items()) if name in connected]

    def report_json(self) -> list[dict[str, Any]]:
        """Return the report for /hot, rounded to what is significant."""
        return [{name: _rounded(value) for name, value in one._asdict().items()} for one in self.report()]


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


async def _query(node: ServerNode) -> ServerInfo:
    """Return what a node reports about itself. Raises StoreError."""
    commands = [_INFO, _CLUSTER_INFO] if node.in_cluster else [_INFO]
    info, *cluster_info = await node.connection.query(commands, QUERY_TIMEOUT_S)
    if not isinstance(info, bytes):
        raise StoreUnavailable(f"Redis at {node} has no metrics: {_describe(info)}")
    # An ACL may allow one and not the other.
    return parse_server_info(info, next((reply for reply in cluster_info if isinstance(reply, bytes)), None))


def _describe(reply: Any) -> str:
    return f"INFO returned the error {one_line(str(reply))}" if isinstance(reply, ReplyError) else "INFO is not text"


def node_report(name: str, before: Sample | None, now: Sample) -> NodeReport:
    """Return the state of a node at a sample, with rates since the one before it."""

    def rate(count_of: Callable[[ServerInfo], float | None]) -> float | None:
        """Return the increase per second; None without two values, or if the server was restarted in between."""
        if before is None or now.at_s <= before.at_s:
            return None
        first, last = count_of(before.info), count_of(now.info)
        if first is None or last is None or last < first:
            return None
        return (last - first) / (now.at_s - before.at_s)

    info = now.info
    return NodeReport(
        name,
        info.used_memory_bytes,
        info.memory_utilization,
        rate(lambda one: one.commands),
        info.clients,
        rate(lambda one: one.cpu_s),
        rate(lambda one: one.evicted_keys),
        _p95_ms(before, now),
    )


def _p95_ms(before: Sample | None, now: Sample) -> float | None:
    if before is None:
        return None
    counts = [new - old for new, old in zip(now.durations.counts, before.durations.counts, strict=True)]
    seconds = quantile(0.95, counts)
    return None if seconds is None else seconds * 1000
