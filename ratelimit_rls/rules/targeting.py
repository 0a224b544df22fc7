"""The targeting of a stored rule, written out: the levels of descriptors that lead to what its document says.

    targeting: {tiers: [free], methods: [POST], scope: user}         descriptors:
    document:                                                          - key: tier
      domain: edge                                             ─►        value: free
      rate_limit: {unit: minute, requests_per_unit: 5}                   descriptors:
                                                                           - key: method
                                                                             value: POST
                                                                             descriptors:
                                                                               - key: user
                                                                                 rate_limit: {unit: minute, …}

The levels are always in this order: tier, path, method, ip, then what the scope counts by. They are made as nodes
around those of the document, so that one compiler reads both, and every node of the document keeps its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ratelimit_rls.core.accounts import LONGEST_ID, Scope, Targeting
from ratelimit_rls.core.pattern import parse_network
from ratelimit_rls.core.tree import WILDCARD
from ratelimit_rls.errors import Problem
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.grammar import DESCRIPTOR_KEYS, FILE_KEYS, Findings
from ratelimit_rls.rules.headers import TOKEN_CHARACTERS
from ratelimit_rls.rules.node import YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.rules.scalars import Kind, resolve

MOST_ALTERNATIVES = 256
"""Combinations of one rule's tiers, endpoints, methods and networks: for each, its document is compiled once."""

MOST_WRITTEN = 100_000
"""Nodes of one rule, all its combinations together: about 9,000 limits, which compile in a second or two."""

LONGEST_ENDPOINT = 500

EVERYBODY = ("scope", "global")
"""The entry of a rule that says neither whom it is for nor by what it counts."""

_SCOPE_KEYS = {
    Scope.USER: "user",
    Scope.API_KEY: "api_key",
    Scope.TENANT: "org",
    Scope.IP: "ip",
    Scope.ENDPOINT: "path",
}
_BODY_KEYS = DESCRIPTOR_KEYS.keys() - FILE_KEYS.keys()
_FILE_ONLY_KEYS = FILE_KEYS.keys() - DESCRIPTOR_KEYS.keys()
_NAMES = ("key", "value", "match")
_METHOD = re.compile(TOKEN_CHARACTERS)


class _Way(NamedTuple):
    """One alternative of a level."""

    key: str
    value: str = ""
    cidr: str = ""
    is_shared: bool = False  # all that meet it share a counter, which a wildcard or a network alone does not make them


def has_body(root: YamlNode | None) -> bool:
    """Whether a document is the body of one descriptor: it says beside `domain` what belongs beside `key`."""
    return isinstance(root, YamlMap) and any(
        isinstance(key, YamlScalar) and key.text in _BODY_KEYS for key, _ in root.fields()
    )


def targeted(root: YamlNode | None, targeting: Targeting, found: Findings) -> YamlNode | None:
    """The document with its targeting around it; as it is, where there is nothing to do or it cannot be done."""
    is_body = has_body(root)
    if not isinstance(root, YamlMap) or not (targeting or is_body):
        return root
    before = len(found.errors)
    levels = _Levels(found).of(targeting)
    pairs = _pairs(root)
    outside = _FILE_ONLY_KEYS if is_body else FILE_KEYS.keys() - {"descriptors"}
    file = [pair for pair in pairs if _name(pair) in outside]
    inside = [pair for pair in pairs if _name(pair) not in outside]
    for key, _ in inside:
        if isinstance(key, YamlScalar) and key.text in _NAMES:
            found.error(key, offences.named_body(key.text))
    if not is_body and "descriptors" not in map(_name, pairs):
        found.error(root, offences.nothing_to_target())
    copies = math.prod(map(len, levels))
    if copies > 1 and copies * sum(_size(value) for _, value in inside) > MOST_WRITTEN:
        _refuse(found, "targeting", f"{copies} combinations of such a document are too large; target less, or say less")
    if len(found.errors) > before:
        return root
    if not levels:  # the scope is global
        if not is_body:
            return root
        levels = [[_Way(*EVERYBODY)]]
    made = _Made(root.line, root.column)
    return YamlMap(root.line, root.column, (*file, made.pair("descriptors", made.wrapped(levels, inside))))


def is_targeted(root: YamlNode | None, targeting: Targeting) -> bool:
    """Whether the descriptors are made here, so that nobody else can know what a request must be asked for."""
    return bool(targeting) or has_body(root)


