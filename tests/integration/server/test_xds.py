"""The whole process with rules over xDS: before the first rules, and with several workers."""

from __future__ import annotations

import time
from signal import SIGHUP

import grpc
import pytest

from ratelimit_rls.core.model import Code
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.servers import RedisServer, http_status
from tests.support.service_process import ServiceProcess, StartingService
from tests.support.xds_server import AdsServer, config

pytestmark = pytest.mark.slow

RULES = config("{name: n, domain: roomy, descriptors: [{key: all, rate_limit: {unit: DAY, requests_per_unit: 9}}]}")
OTHERS = config("{name: n, domain: roomy, descriptors: [{key: all, rate_limit: {unit: WEEK, requests_per_unit: 9}}]}")
BAD = config("{name: n, domain: roomy, descriptors: [{key: all, rate_limit: {requests_per_unit: 9}}]}")
REQUEST = rate_limit_request("roomy", {"all": "hits"})


def environment(server: AdsServer, **more: object) -> dict[str, object]:
    return {
        "CONFIG_TYPE": "GRPC_XDS_SOTW",
        "CONFIG_GRPC_XDS_SERVER_URL": server.address,
        "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS": "authorization:hush",
        "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL": "100ms",
        "LOG_LEVEL": "debug",
        **more,
    }


def test_ports_open_after_first_xds_rules_and_service_works() -> None:
    server = AdsServer()
    with StartingService(environment(server, CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL="100ms")) as service:
        service.wait_for_log("Connection refused")
        server.start()
        server.wait_for_streams(1)
        service.signal(SIGHUP)
        service.wait_for_log("rules_not_available_yet", times=2)
        assert "waiting_for_rules" in service.log()
        assert http_status(f"http://127.0.0.1:{service.http_port}/healthcheck") is None

        server.answer_to(server.send("1", RULES))
        service.wait_until_serving()
        assert int(ask(service.grpc_address, REQUEST).overall_code) == Code.OK
        assert service.stat("ratelimit.service.config_load_success") == 1
        assert "roomy.all: unit=DAY requests_per_unit=9" in service.debug("/rlconfig").body

        nack = server.answer_to(server.send("2", BAD))
        assert nack.error_detail is not None
        assert "invalid rate limit unit 'UNKNOWN'" in nack.error_detail.message
        rejected = service.debug("/rlconfig")
        assert "unit=DAY" in rejected.body
        assert rejected.headers["x-ratelimit-rules-failures"] == "1"
        assert "(in roomy.all)" in rejected.headers["x-ratelimit-rules-last-error"]
        assert "config: 1 update(s) rejected: n:2:" in service.healthcheck().headers["x-ratelimit-detail"]
        assert service.stat("ratelimit.service.config_load_error") == 1
        service.signal(SIGHUP)
        service.wait_for_log("rules_unchanged")
        assert service.debug("/rlconfig").headers["x-ratelimit-rules-failures"] == "1"

        server.stop()
        server.send("3", OTHERS)
        server.start()
        service.wait_until(
            lambda: "unit=WEEK" in service.debug("/rlconfig").body, "has the rules of a server that is back"
        )
        begun = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - begun < 5
        assert "hush" not in service.log()
        assert "Traceback" not in service.log()
    server.stop()


def test_rejected_first_xds_rules_end_the_wait() -> None:
    with AdsServer() as server, StartingService(environment(server)) as service:
        server.answer_to(server.send("1", BAD))
        service.wait_until_serving()
        with pytest.raises(grpc.RpcError) as raised:
            ask(service.grpc_address, REQUEST)
        assert raised.value.details() == "no rate limit configuration loaded"
        assert service.stop() == 0


def test_stop_does_not_wait_for_compilation_of_large_rules() -> None:
    many = [{"key": "k", "value": str(at), "rate_limit": {"unit": "DAY"}} for at in range(80_000)]
    large = config("{name: n, domain: large}", descriptors=many)
    with AdsServer() as server:
        answered = server.send("1", RULES)
        with ServiceProcess(environment(server, RLS_DRAIN_DELAY="0s")) as service:
            server.answer_to(answered)
            nonce = server.send("2", large)
            time.sleep(0.7)  # received by now; compiling takes seconds
            begun = time.monotonic()
            assert service.stop() == 0
            assert time.monotonic() - begun < 4
            assert not any(request.response_nonce == nonce for request in server.requests)
            assert "Traceback" not in service.log()


def test_each_worker_has_its_own_xds_stream(any_redis: RedisServer) -> None:
    with AdsServer() as server:
        server.send("1", RULES)
        with ServiceProcess(environment(server, RLS_WORKERS=2, REDIS_URL=any_redis.address)) as service:
            server.wait_for_streams(2)
            service.wait_for_log("msg=serving", times=2)
            assert int(ask(service.grpc_address, REQUEST).overall_code) == Code.OK
            assert len(server.streams) == 2
