"""Each folder of envoy/ does what its README says, with a real Envoy and a real upstream."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.client import Http, Reply, get
from tests.servers import SANDBOXES, EnvoyServer, RedisServer, Service, Upstream

pytestmark = pytest.mark.e2e


def envoy(sandbox: str, upstream: Upstream, where: Mapping[Any, int | str], **values: Any) -> EnvoyServer:
    return EnvoyServer(SANDBOXES / sandbox / "envoy.yaml", {8000: upstream.port, **where}, values)


def replies(url: str, path: str, times: int) -> list[Reply]:
    with Http(url) as client:
        return [client.get(path, x_user="ann") for _ in range(times)]


def statuses(url: str, path: str, times: int) -> list[int]:
    return [reply.status for reply in replies(url, path, times)]


def test_requests_pass_until_the_limit_and_are_then_refused_and_every_answer_says_where_it_stands(
    upstream: Upstream, rules: Path, transport: str
) -> None:
    environment = {"RLS_RULES": rules, "RLS_TRANSPORT": transport, "LIMIT_RESPONSE_HEADERS_ENABLED": "true"}
    with Service(environment) as service, envoy("rls-http", upstream, {8081: service.grpc_port}) as proxy:
        before = upstream.requests
        answers = replies(proxy.url, "/limited", 6)

        assert [reply.status for reply in answers] == [200] * 5 + [429]
        assert upstream.requests == before + 5
        assert [reply.headers["x-ratelimit-remaining"] for reply in answers] == ["4", "3", "2", "1", "0", "0"]
        assert [reply.headers["ratelimit-remaining"] for reply in answers] == ["4", "3", "2", "1", "0", "0"]
        refusal = answers[-1].headers
        assert refusal["x-envoy-ratelimited"] == "true"
        assert refusal["x-ratelimit-limit"].split(",")[0] == refusal["ratelimit-limit"] == "5"
        assert "5;w=86400" in refusal["x-ratelimit-limit"]
        assert 0 < int(refusal["ratelimit-reset"]) <= 86400
        assert abs(int(refusal["x-ratelimit-reset"]) - int(refusal["ratelimit-reset"])) <= 1
        assert get(proxy.url, "/elsewhere").status == 200


@pytest.mark.parametrize(("deny", "while_down"), [(False, 200), (True, 500)], ids=["pass", "deny"])
def test_while_the_service_is_down_envoy_decides_and_limits_hold_again_once_it_is_back(
    upstream: Upstream, rules: Path, deny: bool, while_down: int
) -> None:
    service = Service({"RLS_RULES": rules})
    where = {8081: service.grpc_port}
    with service, envoy("rls-http", upstream, where, failure_mode_deny=deny) as proxy:
        assert statuses(proxy.url, "/limited", 6) == [200] * 5 + [429]

        service.kill()
        assert statuses(proxy.url, "/limited", 3) == [while_down] * 3

        service.start()
        # The embedded store was the process's own, so its counters start again.
        proxy.wait_until(lambda: "x-ratelimit-limit" in get(proxy.url, "/limited").headers, "limits again")
        assert 429 in statuses(proxy.url, "/limited", 6)


def test_sigterm_with_envoy_connected_ends_the_process_cleanly(upstream: Upstream, rules: Path, transport: str) -> None:
    environment = {"RLS_RULES": rules, "RLS_TRANSPORT": transport, "RLS_DRAIN_DELAY": "100ms"}
    with Service(environment) as service, envoy("rls-http", upstream, {8081: service.grpc_port}) as proxy:
        assert statuses(proxy.url, "/limited", 6) == [200] * 5 + [429]

        assert service.stop() == 0

        assert "Traceback" not in service.log()


def test_a_unix_socket_serves_as_the_port_does(upstream: Upstream, rules: Path, tmp_path: Path, transport: str) -> None:
    unix_socket = tmp_path / "rls.sock"
    environment = {"RLS_RULES": rules, "RLS_TRANSPORT": transport, "GRPC_UDS": unix_socket}
    where = {"/run/ratelimit-rls/rls.sock": str(unix_socket)}
    with Service(environment), envoy("rls-unix-socket", upstream, where) as proxy:
        assert statuses(proxy.url, "/limited", 6) == [200] * 5 + [429]


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """certs/ as the sandbox's README makes it."""
    authority = Authority(tmp_path / "certs")
    for name, file in (("ratelimit.internal", "ratelimit"), ("envoy.internal", "envoy")):
        for issued, suffix in zip(authority.issue(name), (".pem", ".key"), strict=True):
            shutil.move(issued, authority.directory / (file + suffix))
    return authority.directory


def tls(certificates: Path) -> dict[str, object]:
    return {
        "GRPC_SERVER_USE_TLS": "true",
        "GRPC_SERVER_TLS_CERT": certificates / "ratelimit.pem",
        "GRPC_SERVER_TLS_KEY": certificates / "ratelimit.key",
        "GRPC_CLIENT_TLS_CACERT": certificates / "ca.pem",
        "GRPC_CLIENT_TLS_SAN": "envoy.internal",
    }


def mtls_addresses(certificates: Path, service: Service) -> dict[Any, int | str]:
    files = ("ca.pem", "envoy.pem", "envoy.key")
    return {8081: service.grpc_port, **{f"certs/{file}": str(certificates / file) for file in files}}


