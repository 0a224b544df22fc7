"""Limits of tiers, users and API keys, given as JSON.

The compiler of rules reads them, so both accept the same limits and report the same errors. Only the position differs:
it is the name of the field, since there is no line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratelimit_rls.core.model import Limit
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.document import expand, read_document
from ratelimit_rls.rules.grammar import NEW_LIMIT_KEYS, RATE_LIMIT_KEYS
from ratelimit_rls.rules.limit import compile_limits
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.messages import unknown_key
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.yaml.scalars import ScalarKind, resolve

MAX_LIMITS = 16
"""Limits per subject. Each costs one counter for every call."""

LIMIT_KEYS = tuple(key for key in RATE_LIMIT_KEYS if key in NEW_LIMIT_KEYS or key in ("unit", "requests_per_unit"))
"""Keys of a rate_limit that define what is counted. The other keys refer to other rules, which do not exist here."""

_LINE = 1  # of every node; the column distinguishes them, and no message contains it
_MAX_INTEGER_BITS = 64


def read_limits(fields: object, where: str = "limits") -> tuple[Limit, ...]:
    """Return the limits of a list of mappings, in the format of `limits` in rules; () for an empty list.

    Raise RulesError with every problem. The `file` of each is the field, e.g. `limits[1].unit`, and its line is 0.
    """
    reader = _LimitsReader(where)
    nodes = reader.limits(fields)
    limits: tuple[Limit, ...] = ()
    if nodes.items and not reader.problems:
        limits = reader.compiled(nodes)
    if reader.problems:
        raise RulesError(reader.problems)
    return limits


class _LimitsReader:
    """Converts JSON values to YAML nodes and records which field each node is."""

    def __init__(self, where: str) -> None:
        self._fields = [where]  # names, indexed by column
        self.problems: list[Problem] = []

    def limits(self, fields: object) -> YamlList:
        (where,) = self._fields
        if not isinstance(fields, Sequence) or isinstance(fields, str | bytes):
            self._reject(where, 'must be a list of limits, e.g. [{"unit": "minute", "requests_per_unit": 100}]')
            return YamlList(_LINE, 0, ())
        if len(fields) > MAX_LIMITS:
            self._reject(where, f"{len(fields):,} limits; at most {MAX_LIMITS} are allowed")
        items = [self._limit(f"{where}[{at}]", value) for at, value in enumerate(fields[:MAX_LIMITS])]
        return YamlList(_LINE, 0, tuple(items))

    def compiled(self, limits: YamlList) -> tuple[Limit, ...]:
        found = Findings("")
        descriptor = _map({"key": _text("subject"), "limits": limits})
        document = read_document(_map({"descriptors": YamlList(_LINE, 0, (descriptor,))}), found)
        compiled = compile_limits(expand(document.descriptors[0]), found)
        for problem in found.errors:
            message = problem.message.removeprefix(diagnostics.not_yaml(f"unmarshal errors: line {_LINE}: "))
            self._reject(self._fields[problem.column], message)
        return compiled

    def _limit(self, field: str, value: object) -> YamlNode:
        column = self._column(field)
        if not isinstance(value, Mapping):
            self._reject(field, 'must be a limit, e.g. {"unit": "minute", "requests_per_unit": 100}')
            return YamlMap(_LINE, column, ())
        pairs: list[tuple[YamlNode, YamlNode]] = []
        for key, inner in value.items():
            if key in LIMIT_KEYS:
                pairs.append((_text(key), self._scalar(f"{field}.{key}", inner)))
            else:
                self._reject(field, unknown_key(str(key), LIMIT_KEYS))
        if value.get("requests_per_unit") is None:  # a rule may omit it, with a warning that it denies everything
            self._reject(field, "'requests_per_unit' is missing; 0 would deny everything")
        return YamlMap(_LINE, column, tuple(pairs))

    def _scalar(self, field: str, value: object) -> YamlScalar:
        column = self._column(field)
        if isinstance(value, str):
            return YamlScalar(_LINE, column, value, ScalarKind.STRING, value)
        if value is None or isinstance(value, bool):
            text = "null" if value is None else str(value).lower()
        elif isinstance(value, int) and value.bit_length() <= _MAX_INTEGER_BITS:
            text = str(value)
        elif isinstance(value, int | float):
            # Any float for a large integer, which may have thousands of digits.
            text = repr(value) if isinstance(value, float) else "1e20"
        else:
            self._reject(field, "must be text, a number, true or false")
            text = "null"
        return YamlScalar(_LINE, column, text, *resolve(text))

    def _column(self, field: str) -> int:
        self._fields.append(field)
        return len(self._fields) - 1

    def _reject(self, field: str, message: str) -> None:
        self.problems.append(Problem(field, 0, 0, message))


def _text(text: str) -> YamlScalar:
    return YamlScalar(_LINE, 0, text, ScalarKind.STRING, text)


def _map(fields: Mapping[str, YamlNode]) -> YamlMap:
    return YamlMap(_LINE, 0, tuple((_text(key), value) for key, value in fields.items()))
