"""Rendered pods run: the real service with the rendered variables and files, and the requests of the test pod."""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.charts.helm import containers, manifests, one, parsed, pods, template
from tests.charts.kubelet import Pod
from tests.support.admin import KEY_SECRET, TOKEN, Admin
from tests.support.certificates import Authority
from tests.support.databases import PostgresServer
from tests.support.grpc_client import Http
from tests.support.ports import free_port
from tests.support.servers import EnvoyServer, RedisServer, http_status, redis_binaries

PROBES = ("startup", "readiness", "liveness")
DONE, BAD, UNREACHABLE = 0, 1, 4

TOO_MANY = 11
"""More than five per minute, even if a minute ends in between."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployed() -> Iterator[Pod]:
    with Pod(manifests("default")) as pod:
        yield pod


def test_test_pod_succeeds_below_the_limit(deployed: Pod) -> None:
    first = deployed.ask()
    assert first.returncode == DONE
    assert "user=helm-test  OK  5/minute, 4 left" in first.stdout
    assert deployed.ask("--times", str(TOO_MANY)).returncode == BAD


def test_test_pod_fails_without_rules(deployed: Pod) -> None:
    assert deployed.ask("--domain", "nowhere").returncode == BAD


def test_every_probe_succeeds(deployed: Pod) -> None:
    assert [deployed.probe(name) for name in PROBES] == [True, True, True]


def test_service_monitor_finds_the_metrics(deployed: Pod) -> None:
    endpoint = one(manifests("monitoring"), "ServiceMonitor")["spec"]["endpoints"][0]
    with urlopen(f"http://127.0.0.1:{deployed.metrics_port}{endpoint['path']}", timeout=5) as answer:
        assert "# TYPE" in answer.read().decode()


def test_service_starts_without_warnings(deployed: Pod) -> None:
    lines = [json.loads(line) for line in deployed.log().splitlines()]
    assert "serving" in [line["@message"] for line in lines]
    assert {line["level"] for line in lines} == {"info"}, lines


def test_test_pod_fails_without_response(deployed: Pod) -> None:
    stopped = Pod(manifests("default"))
    try:
        assert stopped.ask("--timeout", "1").returncode == UNREACHABLE
    finally:
        stopped.close()


def test_mutual_tls_with_files_from_secrets(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    ca = authority.ca_path.read_text()

    def pair(name: str) -> dict[str, str]:
        certificate, key = authority.issue(name)
        return {"tls.crt": certificate.read_text(), "tls.key": key.read_text(), "ca.crt": ca}

    revoked = authority.issue("gateway", "spiffe://prod.example/ns/edge/sa/gateway")
    secrets = {
        "limiter-certificate": pair("localhost"),
        "clients-ca": {"ca.crt": ca, "crl.pem": authority.crl(revoked[0]).decode()},
        "test-client": pair("envoy.edge.svc"),
        "limiter-token": {"token": TOKEN},
    }
    with Pod(manifests("tls"), secrets) as pod:
        assert [pod.probe(name) for name in PROBES] == [True, True, True]
        assert pod.ask().returncode == DONE
        scrape = f"https://localhost:{pod.metrics_port}/metrics"
        trusting = ssl.create_default_context(cafile=authority.ca_path)
        assert http_status(scrape, trusting) == 401
        with urlopen(Request(scrape, headers={"Authorization": f"Bearer {TOKEN}"}), context=trusting) as answer:
            assert 'reason="unauthenticated"' in answer.read().decode()
        allowed = authority.issue("other", "spiffe://prod.example/ns/edge/sa/other")
        results = [
            pod.ask("--cert", str(certificate), "--key", str(key)).returncode
            for certificate, key in (allowed, authority.issue("other.svc"), revoked)
        ]
        assert results == [DONE, UNREACHABLE, UNREACHABLE]


def test_job_creates_tables_and_admin_api_requires_tokens(tmp_path: Path, postgres_server: PostgresServer) -> None:
    url = postgres_server.url(postgres_server.new_database())
    ca = Authority(tmp_path / "ca").ca_path.read_text()
    database = {"url": url, "key-secret": KEY_SECRET, "admin-token": TOKEN}
    secrets = {"limiter-database": database, "database-ca": {"ca.crt": ca}}
    # Without the issuer and Redis, which would need the network; other tests cover them.
    with closing(Pod(manifests("database"), secrets, RLS_JWT_ISSUERS="", REDIS_URL="", RLS_REPLICAS=1)) as pod:
        assert pod.migrate().returncode == UNREACHABLE, "the server has no certificate"
    database["url"] = f"{url}?sslmode=disable"
    with closing(Pod(manifests("database"), secrets, RLS_JWT_ISSUERS="", REDIS_URL="", RLS_REPLICAS=1)) as pod:
        done = pod.migrate()
        assert done.returncode == DONE, done.stderr
        with pod:
            Admin(pod.admin_port).put_tier("gold", 100)
            assert Admin(pod.admin_port, "rla_not-a-token").send("GET", "/tiers").status == 401
            with urlopen(f"http://127.0.0.1:{pod.metrics_port}/metrics", timeout=5) as answer:
                assert "ratelimit_database_available 1" in answer.read().decode()
            assert pod.stop() == 0
            assert Path(pod.environment()["RLS_SNAPSHOT_FILE"]).exists()


class TryingOut(RedisServer):
    """The Redis of redis.deploy, started with its rendered command line."""

    def command(self) -> Sequence[str | Path]:
        (container,) = (c for name, p in pods(manifests("redis-deploy")) if "redis" in name for c in containers(p))
        arguments = [str(self.directory) if part == "/data" else part for part in container["args"]]
        return [self.binary, *arguments, "--bind", "127.0.0.1", "--port", str(self.port)]


def test_readiness_can_depend_on_redis_but_liveness_does_not() -> None:
    asks = {"RLS_STORE_TIMEOUT": "200ms", "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION": "true"}
    with (
        TryingOut(redis_binaries().get("valkey-9")) as redis,
        Pod(manifests("redis-deploy"), REDIS_URL=redis.address, **asks) as pod,  # type: ignore[arg-type]
    ):
        pod.wait_until(lambda: pod.ask().returncode == DONE, "finds Redis")
        redis.stop()
        assert pod.ask().returncode == UNREACHABLE
        assert [pod.probe(name) for name in PROBES] == [True, False, True]


def test_test_pod_detects_missing_redis_with_custom_rules() -> None:
    below = [{"key": "user", "rate_limit": {"unit": "year", "requests_per_unit": 1}}]
    rules = {"domain": "own", "descriptors": [{"key": "plan", "value": "a,b", "descriptors": below}]}
    inline = json.dumps({"own.yaml": rules})
    documents = parsed(template("--set-json", f"descriptors.inline={inline}", "--set", "redis.url=redis:6379"))
    with RedisServer() as redis, Pod(documents, REDIS_URL=redis.address, RLS_STORE_TIMEOUT="200ms") as pod:
        pod.wait_until(lambda: pod.ask().returncode == DONE, "finds Redis")
        assert "plan=a,b, user=helm-test  OVER_LIMIT" in pod.ask().stdout
        redis.stop()
        assert pod.ask().returncode == UNREACHABLE


def test_pod_starts_without_redis() -> None:
    """Ports open at once, so the startup probe never restarts a pod because Redis is unavailable."""
    with Pod(manifests("sidecar"), {"redis-credentials": {"auth": "secret"}}, REDIS_URL="127.0.0.1:1") as pod:
        assert [pod.probe(name) for name in PROBES] == [True, True, True]


@pytest.mark.e2e
def test_envoy_uses_the_sidecar_and_drains_on_termination(tmp_path: Path) -> None:
    documents = manifests("sidecar-container")
    config = one(documents, "ConfigMap", "sidecar-example")["data"]["envoy.yaml"]
    # EnvoyServer replaces the usual port of the examples; this case has another one.
    (tmp_path / "envoy.yaml").write_text(config.replace("port_value: 8000", "port_value: 10000"))
    with Pod(documents) as pod:
        moves = {"/sockets/rls.sock": pod.environment()["GRPC_UDS"], 9902: free_port()}
        with EnvoyServer(tmp_path / "envoy.yaml", moves) as envoy, Http(envoy.url) as client:  # type: ignore[arg-type]
            statuses = [client.get("/", x_user="ann").status for _ in range(TOO_MANY)]
            assert (statuses[0], set(statuses)) == (200, {200, 429})
            assert client.get("/ready").status == 200

            (container,) = (c for c in pod.pod["containers"] if c["name"] == "envoy")
            (*shell, script) = container["lifecycle"]["preStop"]["exec"]["command"]
            script = script.replace("/9901", f"/{envoy.admin_port}").replace("sleep 20", "sleep 0.2")
            assert subprocess.run([*shell, script], timeout=10).returncode == 0
            with Http(envoy.url) as after:
                assert after.get("/ready").status == 503
            with Http(envoy.url) as after:
                assert after.get("/", x_user="bob").status == 200