def test_mutual_tls_serves_an_envoy_with_a_certificate(
    upstream: Upstream, rules: Path, certificates: Path, transport: str
) -> None:
    environment = {"RLS_RULES": rules, "RLS_TRANSPORT": transport, **tls(certificates)}
    service = Service(environment)
    where = mtls_addresses(certificates, service)
    with service, envoy("rls-mtls", upstream, where, failure_mode_deny=True) as proxy:
        assert statuses(proxy.url, "/limited", 6) == [200] * 5 + [429]


def test_mutual_tls_refuses_an_envoy_without_a_certificate_and_one_with_a_strangers(
    upstream: Upstream, rules: Path, certificates: Path, tmp_path: Path, transport: str
) -> None:
    pem, key = Authority(tmp_path / "stranger").issue("envoy.internal")
    # Without a list of names, so that the authority alone decides.
    environment = {"RLS_RULES": rules, "RLS_TRANSPORT": transport, **tls(certificates), "GRPC_CLIENT_TLS_SAN": None}
    with Service(environment) as service:
        where = mtls_addresses(certificates, service)
        strangers = {**where, "certs/envoy.pem": str(pem), "certs/envoy.key": str(key)}
        with envoy("rls-mtls", upstream, where, failure_mode_deny=True, tls_certificates=[]) as proxy:
            assert statuses(proxy.url, "/limited", 2) == [500, 500]
        with envoy("rls-mtls", upstream, strangers, failure_mode_deny=True) as proxy:
            assert statuses(proxy.url, "/limited", 2) == [500, 500]
        with envoy("rls-mtls", upstream, where, failure_mode_deny=True) as proxy:
            assert statuses(proxy.url, "/limited", 2) == [200, 200]


def test_mutual_tls_refuses_a_good_certificate_whose_name_is_not_on_the_list(
    upstream: Upstream, rules: Path, certificates: Path, transport: str
) -> None:
    service = Service({"RLS_RULES": rules, "RLS_TRANSPORT": transport, **tls(certificates)})
    servers_own = {f"certs/envoy{end}": str(certificates / f"ratelimit{end}") for end in (".pem", ".key")}
    where = {**mtls_addresses(certificates, service), **servers_own}
    with service, envoy("rls-mtls", upstream, where, failure_mode_deny=True) as proxy:
        assert statuses(proxy.url, "/limited", 2) == [500, 500]


def test_ext_authz_alone_counts_kinds_of_pages_and_believes_no_invented_address(
    upstream: Upstream, tmp_path: Path, transport: str
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text((SANDBOXES / "ext-authz-only" / "rules.yaml").read_text().replace("unit: minute", "unit: day"))
    service = Service({"RLS_RULES": rules, "RLS_TRANSPORT": transport})
    with service, envoy("ext-authz-only", upstream, {8081: service.grpc_port}) as proxy, Http(proxy.url) as client:
        answers = [client.get(f"/users/{i}", x_forwarded_for=f"203.0.113.{i}") for i in range(6)]

        assert [reply.status for reply in answers] == [200] * 5 + [429]
        assert '"code":429' in answers[-1].body
        assert client.get("/users/1/orders/2").status == 200


def test_tokens_reported_after_the_answer_become_debt_and_the_limit_bites(
    upstream: Upstream, tmp_path: Path, transport: str
) -> None:
    rules = tmp_path / "tokens.yaml"
    rules.write_text((SANDBOXES / "llm-token-cost" / "rules.yaml").read_text().replace("unit: hour", "unit: day"))
    service = Service({"RLS_RULES": rules, "RLS_TRANSPORT": transport})
    with service, envoy("llm-token-cost", upstream, {8081: service.grpc_port}) as proxy, Http(proxy.url) as client:

        def asked_and_charged(user: str, tokens: int) -> int:
            calls = r"cluster\.ratelimit\.upstream_rq_completed"
            before = proxy.stat(calls)
            status = client.get("/v1/chat", x_user=user, x_tokens=str(tokens)).status
            # The charge goes out after the answer did; the next look must not overtake it.
            proxy.wait_until(lambda: proxy.stat(calls) >= before + 2, "charged")
            return status

        assert [asked_and_charged("ann", 60), asked_and_charged("ann", 60)] == [200, 200]
        assert asked_and_charged("ann", 1) == 429
        assert asked_and_charged("bob", 1) == 200


def test_limits_are_kept_in_redis(upstream: Upstream, rules: Path, redis_server: RedisServer) -> None:
    environment = {"RLS_RULES": rules, "REDIS_URL": redis_server.address, "REDIS_SOCKET_TYPE": "tcp"}
    first, second = Service(environment), Service(environment)
    with first, envoy("rls-http", upstream, {8081: first.grpc_port}, failure_mode_deny=True) as proxy:
        assert statuses(proxy.url, "/limited", 3) == [200] * 3
    with second, envoy("rls-http", upstream, {8081: second.grpc_port}, failure_mode_deny=True) as proxy:
        assert statuses(proxy.url, "/limited", 3) == [200, 200, 429]
    assert redis_server.cli("DBSIZE") > 0
