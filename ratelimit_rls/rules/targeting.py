"""Expansion of a stored rule's targeting to levels of descriptors around its document.

    targeting: {tiers: [free], methods: [POST], scope: user}         descriptors:
    document:                                                          - key: tier
      domain: edge                                             ─►        value: free
      rate_limit: {unit: minute, requests_per_unit: 5}                   descriptors:
                                                                           - key: method
                                                                             value: POST
                                                                             descriptors:
                                                                               - key: user
                                                                                 rate_limit: {unit: minute, …}

The levels are always in this order: tier, path, method, ip, then the key of the scope. They are created as YAML nodes
around those of the document, so that one compiler reads both, and every node of the document keeps its position.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ratelimit_rls.core.names import MAX_ID_LENGTH
from ratelimit_rls.core.pattern import WILDCARD, parse_network
from ratelimit_rls.errors import Problem
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.grammar import DESCRIPTOR_KEYS, FILE_KEYS
from ratelimit_rls.rules.responses import TOKEN_CHARACTERS
from ratelimit_rls.rules.stored_rule import CounterScope, Targeting
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.yaml.scalars import ScalarKind, resolve

MAX_ALTERNATIVES = 256
"""Combinations of one rule's tiers, endpoints, methods and networks. The document is compiled once for each."""

MAX_EXPANDED_NODES = 100_000
"""Nodes of one rule in all its combinations: about 9,000 limits, which compile in a second or two."""

MAX_ENDPOINT_LENGTH = 500

GLOBAL_ENTRY = ("scope", "global")
"""Entry of a rule with neither targeting nor a scope."""

_SCOPE_KEYS = {
    CounterScope.USER: "user",
    CounterScope.API_KEY: "api_key",
    CounterScope.TENANT: "org",
    CounterScope.IP: "ip",
    CounterScope.ENDPOINT: "path",
}
_BODY_KEYS = DESCRIPTOR_KEYS.keys() - FILE_KEYS.keys()
_FILE_ONLY_KEYS = FILE_KEYS.keys() - DESCRIPTOR_KEYS.keys()
_NAMES = ("key", "value", "match")
_METHOD = re.compile(TOKEN_CHARACTERS)


class _Alternative(NamedTuple):
    """One alternative of a level."""

    key: str
    value: str = ""
    cidr: str = ""
    is_shared: bool = False  # all matching requests share a counter; a wildcard or a network alone does not imply that


def has_body(root: YamlNode | None) -> bool:
    """Return whether a document is the body of one descriptor: beside `domain` it has keys that belong beside `key`."""
    return isinstance(root, YamlMap) and any(
        isinstance(key, YamlScalar) and key.text in _BODY_KEYS for key, _ in root.fields()
    )


def apply_targeting(root: YamlNode | None, targeting: Targeting, found: Findings) -> YamlNode | None:
    """Return the document with its targeting around it.

    The document is returned unchanged if there is no targeting, and after an error.
    """
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
            found.error(key, diagnostics.match_in_rule_body(key.text))
    if not is_body and "descriptors" not in map(_name, pairs):
        found.error(root, diagnostics.nothing_to_target())
    copies = math.prod(map(len, levels))
    if copies > 1 and copies * sum(_size(value) for _, value in inside) > MAX_EXPANDED_NODES:
        _reject(
            found,
            "targeting",
            f"{copies} combinations of this document are too large; use fewer combinations or a smaller document",
        )
    if len(found.errors) > before:
        return root
    if not levels:  # the scope is global
        if not is_body:
            return root
        levels = [[_Alternative(*GLOBAL_ENTRY)]]
    factory = _NodeFactory(root.line, root.column)
    return YamlMap(root.line, root.column, (*file, factory.pair("descriptors", factory.nest(levels, inside))))


def is_targeted(root: YamlNode | None, targeting: Targeting) -> bool:
    """Return whether the descriptors are generated, so that the ext_authz mapping must be generated, too."""
    return bool(targeting) or has_body(root)


