"""Metrics of the nodes of Redis in a running server with several workers, which all observe the same nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGKILL

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ratelimit_rls.server.workers import MIN_LIFETIME_S
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow


def redis_values(service: ServiceProcess) -> dict[str, float]:
    """Return the scraped metrics of nodes without labels besides that of the node; histograms by their parts."""
    families = text_string_to_metric_families(service.debug("/metrics").body)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("ratelimit_redis_")]
    assert {sample.labels["server_address"] for sample in samples} <= {"127.0.0.1"}
    return {sample.name: sample.value for sample in samples if len(sample.labels) == 2}


def test_workers_report_one_node_and_follow_its_restart(rules: Path) -> None:
    with RedisServer() as redis:
        settings = {"RLS_RULES": rules, "REDIS_URL": redis.address, "RLS_WORKERS": 2, "RLS_REDIS_INFO_INTERVAL": "1s"}
        with ServiceProcess(settings) as service:
            service.wait_for_log("msg=serving", times=2)
            for _ in range(2000):
                redis.cli("PING")
            processed = int(redis.cli("INFO", "stats")["total_commands_processed"])

            def is_counted() -> bool:
                return redis_values(service).get("ratelimit_redis_commands_total", 0) >= processed

            service.wait_until(is_counted, "counts the commands")
            values = redis_values(service)
            assert values["ratelimit_redis_commands_total"] < 1.5 * processed, "not the sum of both workers"
            assert values["ratelimit_redis_master"] == 1
            assert values["ratelimit_redis_memory_used_bytes"] == pytest.approx(
                int(redis.cli("INFO", "memory")["used_memory"]), rel=0.3
            )
            node = f"127.0.0.1:{redis.port}"
            service.wait_until(lambda: _node(service)["commands_per_second"] is not None, "knows rates")
            assert _node(service)["node"] == node
            top = [
                sys.executable,
                "-m",
                "ratelimit_rls",
                "top",
                "--once",
                "--server",
                f"127.0.0.1:{service.debug_port}",
            ]
            assert f"redis {node}  " in subprocess.run(top, capture_output=True, text=True, check=True).stdout

            # The counters of a worker that has ended do not hide those of a Redis that begins at 0 again.
            time.sleep(MIN_LIFETIME_S)
            os.kill(service.workers()[0], SIGKILL)
            service.wait_for_log("msg=serving", times=3)
            redis.kill()
            redis.flush()
            service.wait_until(
                lambda: 0 < redis_values(service).get("ratelimit_redis_commands_total", 0) < processed, "begins again"
            )


def test_info_is_off_with_an_interval_of_zero(rules: Path, any_redis: RedisServer) -> None:
    settings = {"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_REDIS_INFO_INTERVAL": "0s"}
    with ServiceProcess(settings) as service:
        assert redis_values(service).keys() == {
            "ratelimit_redis_duration_seconds_sum",
            "ratelimit_redis_duration_seconds_count",
        }
        assert json.loads(service.debug("/hot").body)["store"] == []


def _node(service: ServiceProcess) -> dict[str, object]:
    nodes = json.loads(service.debug("/hot").body)["store"]
    assert len(nodes) == 1
    node: dict[str, object] = nodes[0]
    return node
