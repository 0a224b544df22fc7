"""Output of `envoy-config`: a real Envoy runs it, and limits apply for every source of the mapping."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from ratelimit_rls.cli import main
from tests.support.certificates import Authority
from tests.support.grpc_client import Http, get
from tests.support.servers import EnvoyServer, Service, Upstream

pytestmark = pytest.mark.e2e

EXTENSIONS = "type.googleapis.com/envoy.extensions.filters"
ENVOY = Path(sys.executable).with_name("envoy")

ONCE = "rate_limit: {unit: year, requests_per_unit: 1}"

SOURCES = {
    "user": "header:x-user",
    "page": "query:page",
    "path": "path",
    "shape": "path:/users/me,/users/{id},/users/{id}/orders/**",
    "method": "method",
    "host": "host",
    "scheme": "scheme",
    "masked_remote_address": "masked_remote_address:8,64",
    "sub": "metadata:test.tokens:payload:sub",
    "plan": "value:free",
    "probe": "header:x-probe",
}

# Every rule has its own key and matches only requests that name it: one Envoy, one limit each.
RULES = f"""\
domain: edge
descriptors:
  - {{key: user, descriptors: [{{key: probe, value: user, {ONCE}}}]}}
  - {{key: page, value: "7", descriptors: [{{key: probe, value: page, {ONCE}}}]}}
  - {{key: path, value: /alone, descriptors: [{{key: probe, value: path, {ONCE}}}]}}
  - {{key: shape, descriptors: [{{key: probe, value: shape, {ONCE}}}]}}
  - {{key: method, value: GET, descriptors: [{{key: probe, value: method, {ONCE}}}]}}
  - {{key: host, descriptors: [{{key: probe, value: host, {ONCE}}}]}}
  - {{key: scheme, value: http, descriptors: [{{key: probe, value: scheme, {ONCE}}}]}}
  - {{key: remote_address, descriptors: [{{key: probe, value: remote, {ONCE}}}]}}
  - {{key: masked_remote_address, value: 127.0.0.0/8, descriptors: [{{key: probe, value: masked, {ONCE}}}]}}
  - {{key: sub, value: alice, descriptors: [{{key: probe, value: sub, {ONCE}}}]}}
  - {{key: plan, value: free, descriptors: [{{key: probe, value: plan, {ONCE}}}]}}
  - {{key: destination_cluster, value: upstream, descriptors: [{{key: probe, value: cluster, {ONCE}}}]}}
  - {{key: source_cluster, descriptors: [{{key: probe, value: source, {ONCE}}}]}}
  - {{key: "pr*", value: any, {ONCE}}}
