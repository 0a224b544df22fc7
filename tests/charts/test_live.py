"""What the chart renders runs: the real service with the rendered variables and files, asked as the test pod asks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.admin import KEY_SECRET, TOKEN, Admin
from tests.certificates import Authority
from tests.charts.helm import containers, manifests, one, parsed, pods, template
from tests.charts.kubelet import Pod
from tests.client import Http
from tests.databases import PostgresServer
from tests.process import free_port
from tests.servers import EnvoyServer, RedisServer, redis_binaries

PROBES = ("startup", "readiness", "liveness")
DONE, BAD, UNREACHABLE = 0, 1, 4

TOO_MANY = 11
"""For five a minute, even if a minute ends meanwhile."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployed() -> Iterator[Pod]:
    with Pod(manifests("default")) as pod:
        yield pod


def test_the_test_pod_is_content_while_there_is_a_limit_that_is_not_reached(deployed: Pod) -> None:
    first = deployed.ask()
    assert first.returncode == DONE
    assert "user=helm-test  OK  5/minute, 4 left" in first.stdout
    assert deployed.ask("--times", str(TOO_MANY)).returncode == BAD


def test_the_test_pod_fails_where_there_are_no_rules(deployed: Pod) -> None:
    assert deployed.ask("--domain", "nowhere").returncode == BAD


def test_every_probe_succeeds(deployed: Pod) -> None:
    assert [deployed.probe(name) for name in PROBES] == [True, True, True]


def test_metrics_are_where_the_service_monitor_looks(deployed: Pod) -> None:
    endpoint = one(manifests("monitoring"), "ServiceMonitor")["spec"]["endpoints"][0]
    with urlopen(f"http://127.0.0.1:{deployed.metrics_port}{endpoint['path']}", timeout=5) as answer:
        assert "# TYPE" in answer.read().decode()


def test_the_service_has_nothing_to_say_against_its_variables(deployed: Pod) -> None:
    lines = [line for line in deployed.log().splitlines() if line]
    assert len(lines) == 1, lines
    assert '"serving"' in lines[0]


def test_the_test_pod_fails_if_nobody_answers(deployed: Pod) -> None:
    gone = Pod(manifests("default"))
    try:
        assert gone.ask("--timeout", "1").returncode == UNREACHABLE
    finally:
        gone.close()


def test_mutual_tls_from_secrets(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    ca = authority.ca_path.read_text()

    def pair(name: str) -> dict[str, str]:
        certificate, key = authority.issue(name)
        return {"tls.crt": certificate.read_text(), "tls.key": key.read_text(), "ca.crt": ca}

    secrets = {
        "limiter-certificate": pair("localhost"),
        "clients-ca": {"ca.crt": ca},
        "test-client": pair("envoy.edge.svc"),
    }
    with Pod(manifests("tls"), secrets) as pod:
        assert [pod.probe(name) for name in PROBES] == [True, True, True]
        assert pod.ask().returncode == DONE
        certificate, key = map(str, authority.issue("somebody.else.svc"))
        assert pod.ask("--cert", certificate, "--key", key, "--timeout", "1").returncode == UNREACHABLE


def test_the_job_makes_the_tables_and_the_admin_api_asks_for_tokens(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    url = postgres_server.url(postgres_server.new_database())
    ca = Authority(tmp_path / "ca").ca_path.read_text()
    database = {"url": url, "key-secret": KEY_SECRET, "admin-token": TOKEN}
    secrets = {"limiter-database": database, "database-ca": {"ca.crt": ca}}
    # Of the issuer and Redis, others tell; these would be asked over the network.
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
    """The Redis of redis.deploy, by its rendered command line."""

    def command(self) -> Sequence[str | Path]:
        (container,) = (c for name, p in pods(manifests("redis-deploy")) if "redis" in name for c in containers(p))
        arguments = [str(self.directory) if part == "/data" else part for part in container["args"]]
        return [self.binary, *arguments, "--bind", "127.0.0.1", "--port", str(self.port)]


def test_readiness_may_ask_redis_liveness_does_not_and_the_test_pod_does() -> None:
    asks = {"RLS_STORE_TIMEOUT": "200ms", "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION": "true"}
    with (
        TryingOut(redis_binaries().get("valkey-9")) as redis,
        Pod(manifests("redis-deploy"), REDIS_URL=redis.address, **asks) as pod,
    ):
        pod.wait_until(lambda: pod.ask().returncode == DONE, "finds Redis")
        redis.stop()
        assert pod.ask().returncode == UNREACHABLE
        assert [pod.probe(name) for name in PROBES] == [True, False, True]


def test_with_rules_of_ones_own_the_test_pod_sees_that_redis_is_away() -> None:
    below = [{"key": "user", "rate_limit": {"unit": "day", "requests_per_unit": 1}}]
    rules = {"domain": "own", "descriptors": [{"key": "plan", "value": "a,b", "descriptors": below}]}
    inline = json.dumps({"own.yaml": rules})
    documents = parsed(template("--set-json", f"descriptors.inline={inline}", "--set", "redis.url=redis:6379"))
    with RedisServer() as redis, Pod(documents, REDIS_URL=redis.address, RLS_STORE_TIMEOUT="200ms") as pod:
        pod.wait_until(lambda: pod.ask().returncode == DONE, "finds Redis")
        assert "plan=a,b, user=helm-test  OVER_LIMIT" in pod.ask().stdout
        redis.stop()
        assert pod.ask().returncode == UNREACHABLE


def test_a_pod_does_not_need_redis_to_start() -> None:
    """The ports open at once, so a startup probe never restarts a pod because Redis is away."""
    with Pod(manifests("sidecar"), {"redis-credentials": {"auth": "secret"}}, REDIS_URL="127.0.0.1:1") as pod:
        assert [pod.probe(name) for name in PROBES] == [True, True, True]


@pytest.mark.e2e
def test_envoy_asks_the_sidecar_and_stays_while_it_is_told_to_end(tmp_path: Path) -> None:
    documents = manifests("sidecar-container")
    config = one(documents, "ConfigMap", "sidecar-example")["data"]["envoy.yaml"]
    # EnvoyServer moves the port that every set-up here has; this case has another.
    (tmp_path / "envoy.yaml").write_text(config.replace("port_value: 8000", "port_value: 10000"))
    with Pod(documents) as pod:
        moves = {"/sockets/rls.sock": pod.environment()["GRPC_UDS"], 9902: free_port()}
        with EnvoyServer(tmp_path / "envoy.yaml", moves) as envoy, Http(envoy.url) as client:
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
