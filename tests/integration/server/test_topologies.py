"""The whole service on every kind of Redis deployment, configured by environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from ratelimit_rls.core.model import Code
from tests.support.certificates import Authority
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.redis_servers import RedisCluster, RedisSentinels
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess
from tests.support.tcp_proxy import TlsProxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

RULES = """\
domain: d
charge: admitted
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 3}}
  - {key: burst, rate_limit: {unit: second, requests_per_unit: 1000}}
"""

BOTH = rate_limit_request("d", {"user": "alice"}, {"burst": "b"})

SECRET = "s3cret:with:colons"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def single(stack: ExitStack, _: Path) -> Mapping[str, object]:
    return {"REDIS_SOCKET_TYPE": "tcp", "REDIS_URL": stack.enter_context(RedisServer()).address}


def unix_socket(stack: ExitStack, _: Path) -> Mapping[str, object]:
    return {"REDIS_SOCKET_TYPE": "unix", "REDIS_URL": stack.enter_context(RedisServer()).unix_socket}


def acl_user_from_a_file(stack: ExitStack, directory: Path) -> Mapping[str, object]:
    server = stack.enter_context(RedisServer(password="other", users={"limiter": SECRET}))
    auth = directory / "auth"
    auth.write_text(f"limiter:{SECRET}\n")
    return {"REDIS_URL": server.address, "REDIS_AUTH_FILE": auth}


def mutual_tls(stack: ExitStack, directory: Path) -> Mapping[str, object]:
    authority = Authority(directory)
    server_cert, client_cert = authority.issue("localhost"), authority.issue("client")
    server = stack.enter_context(RedisServer(password=SECRET))
    relay = stack.enter_context(TlsProxy(server, *server_cert, client_ca=authority.ca_path))
    return {
        "REDIS_URL": f"rediss://localhost:{relay.port}",
        "REDIS_AUTH": f":{SECRET}",
        "REDIS_TLS_CACERT": authority.ca_path,
        "REDIS_TLS_CLIENT_CERT": client_cert[0],
        "REDIS_TLS_CLIENT_KEY": client_cert[1],
    }


def sentinel(stack: ExitStack, _: Path) -> Mapping[str, object]:
    return {"REDIS_TYPE": "sentinel", "REDIS_URL": stack.enter_context(RedisSentinels()).url}


def cluster(stack: ExitStack, _: Path) -> Mapping[str, object]:
    return {"REDIS_TYPE": "CLUSTER", "REDIS_URL": stack.enter_context(RedisCluster()).url}


@pytest.mark.parametrize(
    "topology", [single, unix_socket, acl_user_from_a_file, mutual_tls, sentinel, cluster], ids=lambda one: one.__name__
)
def test_service_works_on_every_redis_topology(topology: object, stack: ExitStack, rules: Path, tmp_path: Path) -> None:
    variables = topology(stack, tmp_path)  # type: ignore[operator]
    service = stack.enter_context(ServiceProcess({"RLS_RULES": rules, **variables}))

    codes = [ask(service.grpc_address, BOTH).overall_code for _ in range(4)]

    assert codes == [Code.OK] * 3 + [Code.OVER_LIMIT]
    assert "s3cret" not in service.log()


def test_limits_per_second_use_the_per_second_redis(stack: ExitStack, rules: Path) -> None:
    main, seconds = stack.enter_context(RedisServer()), stack.enter_context(RedisServer(password=SECRET))
    service = stack.enter_context(
        ServiceProcess(
            {
                "RLS_RULES": rules,
                "REDIS_URL": main.address,
                "REDIS_PERSECOND": "true",
                "REDIS_PERSECOND_SOCKET_TYPE": "tcp",
                "REDIS_PERSECOND_URL": seconds.address,
                "REDIS_PERSECOND_AUTH": f":{SECRET}",
            }
        )
    )
    codes = [ask(service.grpc_address, BOTH).overall_code for _ in range(4)]

    assert codes == [Code.OK] * 3 + [Code.OVER_LIMIT]
    assert main.cli("KEYS", "*") == [b"rl:{d/user=alice}:fixed_window:31536000"]
    assert seconds.cli("KEYS", "*") == [b"rl:{d/burst=b}:fixed_window:1"]
    # Hits of one or two seconds, not all 4.
    assert int(seconds.cli("GET", "rl:{d/burst=b}:fixed_window:1")) >> 16 in (1, 2, 3)
