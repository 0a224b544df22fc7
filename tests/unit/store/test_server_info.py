"""Parsing of INFO and CLUSTER INFO, as different servers send them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.store.redis.server_info import ClusterSlots, ServerInfo, parse_server_info

TEXTS = Path(__file__).parent / "server_info"
"""Replies of servers, without the sections that name the machine; that of Redis 8 is assembled and shortened."""

CLUSTER_INFO = b"cluster_enabled:1\r\ncluster_state:fail\r\ncluster_slots_assigned:16384\r\ncluster_slots_ok:10923\r\n"


def info(name: str) -> bytes:
    return (TEXTS / f"{name}.txt").read_text().replace("\n", "\r\n").encode()


def replication(*lines: str) -> ServerInfo:
    return parse_server_info("\r\n".join(["# Replication", *lines, ""]).encode())


@pytest.mark.parametrize(
    ("name", "used_bytes", "cpu_user_s", "cpu_system_s", "commands"),
    [
        ("redis-6.2", 31_288_624, 2.364147, 0.204633, 12_809),
        ("redis-7.0", 33_796_024, 2.836776, 0.18668, 12_767),
        ("valkey-9", 24_294_872, 2.088366, 0.198287, 13_463),
    ],
)
def test_replies_of_different_servers(
    name: str, used_bytes: int, cpu_user_s: float, cpu_system_s: float, commands: int
) -> None:
    assert parse_server_info(info(name)) == ServerInfo(
        used_memory_bytes=used_bytes,
        maxmemory_bytes=0,
        evicted_keys=0,
        expired_keys=0,
        keyspace_hits=0,
        keyspace_misses=0,
        cpu_user_s=cpu_user_s,
        cpu_system_s=cpu_system_s,
        clients=2,
        commands=commands,
        is_master=True,
        replicas=0,
    )


def test_memory_cpu_and_replicas_of_a_master() -> None:
    parsed = parse_server_info(info("redis-8.0"))

    assert parsed.memory_utilization == 0.78125
    assert parsed.cpu_s == 9.75
    assert parsed.commands == 9_007_199_254_740_993
    assert parsed[2:6] == (12, 11, 13, 14)
    # The replica that is not online yet does not count: it has acknowledged nothing.
    assert (parsed.is_master, parsed.replicas) == (True, 2)
    assert (parsed.replication_lag_bytes, parsed.replication_ack_age_s) == (300, 3)
    assert parsed.master_link_up is None


def test_share_of_memory_is_unknown_without_a_bound() -> None:
    assert parse_server_info(b"used_memory:5\r\nmaxmemory:0\r\n").memory_utilization is None
    assert parse_server_info(b"used_memory:5\r\n").memory_utilization is None


def test_a_replica_reports_its_link_to_the_master() -> None:
    up = replication("role:slave", "master_link_status:up", "master_last_io_seconds_ago:4", "connected_slaves:0")
    assert (up.is_master, up.master_link_up, up.replication_ack_age_s) == (False, True, 4)
    assert up.replication_lag_bytes is None
    down = replication("role:slave", "master_link_status:down", "master_last_io_seconds_ago:-1")
    assert (down.master_link_up, down.replication_ack_age_s) == (False, None)


def test_a_master_without_replicas_has_no_lag() -> None:
    alone = replication("role:master", "connected_slaves:0", "master_repl_offset:70")
    assert (alone.replicas, alone.replication_lag_bytes, alone.replication_ack_age_s) == (0, None, None)


def test_slots_of_a_cluster() -> None:
    assert parse_server_info(b"", CLUSTER_INFO).slots == ClusterSlots(16_384, 10_923)
    assert parse_server_info(b"").slots is None


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xff\xfe\r\n:::\r\n",
        b"used_memory:\r\nmaxmemory:-1\r\nused_cpu_user:nan\r\nused_cpu_sys:1e5\r\nconnected_clients:many\r\n",
        "used_memory:१२\r\nevicted_keys:²\r\n".encode(),
        b"role:sentinel\r\nslave0:garbage\r\nslavery:1\r\nmaster_repl_offset:x\r\n",
        b"slave0:state=online,offset=-1,lag=\r\n",
    ],
)
def test_unknown_forms_are_missing_and_never_an_error(reply: bytes) -> None:
    parsed = parse_server_info(reply, reply)
    assert parsed._replace(slots=None) == ServerInfo()
    assert parsed.slots == ClusterSlots(None, None)
