"""`envoy-config`: what it writes, what it says, and how it ends."""

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
    """In a directory with the files of the page."""
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


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command[:60] for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_shows(command: str, shown: str, run: Run) -> None:
    _, *arguments = shlex.split(command)
    _, out, err = run(*arguments)
    assert (out or err) == shown


def test_the_page_has_examples() -> None:
    assert (len(FILES), len(COMMANDS)) == (3, 3)


EXAMPLES = re.findall(r"\$ ratelimit-rls envoy-config (.*)", re.sub(r"\\\n *", "", envoy_config.epilog or ""))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_help_works_on_the_rules_of_this_project(
    example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = re.split(r" [|>] ", example)[0]
    code = main(["envoy-config", *shlex.split(arguments)])
    out, err = capsys.readouterr()
    assert (code, err, bool(out)) == (ExitCode.DONE, "", True)


def test_the_help_has_examples() -> None:
    assert len(EXAMPLES) == 3


def test_where_nothing_can_be_made_warnings_are_warnings_and_the_error_is_the_error(run: Run) -> None:
    code, out, err = run("authz.yaml")
    assert (code, out) == (ExitCode.BAD, "")
    *warnings, error = err.splitlines()
    assert [line.partition(": warning[")[0] for line in warnings] == ["authz.yaml:10:9"]
    assert error == "Error: Envoy could make no descriptor of the rules at all"


def test_the_host_is_found_out_by_a_filter_before_the_ones_that_ask(run: Run) -> None:
    Path("a.yaml").write_text(f"domain: a\ndescriptors: [{{key: host, {LIMIT}}}]\n")
    parts = written(run("a.yaml", "--from", "host=host", "--format", "fragments"))
    assert [each["name"] for each in parts["http_filters"]] == ["ratelimit-rls.host", "envoy.filters.http.ratelimit"]
    ((action,),) = (each["actions"] for each in parts["rate_limits"])
    where = {"key": "ratelimit-rls", "path": [{"key": "host"}]}
    assert action == {"metadata": {"descriptor_key": "host", "metadata_key": where}}


def test_several_domains_have_a_filter_each_and_stages_keep_them_apart(run: Run) -> None:
    for name in ("a", "b"):
        Path(f"{name}.yaml").write_text(f"domain: {name}\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")
    parts = written(run("a.yaml", "b.yaml", "--format", "fragments"))
    told = [(each["name"], each["typed_config"].get("stage", 0)) for each in parts["http_filters"]]
    assert told == [("envoy.filters.http.ratelimit.a", 0), ("envoy.filters.http.ratelimit.b", 1)]
    assert [each.get("stage", 0) for each in parts["rate_limits"]] == [0, 1]

    parts = written(run("a.yaml", "b.yaml", "--format", "fragments", "--rate-limits-on", "filter"))
    assert "rate_limits" not in parts
    assert all("stage" not in each["typed_config"] for each in parts["http_filters"])
    assert [len(each["typed_config"]["rate_limits"]) for each in parts["http_filters"]] == [1, 1]

    (only,) = written(run("a.yaml", "b.yaml", "--domain", "b", "--format", "fragments"))["http_filters"]
    assert (only["name"], only["typed_config"]["domain"]) == ("envoy.filters.http.ratelimit", "b")


def test_more_domains_than_stages_need_a_choice(run: Run) -> None:
    for number in range(12):
        Path(f"{number}.yaml").write_text(f"domain: d{number}\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")
    files = [f"{number}.yaml" for number in range(12)]
    code, out, err = run(*files)
    assert (code, out) == (ExitCode.BAD, "")
    assert err == (
        "Error: there are 12 domains, and a virtual host can keep 11 apart; "
        "choose with --domain, or use --rate-limits-on filter\n"
    )
    assert len(written(run(*files, "--rate-limits-on", "filter", "--format", "fragments"))["http_filters"]) == 12


def test_the_timeout_leaves_room_for_what_the_rules_hold(run: Run) -> None:
    Path("held.yaml").write_text(
        f"domain: a\ndescriptors: [{{key: remote_address, action: throttle, max_delay: 2s, {LIMIT}}}]\n"
    )

    def timeout(*flags: str) -> str:
        (one,) = written(run("held.yaml", "--format", "fragments", *flags))["http_filters"]
        return str(one["typed_config"]["timeout"])

    assert timeout() == "2.100s"
    assert timeout("--timeout", "30ms") == "0.030s"


def test_the_cluster_is_as_the_flags_say(run: Run) -> None:
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


def test_failures_and_headers_are_as_the_flags_say(run: Run) -> None:
    Path("a.yaml").write_text(f"domain: a\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")
    flags = ("--deny-on-failure", "--no-x-ratelimit-headers")
    (one,) = written(run("a.yaml", "--format", "fragments", *flags))["http_filters"]
    assert one["typed_config"]["failure_mode_deny"] is True
    assert "enable_x_ratelimit_headers" not in one["typed_config"]
    (one,) = written(run("authz.yaml", "--ext-authz", "--format", "fragments", *flags))["http_filters"]
    assert "failure_mode_allow" not in one["typed_config"]


def test_ext_authz_tells_the_domain_only_where_there_are_several(run: Run) -> None:
    Path("second.yaml").write_text(FILES["authz.yaml"].replace("domain: web", "domain: api"))
    assert "typed_per_filter_config" not in written(run("authz.yaml", "--ext-authz", "--format", "fragments"))
    parts = written(run("authz.yaml", "second.yaml", "--ext-authz", "--format", "fragments", "--domain", "api"))
    told = parts["typed_per_filter_config"]["envoy.filters.http.ext_authz"]
    assert told["check_settings"] == {"context_extensions": {"ratelimit_domain": "api"}}
    assert [each["name"] for each in parts["http_filters"]] == ["envoy.filters.http.ext_authz"]


def test_istio_has_a_cluster_of_our_own_where_the_mesh_has_none(run: Run) -> None:
    Path("a.yaml").write_text(f"domain: a\ndescriptors: [{{key: remote_address, {LIMIT}}}]\n")
    flags = ("--format", "istio", "--context", "sidecar", "--workload", "app=shop", "--namespace", "shop")
    resource = written(run("a.yaml", *flags, "--server", "unix:/run/rls.sock"))
    assert resource["metadata"] == {"name": "ratelimit-rls", "namespace": "shop"}
    assert resource["spec"]["workloadSelector"] == {"labels": {"app": "shop"}}
    patches = resource["spec"]["configPatches"]
    assert [patch["applyTo"] for patch in patches] == ["HTTP_FILTER", "VIRTUAL_HOST", "CLUSTER"]
    assert {patch["match"]["context"] for patch in patches} == {"SIDECAR_INBOUND"}


def test_values_that_look_like_something_else_stay_text(run: Run) -> None:
    Path("odd.yaml").write_text(f'domain: "y"\ndescriptors: [{{key: "1e3", value: "0x1", {LIMIT}}}]\n')
    code, out, _ = run("odd.yaml", "--from", "1e3=value:0x1", "--format", "fragments")
    assert code == ExitCode.DONE
    assert "domain: 'y'" in out
    assert "descriptor_key: '1e3'" in out
    assert "descriptor_value: '0x1'" in out


def test_what_a_file_says_cannot_end_a_comment(run: Run) -> None:
    Path("odd.yaml").write_text(
        f'domain: a\ndescriptors: [{{key: "k\\nadmin: x", {LIMIT}}}, {{key: remote_address, {LIMIT}}}]\n'
    )
    code, out, err = run("odd.yaml", "--format", "fragments")
    assert code == ExitCode.DONE
    assert "descriptor k\\nadmin: x:" in out.splitlines()[1]
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (
            ["rules.yaml", "--from", "user=method", "--format", "fragments"],
            ExitCode.DONE,
            "no route makes the descriptor path=/login",
        ),
        (["rules.yaml", "--from", "user=method", "--strict"], ExitCode.WARNINGS, "2 warnings: nothing was written"),
        (["rules.yaml"], ExitCode.BAD, "nothing says where 'user' comes from; add e.g. --from user=header:x-user"),
        (["rules.yaml", "--domain", "web"], ExitCode.BAD, "there is no domain 'web'; there are edge"),
        (["authz.yaml"], ExitCode.BAD, "Envoy could make no descriptor of the rules at all"),
        (["rules.yaml", "--ext-authz"], ExitCode.BAD, "no domain of these rules has an 'ext_authz'"),
        (["rules.yaml", "--ext-authz", "--domain", "edge"], ExitCode.BAD, "the domain 'edge' has no 'ext_authz'"),
        (["authz.yaml", "--ext-authz", "--from", "a=path"], ExitCode.USAGE, "leave the mapping out"),
        (["rules.yaml", "--server", "rls"], ExitCode.USAGE, "--server 'rls' is not HOST:PORT"),
        (["rules.yaml", "--server", "http://rls:8081"], ExitCode.USAGE, "has the host 'http://rls', which is neither"),
        (["rules.yaml", "--server", "a,b:8081"], ExitCode.USAGE, "has the host 'a,b', which is neither a name nor"),
        (["rules.yaml", "--upstream", "-:1"], ExitCode.USAGE, "--upstream '-:1' has the host '-'"),
        (["rules.yaml", "--listen", "localhost:1"], ExitCode.USAGE, "listens on IP addresses; use e.g. 127.0.0.1:1"),
        (["rules.yaml", "--listen", "0.0.0.0:9901"], ExitCode.USAGE, "has the port of Envoy's admin page"),
        (["rules.yaml", "--timeout", "5"], ExitCode.USAGE, "--timeout '5' is not a duration"),
        (["rules.yaml", "--timeout", "0s"], ExitCode.USAGE, "--timeout '0s' is less than 1ms"),
        (["rules.yaml", "--timeout", "999us"], ExitCode.USAGE, "--timeout '999us' is less than 1ms"),
        (["rules.yaml", "--cert", "a"], ExitCode.USAGE, "--cert and --key belong together"),
        (["rules.yaml", "--cert", "a", "--key", "b"], ExitCode.USAGE, "need --cacert"),
        (["rules.yaml", "--cacert", "a", "--server", "unix:/a"], ExitCode.USAGE, "needs --server-name"),
        (["rules.yaml", "--format", "istio"], ExitCode.USAGE, "--server is missing"),
        (["rules.yaml", "--workload", "a=b"], ExitCode.USAGE, "--workload belongs to --format istio"),
        (["rules.yaml", "--gateway", "eg"], ExitCode.USAGE, "--gateway belongs to --format envoy-gateway"),
        (
            ["authz.yaml", "--ext-authz", "--format", "istio", "--server", "a.b:1", "--workload", "a"],
            ExitCode.USAGE,
            "--workload is LABEL=VALUE",
        ),
        (
            ["rules.yaml", "--format", "istio", "--server", "a.b:1", "--health-check"],
            ExitCode.USAGE,
            "--health-check needs a cluster of its own",
        ),
        (
            ["rules.yaml", "--format", "envoy-gateway", "--server", "a.b:1", "--rate-limits-on", "virtual-host"],
            ExitCode.USAGE,
            "the filter has the descriptors",
        ),
    ],
)
def test_what_cannot_be_written_is_told_with_its_exit_code(
    arguments: list[str], code: ExitCode, told: str, run: Run
) -> None:
    ended, out, err = run(*arguments)
    assert ended == code
    assert told in err
    assert bool(out) == (code == ExitCode.DONE)
