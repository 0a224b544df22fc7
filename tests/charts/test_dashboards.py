"""Shipped dashboards: their metrics exist and are used in meaningful expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.charts.series import KNOWN, TARGET, problems, result_labels
from tools.dashboards.__main__ import SHIPPED, files

PATHS = sorted(SHIPPED.glob("*.json"))
NAMES = [path.stem for path in PATHS]
VALUES_OF = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")

Json = dict[str, Any]


def dashboard(name: str) -> Json:
    found: Json = json.loads((SHIPPED / f"{name}.json").read_text())
    return found


def panels(name: str) -> Iterator[Json]:
    for panel in dashboard(name)["panels"]:
        if panel["type"] != "row":
            yield panel


def test_shipped_dashboards_are_current() -> None:
    assert {path: path.read_text() for path in PATHS} == files(), "`make docs` writes them anew"


def test_dashboard_uids_are_unique() -> None:
    assert len(NAMES) == 3
    assert {dashboard(name)["uid"] for name in NAMES} == {f"ratelimit-rls-{name}" for name in NAMES}
    assert len({dashboard(name)["title"] for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_panel_expressions_use_emitted_metrics(name: str) -> None:
    wrong = [
        f"{panel['title']}: {problem}"
        for panel in panels(name)
        for target in panel["targets"]
        for problem in problems(target["expr"])
    ]

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_legends_use_existing_labels(name: str) -> None:
    for panel in panels(name):
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= result_labels(target["expr"]), panel["title"]
            if panel["type"] == "timeseries":
                assert target["legendFormat"] != "__auto", f"{panel['title']}: a line without a name"


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_has_title_description_and_unit(name: str) -> None:
    listed = list(panels(name))

    assert len({panel["id"] for panel in dashboard(name)["panels"]}) == len(dashboard(name)["panels"])
    for panel in listed:
        assert panel["title"]
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["targets"], panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard(name)["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", NAMES)
def test_variables_exist_and_offer_existing_labels(name: str) -> None:
    text = (SHIPPED / f"{name}.json").read_text()
    variables = {variable["name"]: variable for variable in dashboard(name)["templating"]["list"]}

    used = set(re.findall(r"\$\{?([a-z]\w*)", text))
    assert used == {*variables}, "of both, each one is used"
    for variable in variables.values():
        if variable["type"] == "query":
            found = VALUES_OF.fullmatch(variable["query"]["query"])
            assert found, variable["name"]
            series, _, matchers = found["series"].partition("{")
            labels = KNOWN[series].labels | TARGET
            assert found["label"] in labels, variable["name"]
            assert {*re.findall(r"(\w+)=~", matchers)} <= labels, variable["name"]


@pytest.mark.parametrize("name", NAMES)
def test_rates_use_the_rate_interval_of_grafana(name: str) -> None:
    ranges = {
        found
        for panel in panels(name)
        for target in panel["targets"]
        for found in re.findall(r"\[(.+?)\]", target["expr"])
    }

    assert ranges <= {"$__rate_interval", "$__range"}


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(rate(ratelimit_decision_total[5m]))", "nobody emits ratelimit_decision_total"),
        ("sum(rate(ratelimit_decisions[5m]))", "nobody emits ratelimit_decisions"),
        ("sum by (ratelimit_policy) (rate(ratelimit_decisions_total[5m]))", "it has no label ratelimit_policy"),
        ('sum(rate(ratelimit_decisions_total{outcome="ok"}[5m]))', "it has no label outcome"),
        ('sum(rate(ratelimit_decisions_total{ratelimit_outcome="denied"}[5m]))', "is never denied"),
        ("sum(ratelimit_decisions_total)", "only ever grows"),
        ("sum(max_over_time(ratelimit_decisions_total[5m]))", "only ever grows"),
        ("sum(rate(ratelimit_calls_in_flight[5m]))", "has no rate"),
        ("sum(ratelimit_calls_in_flight[5m])", "a range that nothing is done with"),
        ("sum(rate(ratelimit_decisions_total))", "a range is missing"),
        ("histogram_quantile(0.9, sum by (le) (rate(ratelimit_decisions_total[5m])))", "told from buckets"),
        ("histogram_quantile(0.9, sum(rate(rpc_server_call_duration_seconds_bucket[5m])))", "needs le"),
        ("sum(rate(rpc_server_call_duration_seconds_bucket[5m]))", "all of them together"),
        ('sum(rate(rpc_server_call_duration_seconds_bucket{le="0.03"}[5m]))', "ends at 0.03"),
    ],
)
def test_meaningless_expressions_are_found(expression: str, problem: str) -> None:
    assert any(problem in found for found in problems(expression))
