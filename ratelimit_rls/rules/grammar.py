"""Which key may stand where, and the check that every key of a file is one of them.

The reference knows one flat set of keys: a known key in a place where it means nothing is ignored there without a
word. Here it is a warning, since somebody meant something by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ratelimit_rls.core.model import Position
from ratelimit_rls.errors import Problem
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.alike import Alike
from ratelimit_rls.rules.node import YamlList, YamlMap, YamlNode, YamlScalar, excerpt
from ratelimit_rls.rules.scalars import MAX_INT64, Kind


@dataclass(slots=True)
class Findings:
    """What is wrong and what is odd in one file."""

    file: str
    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    first_line: int = 1  # of what is looked at

    def error(self, at: YamlNode | Position, message: str) -> None:
        self.errors.append(Problem(self.file, at.line, at.column, message))

    def warn(self, at: YamlNode | Position, code: str, message: str) -> None:
        self.warnings.append(Problem(self.file, at.line, at.column, message, "warning", code))

    @property
    def told(self) -> int:
        """How much, so far: whoever has been looking since knows whether there was anything to tell."""
        return len(self.errors) + len(self.warnings)

    def position(self, node: YamlNode) -> Position:
        return Position(self.file, node.line, node.column)


FREE = "anything"  # metadata: what is inside is nobody's business
STRICT = "strict"  # what is inside is read by a module of its own, which forgives less
LEAF = "leaf"

FILE_KEYS: Mapping[str, str] = {
    "domain": LEAF,
    "descriptors": "descriptor",
    "charge": LEAF,
    "on_store_failure": LEAF,
    "shard_by": LEAF,
    "answer": STRICT,
    "deny": STRICT,
    "ext_authz": STRICT,
    "identity": STRICT,
}
DESCRIPTOR_KEYS: Mapping[str, str] = {
    "key": LEAF,
    "value": LEAF,
    "match": "match",
    "rate_limit": "rate_limit",
    "limits": "rate_limit",
    "limits_of": LEAF,
    "descriptors": "descriptor",
    "charge": LEAF,
    "action": LEAF,
    "max_delay": LEAF,
    "warn_at": STRICT,
    "penalty": STRICT,
    "hot": STRICT,
    "on_store_failure": LEAF,
    "answer": STRICT,
    "deny": STRICT,
    "enabled": LEAF,
    "shadow_mode": LEAF,
    "quota_mode": LEAF,
    "detailed_metric": LEAF,
    "value_to_metric": LEAF,
    "share_threshold": LEAF,
    "metadata": FREE,
}
RATE_LIMIT_KEYS: Mapping[str, str] = {
    "unit": LEAF,
    "requests_per_unit": LEAF,
    "unlimited": LEAF,
    "name": LEAF,
    "replaces": "replaces",
    "algorithm": LEAF,
    "burst": LEAF,
    "unit_multiplier": LEAF,
    "calendar": LEAF,
    "timezone": LEAF,
}
REPLACES_KEYS: Mapping[str, str] = {"name": LEAF}
MATCH_KEYS: Mapping[str, str] = {"cidr": LEAF, "prefix": LEAF, "regex": LEAF}

NEW_LIMIT_KEYS = frozenset({"algorithm", "burst", "unit_multiplier", "calendar", "timezone"})
"""Of a rate_limit, those that the reference does not know: a rule that uses one is charged by our default."""

PLACES: Mapping[str, Mapping[str, str]] = {
    "file": FILE_KEYS,
    "descriptor": DESCRIPTOR_KEYS,
    "rate_limit": RATE_LIMIT_KEYS,
    "replaces": REPLACES_KEYS,
    "match": MATCH_KEYS,
}
KNOWN = frozenset(key for keys in PLACES.values() for key in keys)
_NOT_LOOKED_INTO = frozenset(key for keys in PLACES.values() for key in keys if keys[key] in (FREE, STRICT))

_LIST_EXAMPLES = {"descriptors": "- key: user", "limits": "- unit: minute", "replaces": "- name: other"}
"""An element of each list there is."""

_PLACE_WORDS = {
    "file": "at the top of the file",
    "descriptor": "on a descriptor, beside 'key'",
    "rate_limit": "inside 'rate_limit'",
    "replaces": "inside 'replaces'",
    "match": "inside 'match'",
}


def check(node: YamlMap, place: str, found: Findings) -> None:
    """Report every key that is unknown, misplaced or written twice, and every value that no place takes."""
    alike = node.pairs
    if not isinstance(alike, Alike):
        _check_alone(node, place, found)
    elif place not in alike.shape.made_of_it:
        told = found.told
        _check_alone(node, place, found)
        if found.told == told:
            alike.shape.made_of_it[place] = None


def _check_alone(node: YamlMap, place: str, found: Findings) -> None:
    keys = PLACES.get(place, {})
    values = {key.text: value for key, value in node.fields() if isinstance(key, YamlScalar)}
    if node.may_merge or len(values) != len(node.pairs) or not values.keys() <= keys.keys():
        _check_written_twice(node, found)
        values = _known_values(node, place, keys, found)
    for name, value in values.items():
        if name in _NOT_LOOKED_INTO:
            continue
        if isinstance(value, YamlScalar):
            if is_unusable(value):
                found.error(value, offences.unusable_scalar(value.text))
        else:
            _check_collection(name, value, keys.get(name, LEAF), found)


def _known_values(node: YamlMap, place: str, keys: Mapping[str, str], found: Findings) -> dict[str, YamlNode]:
    values: dict[str, YamlNode] = {}
    for key, value in node.fields():
        if not isinstance(key, YamlScalar) or key.kind is not Kind.STRING:
            found.error(key, offences.key_not_text(excerpt(key)))
            continue
        if key.text not in KNOWN:
            found.error(key, offences.unknown_key(key.text, keys, KNOWN))
            continue
        if place in PLACES and key.text not in keys:
            found.warn(key, "misplaced", offences.misplaced(key.text, _right_place(key.text)))
        values[key.text] = value
    return values


def _check_collection(name: str, value: YamlList | YamlMap, place: str, found: Findings) -> None:
    if isinstance(value, YamlMap):
        check(value, place, found)
    else:
        example = _LIST_EXAMPLES.get(name)
        is_told = False
        for element in value.items:
            if isinstance(element, YamlMap):
                check(element, place, found)
            elif example or not is_told:  # where no list belongs, it is told once
                found.error(element, offences.list_of_other_than_maps(excerpt(element), example))
                is_told = True


def is_refused(node: YamlNode) -> bool:
    """Whether `check` has reported the value itself, so that it need not be told that it is of the wrong type."""
    if isinstance(node, YamlList):
        return any(not isinstance(element, YamlMap) for element in node.items)
    return isinstance(node, YamlScalar) and is_unusable(node)


def is_unknown(key: YamlNode) -> bool:
    """Whether `check` reports it as an error, wherever it stands."""
    return not isinstance(key, YamlScalar) or key.kind is not Kind.STRING or key.text not in KNOWN


def is_unusable(scalar: YamlScalar) -> bool:
    """Whether the reference has no place for such a scalar outside metadata."""
    value = scalar.value
    return isinstance(value, float) or (isinstance(value, int) and value > MAX_INT64)


def _check_written_twice(node: YamlMap, found: Findings) -> None:
    """Only keys of this very mapping: overriding what `<<` merged is what merging is for."""
    lines: dict[str, int] = {}
    for key, _ in node.pairs:
        if isinstance(key, YamlScalar) and not key.is_merge_key:
            if key.text in lines:
                found.warn(key, "duplicate-key", offences.written_twice(key.text, lines[key.text]))
            lines.setdefault(key.text, key.line)


def _right_place(key: str) -> str:
    return " or ".join(_PLACE_WORDS[place] for place, keys in PLACES.items() if key in keys)