class _Levels:
    """Reads a targeting; each field's mistakes are told under its name."""

    def __init__(self, found: Findings) -> None:
        self._found = found

    def of(self, targeting: Targeting) -> list[list[_Way]]:
        scope = targeting.scope
        by_path, by_ip = scope is Scope.ENDPOINT, scope is Scope.IP
        tiers = [_Way("tier", tier) for tier in self._checked("tiers", targeting.tiers, _tier)]
        paths = [
            _Way("path", path, is_shared=WILDCARD in path and not by_path)
            for path in self._checked("endpoints", targeting.endpoints, _endpoint)
        ]
        methods = [_Way("method", method) for method in self._checked("methods", targeting.methods, _method)]
        networks = [
            _Way("ip", cidr=cidr, is_shared=not by_ip) for cidr in self._checked("cidrs", targeting.cidrs, _network)
        ]
        levels = [ways for ways in (tiers, paths, methods, networks) if ways]
        key = _SCOPE_KEYS.get(scope) if scope else None
        if key and not (by_path and paths) and not (by_ip and networks):
            levels.append([_Way(key)])
        copies = math.prod(map(len, levels))
        if copies > MOST_ALTERNATIVES:
            _refuse(
                self._found,
                "targeting",
                f"its tiers, endpoints, methods and cidrs make {copies:,} combinations, at most {MOST_ALTERNATIVES} "
                "are allowed; use wildcards and wider networks, or several rules",
            )
            return []
        return levels

    def _checked(self, field: str, texts: Iterable[str], read: Callable[[str], str]) -> list[str]:
        """`read` gives the one way to write it; its ValueError is the end of a sentence that starts with the text."""
        known: dict[str, int] = {}
        for at, text in enumerate(texts):
            try:
                one = read(text)
            except ValueError as fault:
                _refuse(self._found, f"targeting.{field}[{at}]", f"'{text[:LONGEST_ENDPOINT]}' {fault}")
                continue
            if one in known:
                _refuse(self._found, f"targeting.{field}[{at}]", f"'{text}' is already targeting.{field}[{known[one]}]")
            known.setdefault(one, at)
        return list(known)


def _refuse(found: Findings, field: str, message: str) -> None:
    found.errors.append(Problem(found.file, 0, 0, f"{field}: {message}"))


def _tier(text: str) -> str:
    if not 0 < len(text) <= LONGEST_ID or WILDCARD in text:
        raise ValueError(f"is not the name of a tier: 1 to {LONGEST_ID} characters, without '*'")
    return text


def _endpoint(text: str) -> str:
    if not text.startswith(("/", WILDCARD)) or len(text) > LONGEST_ENDPOINT:
        raise ValueError(f"is not a path: it starts with '/' or '*', and has at most {LONGEST_ENDPOINT} characters")
    if "?" in text or "#" in text:
        raise ValueError("has a query, which is no part of a path; write what stands before it")
    return text


def _method(text: str) -> str:
    if not _METHOD.fullmatch(text) or WILDCARD in text or len(text) > LONGEST_ID:
        raise ValueError("is not the name of a method, such as GET")
    return text.upper()


def _network(text: str) -> str:
    try:
        return str(parse_network(text))
    except ValueError as fault:
        raise ValueError(f"is not a network such as 192.0.2.0/24 or 2001:db8::/32: {fault}") from fault


class _Made:
    """Makes nodes. All have the place of the document, since they have none of their own."""

    def __init__(self, line: int, column: int) -> None:
        self._line = line
        self._column = column

    def pair(self, key: str, value: YamlNode | str) -> tuple[YamlNode, YamlNode]:
        return self._text(key), self._text(value) if isinstance(value, str) else value

    def wrapped(self, levels: list[list[_Way]], inside: list[tuple[YamlNode, YamlNode]]) -> YamlList:
        """Every way of the first level, each with all that is below it; `inside` is what the last ones say."""
        ways, *below = levels
        pairs = [self.pair("descriptors", self.wrapped(below, inside))] if below else inside
        return YamlList(self._line, self._column, tuple(self._descriptor(way, pairs) for way in ways))

    def _descriptor(self, way: _Way, pairs: list[tuple[YamlNode, YamlNode]]) -> YamlMap:
        own = [self.pair("key", way.key)]
        if way.value:
            own.append(self.pair("value", way.value))
        if way.cidr:
            own.append(self.pair("match", self._map(self.pair("cidr", way.cidr))))
        if way.is_shared and "share_threshold" not in map(_name, pairs):
            yes = YamlScalar(self._line, self._column, "true", *resolve("true"))
            own.append(self.pair("share_threshold", yes))
        return self._map(*own, *pairs)

    def _map(self, *pairs: tuple[YamlNode, YamlNode]) -> YamlMap:
        return YamlMap(self._line, self._column, pairs)

    def _text(self, text: str) -> YamlScalar:
        return YamlScalar(self._line, self._column, text, Kind.STRING, text)


def _pairs(root: YamlMap) -> list[tuple[YamlNode, YamlNode]]:
    """As written; with a merge among them, as they come out of it."""
    if not any(isinstance(key, YamlScalar) and key.is_merge_key for key, _ in root.pairs):
        return list(root.pairs)
    last = {key.text if isinstance(key, YamlScalar) else id(key): (key, value) for key, value in root.fields()}
    return list(last.values())


def _name(pair: tuple[YamlNode, YamlNode]) -> str:
    key, _ = pair
    return key.text if isinstance(key, YamlScalar) else ""


def _size(node: YamlNode) -> int:
    """Nodes, with every alias replaced by what it stands for: bounded where the text was read."""
    return sum(1 for _ in _nodes(node))


def _nodes(node: YamlNode) -> Iterator[YamlNode]:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, YamlList):
            waiting.extend(one.items)
        elif isinstance(one, YamlMap):
            waiting.extend(part for pair in one.pairs for part in pair)
