"""Model of dashboards, and its conversion to the JSON of Grafana.

A dashboard consists of rows of panels. A panel has a title, a description, a unit and queries. Ids, positions and all
other fields of Grafana's format are filled in here, equally for all panels, so that two versions of a dashboard differ
only where their content does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

SCHEMA_VERSION = 39  # supported by Grafana 10.4 and later, which upgrade it
TAG = "ratelimit-rls"
COLUMNS = 24

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


class Kind(Enum):
    """Panel type of Grafana, and the height of such a panel."""

    LINES = ("timeseries", 8)
    NUMBER = ("stat", 4)
    TABLE = ("table", 9)


class Query(NamedTuple):
    expression: str
    legend: str = ""


class Level(NamedTuple):
    """Threshold: the colour from a value upwards."""

    value: float
    colour: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    about: str  # description: what it shows and how to interpret it
    unit: str  # unit id of Grafana
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8  # of COLUMNS
    levels: tuple[Level, ...] = ()  # colours of a number; for lines, the value that should not be exceeded
    words: tuple[tuple[str, str], ...] = ()  # text for certain values
    stacked: bool = False


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


class Choice(NamedTuple):
    """Dashboard variable: one of the values of a label, or all of them (the default)."""

    name: str
    label: str
    values: str  # Grafana query: label_values(…)
    default: str = ""  # if set, a single value with this default


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str  # never change it: links and bookmarks contain it
    title: str
    about: str
    choices: tuple[Choice, ...]
    rows: tuple[Row, ...]

    def to_json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,  # shared crosshair
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "",
            "links": [_LINK_TO_THE_OTHERS],
            "annotations": {"list": []},
            "templating": {"list": [_DATASOURCE_VARIABLE, *map(_variable, self.choices)]},
            "panels": _placed(self.rows),
        }


_LINK_TO_THE_OTHERS: Json = {
    "type": "dashboards",
    "title": "",
    "tags": [TAG],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
}

_DATASOURCE_VARIABLE: Json = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
}


def _variable(choice: Choice) -> Json:
    variable: Json = {
        "name": choice.name,
        "label": choice.label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": choice.values, "refId": choice.name},
        "refresh": 2,  # refresh when the time range changes, so that stale values are not offered
        "sort": 1,
    }
    if choice.default:
        return variable | {"current": {"text": choice.default, "value": choice.default}}
    # `.*` instead of `.+`: outside Kubernetes there is no namespace and no pod, and All must still match.
    everything = {"multi": True, "includeAll": True, "allValue": ".*"}
    return variable | everything | {"current": {"text": ["All"], "value": ["$__all"]}}


def _placed(rows: tuple[Row, ...]) -> list[Json]:
    """Return the panels with positions: from left to right and top to bottom, in the given order."""
    panels: list[Json] = []
    top = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        top += 1
        left = lowest = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, lowest = 0, top + lowest, 0
            _, height = panel.kind.value
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            panels.append({"id": len(panels) + 1, "gridPos": place} | _panel(panel))
            left, lowest = left + panel.width, max(lowest, height)
        top += lowest
    return panels


def _panel(panel: Panel) -> Json:
    kind, _ = panel.kind.value
    json: Json = {
        "type": kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(number, query, panel.kind) for number, query in enumerate(panel.queries)],
    }
    if panel.kind is Kind.TABLE:
        json["transformations"] = [{"id": "organize", "options": {"excludeByName": {"Time": True}}}]
    return json


_OPTIONS: dict[Kind, Json] = {
    Kind.LINES: {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max", "lastNotNull"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    Kind.NUMBER: {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    Kind.TABLE: {"showHeader": True, "sortBy": [{"displayName": "Value", "desc": True}]},
}


def _field(panel: Panel) -> Json:
    steps = [
        {"color": "green", "value": None},
        *({"color": level.colour, "value": level.value} for level in panel.levels),
    ]
    field: Json = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.words:
        field["mappings"] = [{"type": "value", "options": {value: {"text": text} for value, text in panel.words}}]
    if panel.kind is Kind.NUMBER:
        return field | {"noValue": "0", "color": {"mode": "thresholds"}}
    if panel.kind is Kind.LINES:
        field["min"] = 0
        field["color"] = {"mode": "palette-classic"}
        field["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.levels else "off"},
        }
    return field


def _target(number: int, query: Query, kind: Kind) -> Json:
    target: Json = {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "expr": query.expression,
        "legendFormat": query.legend or "__auto",
    }
    if kind is Kind.TABLE:
        return target | {"instant": True, "format": "table"}
    return target