"""

TOKENS = {
    "name": "tokens",
    "typed_config": {
        "@type": f"{EXTENSIONS}.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": "test.tokens", "value": {"payload": {"sub": "alice"}}}],
    },
}
"""Replaces a filter that reads tokens."""


def generated(*arguments: str | Path, remarks: str = "") -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["envoy-config", *map(str, arguments)])
    assert (code, err.getvalue()) == (0, remarks)
    return out.getvalue()


def sources() -> list[str]:
    return [part for key, source in SOURCES.items() for part in ("--from", f"{key}={source}")]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "edge.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture(scope="module")
def limited(rules: Path, upstream: Upstream) -> Iterator[Http]:
    """The generated bootstrap, with the filter that reads tokens before ours."""
    service = Service({"RLS_RULES": rules})
    config = yaml.safe_load(generated(rules, *sources(), "--deny-on-failure", "--timeout", "5s", "--health-check"))
    (listener,) = config["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    manager["typed_config"]["http_filters"].insert(0, TOKENS)
    assert manager["typed_config"].pop("strip_any_host_port")  # other gateways may not set it
    file = rules.with_name("envoy.config")
    file.write_text(yaml.safe_dump(config))
    where = {8000: upstream.port, 8081: service.grpc_port}
    with service, EnvoyServer(file, where) as proxy, Http(proxy.url) as client:
        yield client


@pytest.mark.parametrize(
    ("probe", "first", "second", "other"),
    [
        ("user", ("/", "ann"), ("/", "ann"), ("/", "bob")),
        ("page", ("/?page=7", ""), ("/?a=1&page=7", ""), ("/?page=8", "")),
        ("path", ("/alone", ""), ("/alone?with=query", ""), ("/alone/", "")),
        ("shape", ("/users/1", ""), ("/users/2?x=/", ""), ("/users/me", "")),
        ("shape", ("/users/1/orders", ""), ("/users/2/orders/3?x", ""), ("/elsewhere", "")),
        ("method", ("/", ""), ("/", ""), None),
        ("host", ("/", ""), ("/", ""), None),
        ("scheme", ("/", ""), ("/", ""), None),
        ("remote", ("/", ""), ("/", ""), None),
        ("masked", ("/", ""), ("/", ""), None),
        ("sub", ("/", ""), ("/", ""), None),
        ("plan", ("/", ""), ("/", ""), None),
        ("cluster", ("/", ""), ("/", ""), None),
        ("source", ("/", ""), ("/", ""), None),
        ("any", ("/", ""), ("/", ""), None),
        ("unheard-of", ("/", ""), None, ("/", "")),
    ],
)
def test_limit_applies_for_every_source_of_its_value(
    limited: Http,
    probe: str,
    first: tuple[str, str],
    second: tuple[str, str] | None,
    other: tuple[str, str] | None,
) -> None:
    def status(request: tuple[str, str] | None, expected: int) -> int:
        if request is None:
            return expected
        path, user = request
        return limited.get(path, x_probe=probe, **({"x_user": user} if user else {})).status

    assert (status(first, 200), status(second, 429), status(other, 200)) == (200, 429, 200)


def test_request_without_the_header_is_not_limited_by_it(limited: Http) -> None:
    assert [limited.get("/", x_probe="user").status for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("host", ["EXAMPLE.com", "example.com:80", "example.com.", "me@Example.com.:443"])
def test_host_spellings_share_a_counter(limited: Http, host: str) -> None:
    limited.get("/", x_probe="host", host="example.com")
    assert limited.get("/", x_probe="host", host=host).status == 429


def bare(
    listener_filters: list[Any], host: dict[str, Any], clusters: list[Any], manager_has: dict[str, Any] | None = None
) -> dict[str, Any]:
    """An existing Envoy configuration with the generated parts inserted."""
    router = {"@type": f"{EXTENSIONS}.http.router.v3.Router"}
    manager = {
        "@type": f"{EXTENSIONS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        **(manager_has or {}),
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], **host}]},
        "http_filters": [*listener_filters, {"name": "envoy.filters.http.router", "typed_config": router}],
    }
    connection_manager = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    listener = {
        "name": "ingress",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 10000}},
        "filter_chains": [{"filters": [connection_manager]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def of_fragments(text: str) -> dict[str, Any]:
    parts = yaml.safe_load(text)
    host = {key: parts[key] for key in ("rate_limits", "typed_per_filter_config") if key in parts}
    manager_has = {"common_http_protocol_options": parts["common_http_protocol_options"]}
    return bare(parts["http_filters"], host, parts["clusters"], manager_has)


def of_envoy_filter(text: str) -> dict[str, Any]:
    """Apply the EnvoyFilter as Istio does, with a fake cluster of the mesh."""
    patches = yaml.safe_load(text)["spec"]["configPatches"]
    parts: dict[str, list[Any]] = {"HTTP_FILTER": [], "NETWORK_FILTER": [], "VIRTUAL_HOST": [{}], "CLUSTER": []}
    for patch in patches:
        parts[patch["applyTo"]].append(patch["patch"]["value"])
    name = "outbound|8081||rls.limits.svc.cluster.local"
    clusters = parts["CLUSTER"] or [{"name": name, "type": "STATIC", "connect_timeout": "1s"}]
    (merged,) = parts["NETWORK_FILTER"]
    return bare(parts["HTTP_FILTER"], parts["VIRTUAL_HOST"][-1], clusters, merged["typed_config"])


def of_patch_policy(text: str) -> dict[str, Any]:
    operations = [
        (patch["type"].rpartition(".")[2], patch["operation"]["value"])
        for patch in yaml.safe_load(text)["spec"]["jsonPatches"]
    ]
    filters = [value for kind, value in operations if kind == "Listener"]
    return bare(filters, {}, [value for kind, value in operations if kind == "Cluster"])


AUTHZ = f"""\
domain: %s
ext_authz:
  trusted_proxies: 1
  use_remote_address: true
  descriptors:
    - entries: [{{key: remote_address, from: client_ip}}, {{key: user, header: x-user}}]
    - entries: [{{key: sub, metadata: {{namespace: test.tokens, path: [payload, sub]}}}}]
