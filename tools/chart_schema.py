"""Generates values.schema.json and the table in the chart's README.md from values.yaml and the settings.

    # -- Description of the value; continues on the following lines.
    # @schema {enum: [a, b]}
    value: a

The type of a value is that of its default; `@schema` adds constraints. A mapping accepts only its own keys unless
`@schema` says otherwise. `python -m tools.chart_schema` writes both files; a test fails if they are outdated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ratelimit_rls.core.duration import PATTERN as DURATION
from ratelimit_rls.identity.issuers import ALGORITHMS
from ratelimit_rls.settings.catalogue import GROUPS, VARIABLES, Variable
from ratelimit_rls.settings.validation import LOG_LEVELS

CHART = Path(__file__).parents[1] / "charts" / "ratelimit-rls"
BEGIN, END = "<!-- values: written by tools/chart_schema.py -->", "<!-- end of values -->"

_OF_ANY_SECURITY_CONTEXT: dict[str, Any] = {
    "appArmorProfile": {"type": "object"},
    "runAsGroup": {"type": "integer", "minimum": 0},
    "runAsNonRoot": {"type": "boolean"},
    "runAsUser": {"type": "integer", "minimum": 0},
    "seLinuxOptions": {"type": "object"},
    "seccompProfile": {"type": "object"},
    "windowsOptions": {"type": "object"},
}

DEFINITIONS: dict[str, Any] = {
    "port": {"type": "integer", "minimum": 1, "maximum": 65_535},
    "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    "issuer": {
        "type": "object",
        "required": ["name", "issuer", "audiences", "algorithms"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "issuer": {"type": "string", "minLength": 1},
            "audiences": {"type": "array", "minItems": 1, "items": {"type": "string"}},
            "algorithms": {"type": "array", "minItems": 1, "items": {"enum": list(ALGORITHMS)}},
            "jwks": {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: {"type": "string"} for name in ("file", "url", "refresh", "timeout")},
            },
            "secret_file": {"type": "string"},
            "claims": {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: {"type": "string"} for name in ("user", "tier", "org")},
            },
            "leeway": {"type": "string"},
            "require_expiry": {"type": "boolean"},
        },
    },
    "intOrPercent": {
        "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^([0-9]+%)?$"}],
    },
    "quantities": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "requests": {"$ref": "#/definitions/quantities"},
            "limits": {"$ref": "#/definitions/quantities"},
            "claims": {"type": "array", "items": {"type": "object"}},
        },
    },
    "probe": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "initialDelaySeconds": {"type": "integer", "minimum": 0},
            "periodSeconds": {"type": "integer", "minimum": 1},
            "timeoutSeconds": {"type": "integer", "minimum": 1},
            "successThreshold": {"type": "integer", "minimum": 1},
            "failureThreshold": {"type": "integer", "minimum": 1},
            "terminationGracePeriodSeconds": {"type": "integer", "minimum": 1},
        },
    },
    "updateStrategy": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "type": {"enum": ["RollingUpdate", "Recreate"]},
            "rollingUpdate": {
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {
                    "maxSurge": {"$ref": "#/definitions/intOrPercent"},
                    "maxUnavailable": {"$ref": "#/definitions/intOrPercent"},
                },
            },
        },
    },
    "podSecurityContext": {
        "type": "object",
        "additionalProperties": False,
        "properties": _OF_ANY_SECURITY_CONTEXT
        | {
            "fsGroup": {"type": "integer", "minimum": 0},
            "fsGroupChangePolicy": {"enum": ["Always", "OnRootMismatch"]},
            "seLinuxChangePolicy": {"enum": ["MountOption", "Recursive"]},
            "supplementalGroups": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "supplementalGroupsPolicy": {"enum": ["Merge", "Strict"]},
            "sysctls": {"type": "array", "items": {"type": "object"}},
        },
    },
    "securityContext": {
        "type": "object",
        "additionalProperties": False,
        "properties": _OF_ANY_SECURITY_CONTEXT
        | {
            "allowPrivilegeEscalation": {"type": "boolean"},
            "capabilities": {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: {"type": "array", "items": {"type": "string"}} for name in ("add", "drop")},
            },
            "privileged": {"type": "boolean"},
            "procMount": {"type": "string"},
            "readOnlyRootFilesystem": {"type": "boolean"},
        },
    },
}

OF_PARENTS: dict[str, Any] = {
    "global": {"type": "object", "description": "Values of a parent chart for all of its dependencies; not used here."},
    "enabled": {"type": "boolean", "description": "For a parent chart's `condition`; not used here."},
}
"""Keys that Helm passes to a subchart, so they must be accepted."""

_TYPES = {"str": "string", "bool": "boolean", "int": "integer", "float": "number", "seq": "array", "map": "object"}

# Every setting may be a string, in the formats of the service, since it becomes a variable. A pattern applies to
# strings only, and a bound to numbers only.
_WHOLE = "^[+-]?(0[0-7_]+|0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[1-9][0-9_]*|0)$"
_SETTINGS: dict[str, dict[str, Any]] = {
    "bool": {"type": ["boolean", "string"], "pattern": "^(1|t|T|TRUE|true|True|0|f|F|FALSE|false|False)$"},
    "whole": {"type": ["integer", "string"], "pattern": _WHOLE},
    "number": {"type": ["number", "string"], "pattern": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"},
    "duration": {"type": "string", "pattern": rf"^\+?0$|{DURATION}"},
    "list": {"type": ["array", "string"], "items": {"type": "string"}},
}

_REDIS_TYPES = ("single", "sentinel", "cluster")
_IN_ANY_CASE = {"LOG_LEVEL": LOG_LEVELS, "REDIS_TYPE": _REDIS_TYPES, "REDIS_PERSECOND_TYPE": _REDIS_TYPES}
"""Settings with case-insensitive values."""

_FIELDS = {name: about for group in GROUPS for name, about in group.model_fields.items()}


@dataclass(frozen=True, slots=True)
class Value:
    """One value of values.yaml."""

    path: tuple[str, ...]
    default: Any
    kind: str  # type of the YAML node: str, bool, int, float, seq or map
    meaning: str
    more: dict[str, Any] | None  # content of `@schema`
    inner: tuple[Value, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def is_section(self) -> bool:
        """True if it only groups other values."""
        return bool(self.inner) and not self.meaning


def values() -> tuple[Value, ...]:
    """Return the values of values.yaml in order."""
    text = (CHART / "values.yaml").read_text()
    root = yaml.compose(text, yaml.SafeLoader)
    return tuple(_inner(root, (), text.splitlines(), yaml.safe_load(text)))


def _inner(node: Any, path: tuple[str, ...], lines: list[str], defaults: Any) -> Iterator[Value]:
    for key, item in node.value:
        meaning, more = _comment(lines, key.start_mark.line, key.start_mark.column)
        default = defaults[key.value]
        kind = item.tag.rpartition(":")[2]
        own = (*path, key.value)
        inner = (
            tuple(_inner(item, own, lines, default))
            if kind == "map" and item.start_mark.line != key.start_mark.line
            else ()
        )
        yield Value(own, default, kind, meaning, more, inner)


def _comment(lines: list[str], at: int, indent: int) -> tuple[str, dict[str, Any] | None]:
    """Parse the comment directly above a key."""
    above: list[str] = []
    for line in reversed(lines[:at]):
        if not line.startswith(" " * indent + "#"):
            break
        above.insert(0, line.strip().removeprefix("#").strip())
    more = [line.removeprefix("@schema").strip() for line in above if line.startswith("@schema")]
    comment = " ".join(line for line in above if not line.startswith("@schema"))
    meaning = comment.partition("-- ")[2] if comment.startswith("-- ") else ""
    return meaning, yaml.safe_load(more[0]) if more else None


def leaves(some: tuple[Value, ...]) -> Iterator[Value]:
    """Yield the values that are not sections."""
    for value in some:
        if value.is_section:
            yield from leaves(value.inner)
        else:
            yield value


def schema() -> dict[str, Any]:
    found = {value.path[0]: _schema(value) for value in values()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "properties": OF_PARENTS | found,
        "definitions": DEFINITIONS,
    }


def _schema(value: Value) -> dict[str, Any]:
    comment = {"description": value.meaning} if value.meaning else {}
    if value.name == "settings":
        return {
            "type": "object",
            **comment,
            "additionalProperties": False,
            "properties": dict(map(_setting, VARIABLES)),
        }
    if value.more and "$ref" in value.more:
        return value.more  # keys next to $ref are ignored
    found: dict[str, Any] = {"type": _TYPES[value.kind], **comment}
    if value.inner:
        found["properties"] = {one.path[-1]: _schema(one) for one in value.inner}
        found["additionalProperties"] = False
    return found | (value.more or {})


def _setting(variable: Variable) -> tuple[str, dict[str, Any]]:
    about: dict[str, Any] = {"description": variable.description}
    field = _FIELDS[variable.field]
    if "|" in variable.kind:
        return variable.name, about | {"type": "string", "enum": [*variable.kind.split("|"), *_no_choice(variable)]}
    if words := _IN_ANY_CASE.get(variable.name):
        return variable.name, about | {"type": "string", "pattern": f"^({'|'.join(map(_any_case, words))})$"}
    kind = "whole" if field.annotation is int else variable.kind
    about |= _SETTINGS.get(kind, {"type": "string"})
    for bound in field.metadata:
        if kind in ("whole", "number"):
            about |= {word: getattr(bound, name) for name, word in _BOUNDS.items() if hasattr(bound, name)}
    return variable.name, about


_BOUNDS = {"ge": "minimum", "le": "maximum"}


def _no_choice(variable: Variable) -> list[str]:
    """Return the empty string as an additional choice if it is not one."""
    return [] if variable.default else [""]


def _any_case(word: str) -> str:
    return "".join(f"[{letter}{letter.upper()}]" for letter in word)


def table() -> str:
    """Return the values as a Markdown table."""
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for value in leaves(values()):
        default = json.dumps(value.default, ensure_ascii=False)
        cells = (f"`{value.name}`", f"`{default}`" if default != '""' else "", value.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def files() -> dict[Path, str]:
    """Return the path and the content of each file."""
    readme = (CHART / "README.md").read_text()
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return {
        CHART / "values.schema.json": json.dumps(schema(), indent=2, ensure_ascii=False) + "\n",
        CHART / "README.md": f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}",
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
