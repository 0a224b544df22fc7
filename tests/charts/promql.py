"""A partial PromQL parser: extracts the selected series and labels of an expression, and the functions around them.

It supports the syntax of the dashboards and alerts here and raises on anything else, so that nothing is ignored. It
does not validate PromQL; Prometheus does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<range>\[[^\]]*\])
    | (?P<number>\d+(?:\.\d+)?)
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/<>=(){},])
    )""",
    re.VERBOSE,
)
_GROUPING = {"by", "on"}
_BETWEEN = {"and", "or", "unless"}
AGGREGATIONS = {"sum", "min", "max", "count", "topk"}


class Unread(Exception):
    """The expression uses unsupported syntax."""


class Matcher(NamedTuple):
    label: str
    sign: str
    value: str

    @property
    def values(self) -> list[str]:
        """Return the literal values of a matcher; none for variables or match-all."""
        return [one for one in self.value.split("|") if one and not re.search(r"[$.*+(\[]", one)]


@dataclass(frozen=True, slots=True)
class Selector:
    """A series selector of an expression."""

    name: str
    matchers: tuple[Matcher, ...]
    over: str  # range such as `[5m]`, or empty
    calls: tuple[str, ...]  # enclosing functions and aggregations, outermost first
    grouped: tuple[frozenset[str], ...]  # labels of enclosing `by`, outermost first
    matched_on: frozenset[str]  # labels of `on` anywhere

    @property
    def innermost(self) -> str:
        return self.calls[-1] if self.calls else ""

    @property
    def aggregated(self) -> bool:
        return bool(AGGREGATIONS & {*self.calls} - {"topk"})


class _Reader:
    def __init__(self, expression: str) -> None:
        self._tokens = list(_tokens(expression))
        self._at = 0
        self._on: set[str] = set()
        self._found: list[Selector] = []

    def read(self) -> list[Selector]:
        self._expression((), ())
        if self._next():
            raise Unread(f"{self._next()} was not expected")
        on = frozenset(self._on)
        return [Selector(one.name, one.matchers, one.over, one.calls, one.grouped, on) for one in self._found]

    def _expression(self, calls: tuple[str, ...], grouped: tuple[frozenset[str], ...]) -> None:
        """Parse an expression up to its closing bracket or comma."""
        while (token := self._next()) not in ("", ")", ","):
            self._at += 1
            if token == "(":
                self._expression(calls, grouped)
                self._take(")")
            elif not re.match(r"[a-zA-Z_:]", token) or token in _BETWEEN:
                continue  # a number, a string or an operator
            elif token in _GROUPING:
                self._on |= self._labels()
            elif self._next() == "(" or token in AGGREGATIONS:
                self._call(token, calls, grouped)
            else:
                self._selector(token, calls, grouped)

    def _call(self, name: str, calls: tuple[str, ...], grouped: tuple[frozenset[str], ...]) -> None:
        labels: frozenset[str] = frozenset()
        if self._next() == "by":
            self._at += 1
            labels = frozenset(self._labels())
        if name in AGGREGATIONS - {"topk"}:
            grouped = (*grouped, labels)
        self._take("(")
        while self._next() != ")":
            self._expression((*calls, name), grouped)
            if self._next() == ",":
                self._at += 1
        self._take(")")
        if self._next() == "by":
            raise Unread("`by` comes before what it groups, here")

    def _selector(self, name: str, calls: tuple[str, ...], grouped: tuple[frozenset[str], ...]) -> None:
        matchers = []
        if self._next() == "{":
            self._at += 1
            while self._next() != "}":
                label, sign, value = self._tokens[self._at : self._at + 3]
                matchers.append(Matcher(label, sign, value.strip('"')))
                self._at += 3
                if self._next() == ",":
                    self._at += 1
            self._take("}")
        over = ""
        if self._next().startswith("["):
            over = self._next()
            self._at += 1
        self._found.append(Selector(name, tuple(matchers), over, calls, grouped, frozenset()))

    def _labels(self) -> set[str]:
        self._take("(")
        start = self._at
        while self._next() != ")":
            self._at += 1
        labels = {token for token in self._tokens[start : self._at] if token != ","}
        self._take(")")
        return labels

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, token: str) -> None:
        if self._next() != token:
            raise Unread(f"{token} was expected, and there is {self._next() or 'nothing'}")
        self._at += 1


def _tokens(expression: str) -> Iterator[str]:
    at, end = 0, len(expression.rstrip())
    while at < end:
        found = _TOKEN.match(expression, at)
        if found is None:
            raise Unread(f"{expression[at:]!r} in {expression}")
        yield found[0].strip()
        at = found.end()


def selectors(expression: str) -> list[Selector]:
    """Return all selectors in order. Raises Unread."""
    try:
        return _Reader(expression).read()
    except (Unread, ValueError) as error:
        raise Unread(f"{error}: {expression}") from error