descriptors:
  - {{key: remote_address, descriptors: [{{key: user, {ONCE}}}]}}
  - {{key: sub, {ONCE}}}
"""


def test_a_real_envoy_accepts_every_form(rules: Path, tmp_path: Path) -> None:
    for domain in ("web", "api"):
        (tmp_path / f"{domain}.yaml").write_text(AUTHZ % domain)
    web, api = tmp_path / "web.yaml", tmp_path / "api.yaml"
    odd = tmp_path / "odd.yaml"
    odd.write_text(
        f'domain: "y"\ndescriptors: [{{key: "1e3", value: "100%", {ONCE}}}, {{key: "on: ü#", {ONCE}}}, '
        f'{{key: "n", {ONCE}}}]\n'
    )
    odd_map = tmp_path / "odd.map"
    odd_map.write_text('1e3: value:100%\n"on: ü#": {path: ["/a.b(c),%2F/{x}", "/a.b/**"]}\nn: header:n\n')
    name = "rls.limits.svc.cluster.local:8081"
    authority = Authority(tmp_path / "certs")
    pem, key = authority.issue("rls")
    tls = ("--cacert", authority.ca_path, "--cert", pem, "--key", key, "--server-name", "rls")
    forms = {
        "fragments": of_fragments(generated(rules, *sources(), "--format", "fragments", "--server", "localhost:1")),
        "authz-fragments": of_fragments(generated(web, api, "--ext-authz", "--format", "fragments", *tls)),
        "authz-bootstrap": yaml.safe_load(generated(web, api, "--ext-authz", "--upstream", "localhost:1")),
        "odd": yaml.safe_load(generated(odd, "--mapping", odd_map)),
        "istio": of_envoy_filter(generated(rules, *sources(), "--format", "istio", "--server", name)),
        "istio-tls": of_envoy_filter(generated(rules, *sources(), "--format", "istio", "--server", name, *tls)),
        "istio-authz": of_envoy_filter(generated(web, api, "--ext-authz", "--format", "istio", "--server", name)),
        "gateway": of_patch_policy(generated(rules, *sources(), "--format", "envoy-gateway", "--server", name)),
        "gateway-authz": of_patch_policy(generated(web, "--ext-authz", "--format", "envoy-gateway", "--server", name)),
    }
    for name, config in forms.items():
        if not name.startswith("gateway"):  # Envoy Gateway does it itself
            (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
            common = chain["filters"][0]["typed_config"]["common_http_protocol_options"]
            assert common == {"headers_with_underscores_action": "REJECT_REQUEST"}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(config))
        ended = subprocess.run(
            [ENVOY, "--mode", "validate", "-c", file, "--log-level", "error"], capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{name}: {ended.stderr}"


def test_unix_socket_and_descriptors_in_the_filter(
    two_domains: tuple[Path, Path], tmp_path: Path, upstream: Upstream
) -> None:
    unix_socket = tmp_path / "rls.sock"
    flags = ("--server", f"unix:{unix_socket}", "--rate-limits-on", "filter")
    assert_both_limited(two_domains, {"GRPC_UDS": unix_socket}, flags, upstream)


def test_mutual_tls_and_stages_for_several_domains(
    two_domains: tuple[Path, Path], tmp_path: Path, upstream: Upstream
) -> None:
    authority = Authority(tmp_path / "certs")
    pem, key = authority.issue("ratelimit.internal")
    certificate, private_key = authority.issue("envoy.internal")
    environment = {
        "GRPC_SERVER_USE_TLS": "true",
        "GRPC_SERVER_TLS_CERT": pem,
        "GRPC_SERVER_TLS_KEY": key,
        "GRPC_CLIENT_TLS_CACERT": authority.ca_path,
        "GRPC_CLIENT_TLS_SAN": "envoy.internal",
    }
    files = ("--cacert", authority.ca_path, "--cert", certificate, "--key", private_key)
    assert_both_limited(two_domains, environment, (*files, "--server-name", "ratelimit.internal"), upstream)


KNOWN_CALLERS = f"""\
domain: web
identity: {{credentials: [{{kind: api_key, header: x-api-key}}]}}
ext_authz: {{descriptors: [{{entries: [{{key: path, from: path}}]}}]}}
descriptors: [{{key: path, value: /once, {ONCE}}}]
"""


@pytest.mark.parametrize("is_rejected", [True, False], ids=["as-written", "in-an-envoy-that-allows-them"])
def test_identity_headers_with_underscores_are_rejected(tmp_path: Path, upstream: Upstream, is_rejected: bool) -> None:
    """CGI servers treat `x_ratelimit_user` like `x-ratelimit-user`."""
    rules, file = tmp_path / "web.yaml", tmp_path / "envoy.config"
    rules.write_text(KNOWN_CALLERS)
    config = yaml.safe_load(generated(rules, "--ext-authz", "--deny-on-failure", "--timeout", "5s"))
    if not is_rejected:
        (manager,) = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
        assert manager["typed_config"].pop("common_http_protocol_options")
    file.write_text(yaml.safe_dump(config))
    service = Service({"RLS_RULES": rules})
    forged = ("x_ratelimit_user", "x-ratelimit_user", "X_RateLimit-Tier", "x_ratelimit_api_key", "x_ratelimit_rule")
    with service, EnvoyServer(file, {8000: upstream.port, 8081: service.grpc_port}) as proxy:
        assert get(proxy.url, "/", x_ratelimit_user="forged").status == 200
        assert "x-ratelimit-user" not in upstream.last_headers
        for name in forged:
            upstream.last_headers, before = {}, upstream.requests
            status = status_with(proxy.url, name, "forged")
            assert (status, upstream.requests - before) == ((400, 0) if is_rejected else (200, 1)), name
            assert "forged" not in upstream.last_headers.values()


def status_with(url: str, name: str, value: str) -> int:
    """Return the status of a GET with a header whose name is sent unchanged."""
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)) as connection:
        connection.request("GET", "/", headers={name: value})
        return connection.getresponse().status


@pytest.fixture
def two_domains(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"domain: first\ndescriptors: [{{key: user, {ONCE}}}]\n")
    second.write_text(f"domain: second\ndescriptors: [{{key: path, value: /second, {ONCE}}}]\n")
    return first, second


def assert_both_limited(
    rules: tuple[Path, Path], environment: dict[str, Any], flags: tuple[str | Path, ...], upstream: Upstream
) -> None:
    service = Service({"RLS_RULES": ",".join(map(str, rules)), **environment})
    mapped = ("--from", "user=header:x-user", "--from", "path=path", "--deny-on-failure", "--timeout", "5s")
    file = rules[0].with_name("envoy.config")
    file.write_text(generated(*rules, *mapped, *flags))
    with service, EnvoyServer(file, {8000: upstream.port, 8081: service.grpc_port}) as proxy:
        assert [get(proxy.url, "/", x_user="ann").status for _ in range(2)] == [200, 429]
        assert [get(proxy.url, "/second").status for _ in range(2)] == [200, 429]
