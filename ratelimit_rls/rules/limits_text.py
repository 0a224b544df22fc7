"""Limits that do not come from rules but mean the same: those of tiers, users and keys, as JSON has them.

They are read by the compiler of rules, so that nothing is a limit here that would not be one there, and what is wrong
is said in the same words. Only the place is another: the field, since nobody has seen a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratelimit_rls.core.model import Limit
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.document import exact, read_document
from ratelimit_rls.rules.grammar import NEW_LIMIT_KEYS, RATE_LIMIT_KEYS, Findings
from ratelimit_rls.rules.limit import compile_limits
from ratelimit_rls.rules.node import YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.rules.scalars import Kind, resolve

MOST_LIMITS = 16
"""That hold for one subject at once: each is a counter of its own for every call."""

LIMIT_KEYS = tuple(key for key in RATE_LIMIT_KEYS if key in NEW_LIMIT_KEYS or key in ("unit", "requests_per_unit"))
"""Of a rate_limit, those that say what is counted. The rest speaks of other rules, which these limits are not among."""

_LINE = 1  # of every node: what tells them apart is the column, which no message mentions
_LARGEST_BITS = 64


def read_limits(fields: object, where: str = "limits") -> tuple[Limit, ...]:
    """The limits of a list of mappings, as rules write `limits`; none for an empty list.

    Raises RulesError with every problem; `file` of each is the field, e.g. `limits[1].unit`, and its line is 0.
    """
    reader = _Reader(where)
    nodes = reader.limits(fields)
    limits: tuple[Limit, ...] = ()
    if nodes.items and not reader.problems:
        limits = reader.compiled(nodes)
    if reader.problems:
        raise RulesError(reader.problems)
    return limits


class _Reader:
    """Makes nodes of values, and keeps which field each of them is."""

    def __init__(self, where: str) -> None:
        self._fields = [where]  # by column
        self.problems: list[Problem] = []

    def limits(self, fields: object) -> YamlList:
        (where,) = self._fields
        if not isinstance(fields, Sequence) or isinstance(fields, str | bytes):
            self._refuse(where, 'it is a list of limits, e.g. [{"unit": "minute", "requests_per_unit": 100}]')
            return YamlList(_LINE, 0, ())
        if len(fields) > MOST_LIMITS:
            self._refuse(where, f"{len(fields):,} limits; at most {MOST_LIMITS} hold at once")
        items = [self._limit(f"{where}[{at}]", value) for at, value in enumerate(fields[:MOST_LIMITS])]
        return YamlList(_LINE, 0, tuple(items))

    def compiled(self, limits: YamlList) -> tuple[Limit, ...]:
        found = Findings("")
        descriptor = _map({"key": _text("subject"), "limits": limits})
        document = read_document(_map({"descriptors": YamlList(_LINE, 0, (descriptor,))}), found)
        compiled = compile_limits(exact(document.descriptors[0]), found)
        for problem in found.errors:
            message = problem.message.removeprefix(offences.not_yaml(f"unmarshal errors: line {_LINE}: "))
            self._refuse(self._fields[problem.column], message)
        return compiled

    def _limit(self, field: str, value: object) -> YamlNode:
        column = self._column(field)
        if not isinstance(value, Mapping):
            self._refuse(field, 'it is a limit, e.g. {"unit": "minute", "requests_per_unit": 100}')
            return YamlMap(_LINE, column, ())
        pairs: list[tuple[YamlNode, YamlNode]] = []
        for key, inner in value.items():
            if key in LIMIT_KEYS:
                pairs.append((_text(key), self._scalar(f"{field}.{key}", inner)))
            else:
                self._refuse(field, offences.unknown_key(str(key), LIMIT_KEYS, ()))
        if value.get("requests_per_unit") is None:  # a rule may leave it out, and is warned that it refuses everything
            self._refuse(field, "'requests_per_unit' is missing; 0 would refuse everything")
        return YamlMap(_LINE, column, tuple(pairs))

    def _scalar(self, field: str, value: object) -> YamlScalar:
        column = self._column(field)
        if isinstance(value, str):
            return YamlScalar(_LINE, column, value, Kind.STRING, value)
        if value is None or isinstance(value, bool):
            text = "null" if value is None else str(value).lower()
        elif isinstance(value, int) and value.bit_length() <= _LARGEST_BITS:
            text = str(value)
        elif isinstance(value, int | float):
            text = repr(value) if isinstance(value, float) else "1e20"  # no digits: there may be thousands of them
        else:
            self._refuse(field, "it is a text, a number, true or false")
            text = "null"
        return YamlScalar(_LINE, column, text, *resolve(text))

    def _column(self, field: str) -> int:
        self._fields.append(field)
        return len(self._fields) - 1

    def _refuse(self, field: str, message: str) -> None:
        self.problems.append(Problem(field, 0, 0, message))


def _text(text: str) -> YamlScalar:
    return YamlScalar(_LINE, 0, text, Kind.STRING, text)


def _map(fields: Mapping[str, YamlNode]) -> YamlMap:
    return YamlMap(_LINE, 0, tuple((_text(key), value) for key, value in fields.items()))
