"""The command `envoy-config`: output, messages and exit codes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratelimit_rls.cli import main
from ratelimit_rls.cli.envoy_config import envoy_config
from ratelimit_rls.cli.exit_codes import ExitCode

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "envoy_config.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"```console\n\$ ratelimit-rls (.*?)\n(.*?)```", PAGE, re.DOTALL)

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 1}"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command in a directory with the files of the page."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["envoy-config", *arguments])
        return code, *capsys.readouterr()

    return run


def written(ended: tuple[int, str, str]) -> Any:
    code, out, err = ended
    assert (code, err) == (ExitCode.DONE, "")
    return yaml.safe_load(out)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command[:60] for command, _ in COMMANDS])
def test_command_prints_the_documented_output(command: str, output: str, run: Run) -> None:
    _, *arguments = shlex.split(command)
    _, out, err = run(*arguments)
    assert (out or err) == output


def test_page_has_all_examples() -> None:
    assert (len(FILES), len(COMMANDS)) == (3, 3)


EXAMPLES = re.findall(r"\$ ratelimit-rls envoy-config (.*)", re.sub(r"\\\n *", "", envoy_config.epilog or ""))


@pytest.mark.parametrize("example", EXAMPLES)
def test_help_example_works_on_the_project_rules(
    example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = re.split(r" [|>] ", example)[0]
    code = main(["envoy-config", *shlex.split(arguments)])
    out, err = capsys.readouterr()
    assert (code, err, bool(out)) == (ExitCode.DONE, "", True)


def test_help_has_examples() -> None:
    assert len(EXAMPLES) == 3


def test_no_producible_descriptor_is_an_error_after_the_warnings(run: Run) -> None:
    code, out, err = run("authz.yaml")
    assert (code, out) == (ExitCode.BAD, "")
    *warnings, error = err.splitlines()
    assert [line.partition(": warning[")[0] for line in warnings] == ["authz.yaml:10:9"]
    assert error == "Error: Envoy cannot create a descriptor for any rule; use --from KEY=SOURCE"


def test_host_filter_comes_before_the_rate_limit_filters(run: Run) -> None:
    Path("a.yaml").write_text(f"domain: a\ndescriptors: [{{key: host, {LIMIT}}}]\n")
    parts = written(run("a.yaml", "--from", "host=host", "--format", "fragments"))
    assert [each["name"] for each in parts["http_filters"]] == ["ratelimit-rls.host", "envoy.filters.http.ratelimit"]
    ((action,),) = (each["actions"] for each in parts["rate_limits"])
    where = {"key": "ratelimit-rls", "path": [{"key": "host"}]}
    assert action == {"metadata": {"descriptor_key": "host", "metadata_key": where}}


def test_each_domain_has_its_own_filter_and_stage(run: Run) -> None:
    for name in ("a", "b"):
        Path(f"{name}.yaml").write_text(f"domain: {name}\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")
    parts = written(run("a.yaml", "b.yaml", "--format", "fragments"))
    filters = [(each["name"], each["typed_config"].get("stage", 0)) for each in parts["http_filters"]]
    assert filters == [("envoy.filters.http.ratelimit.a", 0), ("envoy.filters.http.ratelimit.b", 1)]
    assert [each.get("stage", 0) for each in parts["rate_limits"]] == [0, 1]

    parts = written(run("a.yaml", "b.yaml", "--format", "fragments", "--rate-limits-on", "filter"))
    assert "rate_limits" not in parts
    assert all("stage" not in each["typed_config"] for each in parts["http_filters"])
    assert [len(each["typed_config"]["rate_limits"]) for each in parts["http_filters"]] == [1, 1]

    (only,) = written(run("a.yaml", "b.yaml", "--domain", "b", "--format", "fragments"))["http_filters"]
    assert (only["name"], only["typed_config"]["domain"]) == ("envoy.filters.http.ratelimit", "b")


def test_more_domains_than_stages_are_an_error(run: Run) -> None:
    for number in range(12):
        Path(f"{number}.yaml").write_text(f"domain: d{number}\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")
    files = [f"{number}.yaml" for number in range(12)]
    code, out, err = run(*files)
    assert (code, out) == (ExitCode.BAD, "")
    assert err == (
        "Error: the rules have 12 domains, but a virtual host can hold 11; "
        "select some with --domain, or use --rate-limits-on filter\n"
    )
    assert len(written(run(*files, "--rate-limits-on", "filter", "--format", "fragments"))["http_filters"]) == 12


def test_timeout_includes_the_longest_max_delay(run: Run) -> None:
    Path("held.yaml").write_text(
        f"domain: a\ndescriptors: [{{key: remote_address, action: throttle, max_delay: 2s, {LIMIT}}}]\n"
    )

    def timeout(*flags: str) -> str:
        (one,) = written(run("held.yaml", "--format", "fragments", *flags))["http_filters"]
        return str(one["typed_config"]["timeout"])

    assert timeout() == "2.100s"
    assert timeout("--timeout", "30ms") == "0.030s"


def test_flags_configure_the_cluster(run: Run) -> None:
    Path("a.yaml").write_text(f"domain: a\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")

    def cluster(*flags: str) -> Any:
        (one,) = written(run("a.yaml", "--format", "fragments", *flags))["clusters"]
        return one

    assert cluster("--server", "rls.internal:9")["type"] == "STRICT_DNS"
    by_ip = cluster("--server", "[::1]:9", "--cacert", "ca.pem", "--health-check")
    assert by_ip["type"] == "STATIC"
    assert by_ip["health_checks"][0]["grpc_health_check"] == {"service_name": "ratelimit"}
    tls = by_ip["transport_socket"]["typed_config"]
    assert "sni" not in tls
    assert tls["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"] == [
        {"san_type": "IP_ADDRESS", "matcher": {"exact": "::1"}}
    ]
    assert "tls_certificates" not in tls["common_tls_context"]
    pipe = cluster("--server", "unix:///run/rls.sock")["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
    assert pipe["endpoint"]["address"] == {"pipe": {"path": "/run/rls.sock"}}


def test_flags_configure_failure_mode_and_headers(run: Run) -> None:
    Path("a.yaml").write_text(f"domain: a\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")
    flags = ("--deny-on-failure", "--no-x-ratelimit-headers")
    (one,) = written(run("a.yaml", "--format", "fragments", *flags))["http_filters"]
    assert one["typed_config"]["failure_mode_deny"] is True
    assert "enable_x_ratelimit_headers" not in one["typed_config"]
    (one,) = written(run("authz.yaml", "--ext-authz", "--format", "fragments", *flags))["http_filters"]
    assert "failure_mode_allow" not in one["typed_config"]


def test_ext_authz_sends_the_domain_only_if_there_are_several(run: Run) -> None:
    Path("second.yaml").write_text(FILES["authz.yaml"].replace("domain: web", "domain: api"))
    assert "typed_per_filter_config" not in written(run("authz.yaml", "--ext-authz", "--format", "fragments"))
    parts = written(run("authz.yaml", "second.yaml", "--ext-authz", "--format", "fragments", "--domain", "api"))
    per_host = parts["typed_per_filter_config"]["envoy.filters.http.ext_authz"]
    assert per_host["check_settings"] == {"context_extensions": {"ratelimit_domain": "api"}}
    assert [each["name"] for each in parts["http_filters"]] == ["envoy.filters.http.ext_authz"]


def test_ext_authz_allows_credential_and_address_headers(run: Run) -> None:
    Path("known.yaml").write_text(
        "domain: a\nidentity: {credentials: [{kind: jwt, header: authorization}, {kind: api_key, query: key}]}\n"
        "ext_authz: {trusted_networks: [10.0.0.0/8], descriptors: [{entries: [{key: ip, from: anonymous_ip}]}]}\n"
        f"descriptors: [{{key: ip, {LIMIT}}}]\n"
    )
    (one,) = written(run("known.yaml", "--ext-authz", "--format", "fragments"))["http_filters"]
    sent = [pattern["exact"] for pattern in one["typed_config"]["allowed_headers"]["patterns"]]
    assert sent == ["authorization", "content-type", "x-forwarded-for", "x-request-id"]


def test_headers_with_underscores_are_rejected(run: Run) -> None:
    rejects = {"headers_with_underscores_action": "REJECT_REQUEST"}
    (listener,) = written(run("authz.yaml", "--ext-authz"))["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    assert manager["typed_config"]["common_http_protocol_options"] == rejects
    assert manager["typed_config"]["strip_trailing_host_dot"] is True
    assert written(run("authz.yaml", "--ext-authz", "--format", "fragments"))["common_http_protocol_options"] == rejects
    resource = written(run("authz.yaml", "--ext-authz", "--format", "istio", "--server", "rls:1"))
    (merged,) = (each for each in resource["spec"]["configPatches"] if each["applyTo"] == "NETWORK_FILTER")
    assert merged["patch"]["value"]["typed_config"]["common_http_protocol_options"] == rejects


def test_istio_adds_a_cluster_where_the_mesh_has_none(run: Run) -> None:
    Path("a.yaml").write_text(f"domain: a\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")
    flags = ("--format", "istio", "--context", "sidecar", "--workload", "app=shop", "--namespace", "shop")
    resource = written(run("a.yaml", *flags, "--server", "unix:/run/rls.sock"))
    assert resource["metadata"] == {"name": "ratelimit-rls", "namespace": "shop"}
    assert resource["spec"]["workloadSelector"] == {"labels": {"app": "shop"}}
    patches = resource["spec"]["configPatches"]
    assert [patch["applyTo"] for patch in patches] == ["HTTP_FILTER", "NETWORK_FILTER", "VIRTUAL_HOST", "CLUSTER"]
    assert {patch["match"]["context"] for patch in patches} == {"SIDECAR_INBOUND"}


def test_values_are_quoted_as_text(run: Run) -> None:
    Path("odd.yaml").write_text(f'domain: "y"\ndescriptors: [{{key: "1e3", value: "0x1", {LIMIT}}}]\n')
    code, out, _ = run("odd.yaml", "--from", "1e3=value:0x1", "--format", "fragments")
    assert code == ExitCode.DONE
    assert "domain: 'y'" in out
    assert "descriptor_key: '1e3'" in out
    assert "descriptor_value: '0x1'" in out


def test_line_breaks_cannot_end_a_comment(run: Run) -> None:
    Path("odd.yaml").write_text(
        f'domain: a\ndescriptors: [{{key: "k\\nadmin: x", {LIMIT}}}, {{key: remote_address, {LIMIT}}}]\n'
    )
    code, out, err = run("odd.yaml", "--format", "fragments")
    assert code == ExitCode.DONE
    assert "descriptor k\\nadmin: x:" in out.splitlines()[1]
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["rules.yaml", "--from", "user=method", "--format", "fragments"],
            ExitCode.DONE,
            "no route makes the descriptor path=/login",
        ),
        (["rules.yaml", "--from", "user=method", "--strict"], ExitCode.WARNINGS, "2 warnings: nothing was written"),
        (["rules.yaml"], ExitCode.BAD, "nothing says where 'user' comes from; add e.g. --from user=header:x-user"),
        (["rules.yaml", "--domain", "web"], ExitCode.BAD, "unknown domain 'web'; the rules have edge"),
        (["authz.yaml"], ExitCode.BAD, "Envoy cannot create a descriptor for any rule; use --from KEY=SOURCE"),
        (["rules.yaml", "--ext-authz"], ExitCode.BAD, "no domain of these rules has an 'ext_authz'"),
        (["rules.yaml", "--ext-authz", "--domain", "edge"], ExitCode.BAD, "the domain 'edge' has no 'ext_authz'"),
        (["authz.yaml", "--ext-authz", "--from", "a=path"], ExitCode.USAGE, "omit --from, --mapping"),
        (["rules.yaml", "--server", "rls"], ExitCode.USAGE, "--server 'rls' is not HOST:PORT"),
        (["rules.yaml", "--server", "http://rls:8081"], ExitCode.USAGE, "has the host 'http://rls', which is neither"),
        (["rules.yaml", "--server", "a,b:8081"], ExitCode.USAGE, "has the host 'a,b', which is neither a DNS name nor"),
        (["rules.yaml", "--upstream", "-:1"], ExitCode.USAGE, "--upstream '-:1' has the host '-'"),
        (
            ["rules.yaml", "--listen", "localhost:1"],
            ExitCode.USAGE,
            "listens on IP addresses only; use e.g. 127.0.0.1:1",
        ),
        (["rules.yaml", "--listen", "0.0.0.0:9901"], ExitCode.USAGE, "uses the port of Envoy's admin page"),
        (["rules.yaml", "--timeout", "5"], ExitCode.USAGE, "--timeout '5' is not a duration"),
        (["rules.yaml", "--timeout", "0s"], ExitCode.USAGE, "--timeout '0s' is less than 1ms"),
        (["rules.yaml", "--timeout", "999us"], ExitCode.USAGE, "--timeout '999us' is less than 1ms"),
        (["rules.yaml", "--cert", "a"], ExitCode.USAGE, "--cert and --key must be given together"),
        (["rules.yaml", "--cert", "a", "--key", "b"], ExitCode.USAGE, "need --cacert"),
        (["rules.yaml", "--cacert", "a", "--server", "unix:/a"], ExitCode.USAGE, "needs --server-name"),
        (["rules.yaml", "--format", "istio"], ExitCode.USAGE, "--server is required"),
        (["rules.yaml", "--workload", "a=b"], ExitCode.USAGE, "--workload needs --format istio"),
        (["rules.yaml", "--gateway", "eg"], ExitCode.USAGE, "--gateway needs --format envoy-gateway"),
        (
            ["authz.yaml", "--ext-authz", "--format", "istio", "--server", "a.b:1", "--workload", "a"],
            ExitCode.USAGE,
            "--workload must be LABEL=VALUE",
        ),
        (
            ["rules.yaml", "--format", "istio", "--server", "a.b:1", "--health-check"],
            ExitCode.USAGE,
            "--health-check needs its own cluster",
        ),
        (
            ["rules.yaml", "--format", "envoy-gateway", "--server", "a.b:1", "--rate-limits-on", "virtual-host"],
            ExitCode.USAGE,
            "needs --rate-limits-on filter",
        ),
    ],
)
def test_error_has_message_and_exit_code(arguments: list[str], code: ExitCode, message: str, run: Run) -> None:
    ended, out, err = run(*arguments)
    assert ended == code
    assert message in err
    assert bool(out) == (code == ExitCode.DONE)
