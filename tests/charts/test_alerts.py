"""The alerts that are shipped: what they watch exists, and whoever is woken finds what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.series import problems, result_labels

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "charts" / "ratelimit-rls" / "alerts").glob("*.yaml"))
TRIED = sorted((Path(__file__).parent / "alerts").glob("*.test.yaml"))
RUNBOOK = "docs/operations.md"

Json = dict[str, Any]

ALERTS: dict[str, Json] = {
    rule["alert"]: rule
    for path in PATHS
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
}

each_alert = pytest.mark.parametrize("alert", ALERTS.values(), ids=[*ALERTS])


def anchors() -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_name_is_given_twice() -> None:
    assert sum(len(re.findall("- alert:", path.read_text())) for path in PATHS) == len(ALERTS)


@each_alert
def test_what_is_watched_is_emitted(alert: Json) -> None:
    assert not [*problems(alert["expr"])]


@each_alert
def test_it_tells_what_is_wrong_how_bad_it_is_and_what_to_do(alert: Json) -> None:
    annotations = alert["annotations"]

    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["for"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert annotations["summary"].endswith(".")
    assert annotations["description"].endswith(".")
    page, _, anchor = annotations["runbook_url"].partition("#")
    assert (page, anchor) == (RUNBOOK, alert["alert"].lower())
    assert anchor in anchors()


@each_alert
def test_it_speaks_only_of_labels_that_it_has(alert: Json) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))

    assert named <= result_labels(alert["expr"])


def test_every_alert_is_tried_in_both_directions() -> None:
    """Once to see it fire and once to see it keep quiet."""
    tries = [
        one for path in TRIED for test in yaml.safe_load(path.read_text())["tests"] for one in test["alert_rule_test"]
    ]

    assert {one["alertname"] for one in tries if one["exp_alerts"]} == {*ALERTS}
    assert {one["alertname"] for one in tries if not one["exp_alerts"]} == {*ALERTS}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, a part of Prometheus, is not on PATH")
@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.name)
def test_promtool_sees_them_fire_and_keep_quiet(path: Path) -> None:
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