class _Levels:
    """Converts a targeting to levels. Errors name the field."""

    def __init__(self, found: Findings) -> None:
        self._found = found

    def of(self, targeting: Targeting) -> list[list[_Alternative]]:
        scope = targeting.scope
        by_path, by_ip = scope is CounterScope.ENDPOINT, scope is CounterScope.IP
        tiers = [_Alternative("tier", tier) for tier in self._checked("tiers", targeting.tiers, _tier)]
        paths = [
            _Alternative("path", path, is_shared=WILDCARD in path and not by_path)
            for path in self._checked("endpoints", targeting.endpoints, _endpoint)
        ]
        methods = [_Alternative("method", method) for method in self._checked("methods", targeting.methods, _method)]
        networks = [
            _Alternative("ip", cidr=cidr, is_shared=not by_ip)
            for cidr in self._checked("cidrs", targeting.cidrs, _network)
        ]
        levels = [alternatives for alternatives in (tiers, paths, methods, networks) if alternatives]
        key = _SCOPE_KEYS.get(scope) if scope else None
        if key and not (by_path and paths) and not (by_ip and networks):
            levels.append([_Alternative(key)])
        copies = math.prod(map(len, levels))
        if copies > MAX_ALTERNATIVES:
            _reject(
                self._found,
                "targeting",
                f"its tiers, endpoints, methods and cidrs make {copies:,} combinations, at most {MAX_ALTERNATIVES} "
                "are allowed; use wildcards and wider networks, or several rules",
            )
            return []
        return levels

    def _checked(self, field: str, texts: Iterable[str], read: Callable[[str], str]) -> list[str]:
        """Return the values in canonical form, without duplicates.

        `read` returns the canonical form; the message of its ValueError completes a sentence that starts with the text.
        """
        known: dict[str, int] = {}
        for at, text in enumerate(texts):
            try:
                one = read(text)
            except ValueError as error:
                _reject(self._found, f"targeting.{field}[{at}]", f"'{text[:MAX_ENDPOINT_LENGTH]}' {error}")
                continue
            if one in known:
                _reject(self._found, f"targeting.{field}[{at}]", f"'{text}' is already targeting.{field}[{known[one]}]")
            known.setdefault(one, at)
        return list(known)


def _reject(found: Findings, field: str, message: str) -> None:
    found.errors.append(Problem(found.file, 0, 0, f"{field}: {message}"))


def _tier(text: str) -> str:
    if not 0 < len(text) <= MAX_ID_LENGTH or WILDCARD in text:
        raise ValueError(f"is not the name of a tier: 1 to {MAX_ID_LENGTH} characters, without '*'")
    return text


def _endpoint(text: str) -> str:
    if not text.startswith(("/", WILDCARD)) or len(text) > MAX_ENDPOINT_LENGTH:
        raise ValueError(f"is not a path: it starts with '/' or '*', and has at most {MAX_ENDPOINT_LENGTH} characters")
    if "?" in text or "#" in text:
        raise ValueError("has a query, which is not part of the path; drop it")
    return text


def _method(text: str) -> str:
    if not _METHOD.fullmatch(text) or WILDCARD in text or len(text) > MAX_ID_LENGTH:
        raise ValueError("is not the name of a method, such as GET")
    return text.upper()


def _network(text: str) -> str:
    try:
        return str(parse_network(text))
    except ValueError as error:
        raise ValueError(f"is not a network such as 192.0.2.0/24 or 2001:db8::/32: {error}") from error


class _NodeFactory:
    """Creates YAML nodes. All have the position of the document, since they have none of their own."""

    def __init__(self, line: int, column: int) -> None:
        self._line = line
        self._column = column

    def pair(self, key: str, value: YamlNode | str) -> tuple[YamlNode, YamlNode]:
        return self._text(key), self._text(value) if isinstance(value, str) else value

    def nest(self, levels: list[list[_Alternative]], inside: list[tuple[YamlNode, YamlNode]]) -> YamlList:
        """Return the descriptors of the first level, each with the remaining levels below it.

        The innermost ones contain `inside`.
        """
        alternatives, *below = levels
        pairs = [self.pair("descriptors", self.nest(below, inside))] if below else inside
        return YamlList(
            self._line, self._column, tuple(self._descriptor(alternative, pairs) for alternative in alternatives)
        )

    def _descriptor(self, alternative: _Alternative, pairs: list[tuple[YamlNode, YamlNode]]) -> YamlMap:
        own = [self.pair("key", alternative.key)]
        if alternative.value:
            own.append(self.pair("value", alternative.value))
        if alternative.cidr:
            own.append(self.pair("match", self._map(self.pair("cidr", alternative.cidr))))
        if alternative.is_shared and "share_threshold" not in map(_name, pairs):
            yes = YamlScalar(self._line, self._column, "true", *resolve("true"))
            own.append(self.pair("share_threshold", yes))
        return self._map(*own, *pairs)

    def _map(self, *pairs: tuple[YamlNode, YamlNode]) -> YamlMap:
        return YamlMap(self._line, self._column, pairs)

    def _text(self, text: str) -> YamlScalar:
        return YamlScalar(self._line, self._column, text, ScalarKind.STRING, text)


def _pairs(root: YamlMap) -> list[tuple[YamlNode, YamlNode]]:
    """Return the pairs as written; if there is a merge key, with the merge applied."""
    if not any(isinstance(key, YamlScalar) and key.is_merge_key for key, _ in root.pairs):
        return list(root.pairs)
    last = {key.text if isinstance(key, YamlScalar) else id(key): (key, value) for key, value in root.fields()}
    return list(last.values())


def _name(pair: tuple[YamlNode, YamlNode]) -> str:
    key, _ = pair
    return key.text if isinstance(key, YamlScalar) else ""


def _size(node: YamlNode) -> int:
    """Return the number of nodes with every alias expanded. The parser has bounded it."""
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
