"""Parser of what a Redis or Valkey server reports about itself: INFO and CLUSTER INFO.

Fields differ between versions and may be missing or restricted, so each is parsed on its own: None means that the
server did not report it in a form that we know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_REPLICA = re.compile(r"slave\d+")


class ClusterSlots(NamedTuple):
    """Hash slots of a cluster, as one of its nodes sees them."""

    assigned: int | None  # have an owner
    ok: int | None  # have an owner that is neither failing nor suspected to


class ServerInfo(NamedTuple):
    """State of a server, and its counters since it was started."""

    used_memory_bytes: int | None = None
    maxmemory_bytes: int | None = None  # 0: no bound
    evicted_keys: int | None = None
    expired_keys: int | None = None
    keyspace_hits: int | None = None
    keyspace_misses: int | None = None
    cpu_user_s: float | None = None
    cpu_system_s: float | None = None
    clients: int | None = None
    commands: int | None = None
    is_master: bool | None = None
    replicas: int | None = None  # online replicas of this server, which may be a replica itself
    replication_lag_bytes: int | None = None  # of the replica that is furthest behind; None on a replica
    replication_ack_age_s: int | None = None  # of the most silent replica; on a replica, of its master
    master_link_up: bool | None = None  # on a replica
    slots: ClusterSlots | None = None  # on a node of a cluster

    @property
    def memory_utilization(self) -> float | None:
        """The share of maxmemory that is used; None without a bound."""
        if self.used_memory_bytes is None or not self.maxmemory_bytes:
            return None
        return self.used_memory_bytes / self.maxmemory_bytes

    @property
    def cpu_s(self) -> float | None:
        if self.cpu_user_s is None or self.cpu_system_s is None:
            return None
        return self.cpu_user_s + self.cpu_system_s


def parse_server_info(info: bytes, cluster_info: bytes | None = None) -> ServerInfo:
    """Parse the replies of INFO and, of a node of a cluster, CLUSTER INFO."""
    fields = _fields(info)
    role = fields.get("role")
    replicas = [replica for replica in _replicas(fields) if replica.get("state") == "online"]
    is_master = role == "master" if role in ("master", "slave", "replica") else None
    if is_master is False:
        lag_bytes, ack_age_s = None, _whole(fields, "master_last_io_seconds_ago")
    else:
        lag_bytes, ack_age_s = _lag_bytes(fields, replicas), _max(_whole(replica, "lag") for replica in replicas)
    link = fields.get("master_link_status")
    return ServerInfo(
        used_memory_bytes=_whole(fields, "used_memory"),
        maxmemory_bytes=_whole(fields, "maxmemory"),
        evicted_keys=_whole(fields, "evicted_keys"),
        expired_keys=_whole(fields, "expired_keys"),
        keyspace_hits=_whole(fields, "keyspace_hits"),
        keyspace_misses=_whole(fields, "keyspace_misses"),
        cpu_user_s=_seconds(fields, "used_cpu_user"),
        cpu_system_s=_seconds(fields, "used_cpu_sys"),
        clients=_whole(fields, "connected_clients"),
        commands=_whole(fields, "total_commands_processed"),
        is_master=is_master,
        replicas=len(replicas) if "connected_slaves" in fields else None,
        replication_lag_bytes=lag_bytes,
        replication_ack_age_s=ack_age_s,
        master_link_up=None if link is None else link == "up",
        slots=None if cluster_info is None else _slots(_fields(cluster_info)),
    )


def _fields(reply: bytes) -> dict[str, str]:
    """Return the fields by name; lines without a colon are headings."""
    pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in pairs if colon}


def _replicas(fields: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the fields of each replica: `slave0:ip=10.0.0.7,port=6379,state=online,offset=280,lag=1`."""
    for name, value in fields.items():
        if _REPLICA.fullmatch(name):
            yield dict(part.partition("=")[::2] for part in value.split(","))


def _lag_bytes(fields: Mapping[str, str], replicas: list[dict[str, str]]) -> int | None:
    written = _whole(fields, "master_repl_offset")
    if written is None:
        return None
    # Replicas acknowledge once a second, so the writes of up to a second count as lag.
    offsets = (_whole(replica, "offset") for replica in replicas)
    return _max(max(0, written - offset) for offset in offsets if offset is not None)


def _slots(fields: Mapping[str, str]) -> ClusterSlots:
    return ClusterSlots(_whole(fields, "cluster_slots_assigned"), _whole(fields, "cluster_slots_ok"))


def _max(numbers: Iterator[int | None] | Iterator[int]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def _whole(fields: Mapping[str, str], name: str) -> int | None:
    """Return a field that counts something; None if it is missing, negative or not a whole number."""
    text = fields.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _seconds(fields: Mapping[str, str], name: str) -> float | None:
    text = fields.get(name, "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) else None
