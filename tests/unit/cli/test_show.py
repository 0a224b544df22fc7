"""`show`: the tree drawn, and written back so that it means the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.rules.compile import compile_documents

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run

RICH = """\
domain: rich
charge: admitted
descriptors:
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
"""


def without_places(tree: Tree) -> list[tuple[object, ...]]:
    """Everything rules mean, apart from where they stand."""
    return [
        (
            *(rule.path, rule.limits, rule.replaces, rule.limits and rule.charge, rule.shadow_mode),
            *(rule.quota_mode, rule.detailed_metric, rule.metadata),
        )
        for rule in tree.rules()
    ]


def test_the_tree_is_drawn_with_rules_and_places(run: Run, rules: Path) -> None:
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


def test_the_yaml_means_the_same_as_what_it_was_made_from(run: Run, rules: Path) -> None:
    for text in (rules.read_text(), RICH):
        rules.write_text(text)
        written = run("show", "--format", "yaml", rules).out
        before, after = (compile_documents({"f": content.encode()}) for content in (text, written))
        assert without_places(after.tree) == without_places(before.tree)
        assert len(before.tree.rules()) > 2
        rules.write_text(written)
        assert run("show", "--format", "yaml", rules).out == written


def test_json_has_paths_and_places(run: Run, rules: Path) -> None:
    told = json.loads(run("show", "--format", "json", rules).out)
    assert told["files"] == 1
    (domain,) = told["domains"]
    path = domain["descriptors"][1]
    assert (path["path"], path["position"]) == ("edge.path_/v1/*", "api.yaml:8:5")
    assert path["rate_limit"] == {"unit": "second", "requests_per_unit": 5, "name": "five"}


def test_rules_that_cannot_be_used_are_not_shown(run: Run, rules: Path) -> None:
    rules.write_text("domain: edge\ndescriptors: [{value: b}]\n")
    ended = run("show", rules)
    assert (ended.code, ended.out) == (ExitCode.BAD, "")
    assert ended.err.startswith("api.yaml:2:15: error: ")
