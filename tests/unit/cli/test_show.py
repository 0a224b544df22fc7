"""`show`: the tree, and canonical YAML with the same meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Charge
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.rules.compile import compile_documents

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run

RICH = """\
domain: rich
charge: admitted
shard_by: domain
on_store_failure: local
answer: {headers: [ietf, retry-after], retry_jitter: 5s}
deny: {body: "a $${ and ${retry_after} s", content_type: text/html, headers: {x-a: "${rule}"}, status: 503}
ext_authz:
  trusted_proxies: 0x1
  use_remote_address: yes
  descriptors: [{entries: [{key: "y", value: 007}, {key: path, from: path}], hits: 1_0}]
descriptors:
  - key: held
    action: throttle
    max_delay: 250ms
    answer: {}
    deny: {}
    rate_limit: {unit: minute, requests_per_unit: 30}
  - key: watched
    warn_at: 0.855
    penalty: {within: 90s}
    answer: {headers: []}
    deny: {format: problem+json}
    charge: always
    rate_limit: {unit: minute, requests_per_unit: 30}
  - key: tenant
    value: "yes"
    detailed_metric: true
    metadata: {plan: free, caps: {burst: 5}}
    rate_limit: {unit: day, requests_per_unit: 7, algorithm: fixed_window}
    descriptors:
      - key: "route*"
        value_to_metric: true
        quota_mode: true
        rate_limit: {unit: week, requests_per_unit: 9, algorithm: token_bucket, burst: 3}
      - key: path
        value: /a*
        share_threshold: true
        rate_limit: {unit: hour, requests_per_unit: 1}
  - key: "1:30"
    value: ü
    rate_limit: {unlimited: true, name: free}
  - key: "1e3"
    value: "a\\Nb"
    rate_limit: {unit: day, requests_per_unit: 7, name: "12E5"}
  - key: crowd
    hot: {lease: 1.5s}
    on_store_failure: deny
    rate_limit: {unit: minute, requests_per_unit: 7}
    descriptors:
      - key: again
        on_store_failure: local
        rate_limit: {unit: minute, requests_per_unit: 7}
      - key: likewise
        rate_limit: {unit: minute, requests_per_unit: 7}
"""


def without_places(tree: Tree) -> list[object]:
    """Return the meaning of rules without positions. The charge of rules without limits is ignored."""
    of_domains = [
        (root.key, root.response_policy, root.deny, root.on_store_failure, root.shard_by, tree.mappings.get(root.key))
        for root in tree.domains.values()
    ]
    rules = [
        rule._replace(position=None, charge=rule.charge if rule.limits else Charge.ALWAYS) for rule in tree.rules()
    ]
    return [*of_domains, *rules]


def test_tree_format_shows_rules_and_positions(run: Run, rules: Path) -> None:
    ended = run("show", rules)
    assert ended.code == ExitCode.DONE
    assert ended.out == (
        "edge\n"
        "├─ plan=free\n"
        "│  └─ user     ● 10/minute gcra, burst 5, charge admitted  api.yaml:6:9\n"
        "├─ path=/v1/*  ● 5/second fixed_window, charge always, shadow_mode, name five  api.yaml:8:5\n"
        "├─ plan        ● 100/minute fixed_window, charge always, replaces five  api.yaml:12:5\n"
        "└─ staff       ● unlimited  api.yaml:14:5\n"
    )


def test_non_default_options_are_printed_once_per_rule_or_domain(run: Run, rules: Path) -> None:
    rules.write_text(RICH)
    result = run("show", rules).out.splitlines()
    assert result[0].split(maxsplit=1) == [
        "rich",
        "headers ietf retry-after, jitter 5s, deny 503 text/html, 1 header, on store failure local, shard by domain, "
        "slot 6448, ext_authz",
    ]
    assert result[1].endswith(
        "● 30/minute leaky_bucket, burst 1, charge admitted, throttle up to 250ms, on store failure local, "
        "headers as by default, deny 429  api.yaml:12:5"
    )
    assert result[2].endswith(
        "● 30/minute fixed_window, charge always, penalty x1 x2 x4 x8 after 3 within 90s, warn at 85.5 %, "
        "on store failure local, headers none, deny 429 problem+json  api.yaml:18:5"
    )
    assert [line.partition("● ")[2].partition("  ")[0] for line in result[-3:]] == [
        "7/minute fixed_window, charge admitted, leases of 1500ms, on store failure deny",
        "7/minute fixed_window, charge admitted, on store failure local",
        "7/minute fixed_window, charge admitted, on store failure deny",
    ]
    assert not any("headers" in line for line in result[3:])


def test_show_escapes_control_characters(run: Run, rules: Path) -> None:
    limit = 'rate_limit: {unit: minute, requests_per_unit: 5, name: "a\\rb"}'
    rules.write_text(f'domain: "e\\ndge"\ndescriptors: [{{key: "k\\e[31m", value: "a\\u2028b", {limit}}}]\n')
    assert run("show", rules).out.splitlines() == [
        "e\\ndge",
        r"└─ k\x1b[31m=a\u2028b  ● 5/minute fixed_window, charge always, name a\rb  api.yaml:2:15",
    ]


def test_canonical_yaml_compiles_to_the_same_rules(run: Run, rules: Path) -> None:
    for text in (rules.read_text(), RICH):
        rules.write_text(text)
        written = run("show", "--format", "yaml", rules).out
        before, after = (compile_documents({"f": content.encode()}) for content in (text, written))
        assert without_places(after.tree) == without_places(before.tree)
        assert len(before.tree.rules()) > 2
        rules.write_text(written)
        assert run("show", "--format", "yaml", rules).out == written


def test_inherited_values_are_written_once(run: Run, rules: Path) -> None:
    rules.write_text(RICH)
    (domain,) = json.loads(run("show", "--format", "json", rules).out)["domains"]
    assert (domain["shard_by"], domain["on_store_failure"]) == ("domain", "local")
    *others, crowd = domain["descriptors"]
    assert not any("on_store_failure" in descriptor for descriptor in others)
    assert (crowd["hot"], crowd["on_store_failure"]) == ({"lease": "1500ms"}, "deny")
    again, likewise = crowd["descriptors"]
    assert again["on_store_failure"] == "local"
    assert "on_store_failure" not in likewise


def test_json_format_has_paths_and_positions(run: Run, rules: Path) -> None:
    result = json.loads(run("show", "--format", "json", rules).out)
    assert result["files"] == 1
    (domain,) = result["domains"]
    path = domain["descriptors"][1]
    assert (path["path"], path["position"]) == ("edge.path_/v1/*", "api.yaml:8:5")
    assert path["rate_limit"] == {"unit": "second", "requests_per_unit": 5, "name": "five"}


def test_invalid_rules_are_rejected(run: Run, rules: Path) -> None:
    rules.write_text("domain: edge\ndescriptors: [{value: b}]\n")
    ended = run("show", rules)
    assert (ended.code, ended.out) == (ExitCode.BAD, "")
    assert ended.err.startswith("api.yaml:2:15: error: ")
