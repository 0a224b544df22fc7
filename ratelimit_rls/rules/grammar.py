"""Grammar of rules files: which keys are allowed where.

envoyproxy/ratelimit has one flat set of keys and silently ignores a known key in a position where it has no meaning.
Here that is a warning, since it was probably written for a purpose.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratelimit_rls.rules import diagnostics
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.messages import unknown_key
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar, excerpt
from ratelimit_rls.yaml.scalars import MAX_INT64, ScalarKind

FREE = "anything"  # metadata: the content is not checked
STRICT = "strict"  # the content is read by a module of its own, more strictly
LEAF = "leaf"

FILE_KEYS: Mapping[str, str] = {
    "domain": LEAF,
    "descriptors": "descriptor",
    "charge": LEAF,
    "on_store_failure": LEAF,
    "shard_by": STRICT,
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
"""Keys of a rate_limit that envoyproxy/ratelimit does not have: they change the default charge to `admitted`."""

CONTEXTS: Mapping[str, Mapping[str, str]] = {
    "file": FILE_KEYS,
    "descriptor": DESCRIPTOR_KEYS,
    "rate_limit": RATE_LIMIT_KEYS,
    "replaces": REPLACES_KEYS,
    "match": MATCH_KEYS,
}
ALL_KEYS = frozenset(key for keys in CONTEXTS.values() for key in keys)
_UNCHECKED_KEYS = frozenset(key for keys in CONTEXTS.values() for key in keys if keys[key] in (FREE, STRICT))

_LIST_EXAMPLES = {"descriptors": "- key: user", "limits": "- unit: minute", "replaces": "- name: other"}
"""An example element of each list in the grammar."""

_CONTEXT_NAMES = {
    "file": "at the top of the file",
    "descriptor": "on a descriptor, beside 'key'",
    "rate_limit": "inside 'rate_limit'",
    "replaces": "inside 'replaces'",
    "match": "inside 'match'",
}


def check(node: YamlMap, place: str, found: Findings) -> None:
    """Report every key that is unknown, misplaced or written twice, and every value that no key accepts."""
    variant = node.variant
    if variant is None:
        _check_single(node, place, found)
    elif place not in variant.shared:
        problems_before = found.problem_count
        _check_single(node, place, found)
        if found.problem_count == problems_before:
            variant.shared[place] = None


def _check_single(node: YamlMap, place: str, found: Findings) -> None:
    keys = CONTEXTS.get(place, {})
    values = {key.text: value for key, value in node.fields() if isinstance(key, YamlScalar)}
    if node.may_merge or len(values) != len(node.pairs) or not values.keys() <= keys.keys():
        _check_written_twice(node, found)
        values = _known_values(node, place, keys, found)
    for name, value in values.items():
        if name in _UNCHECKED_KEYS:
            continue
        if isinstance(value, YamlScalar):
            if is_unusable(value):
                found.error(value, diagnostics.unusable_scalar(value.text))
        else:
            _check_collection(name, value, keys.get(name, LEAF), found)


def _known_values(node: YamlMap, place: str, keys: Mapping[str, str], found: Findings) -> dict[str, YamlNode]:
    values: dict[str, YamlNode] = {}
    for key, value in node.fields():
        if not isinstance(key, YamlScalar) or key.kind is not ScalarKind.STRING:
            found.error(key, diagnostics.key_not_text(excerpt(key)))
            continue
        if key.text not in ALL_KEYS:
            found.error(key, unknown_key(key.text, keys, ALL_KEYS))
            continue
        if place in CONTEXTS and key.text not in keys:
            found.warn(key, "misplaced", diagnostics.misplaced(key.text, _right_place(key.text)))
        values[key.text] = value
    return values


def _check_collection(name: str, value: YamlList | YamlMap, place: str, found: Findings) -> None:
    if isinstance(value, YamlMap):
        check(value, place, found)
    else:
        example = _LIST_EXAMPLES.get(name)
        was_reported = False
        for element in value.items:
            if isinstance(element, YamlMap):
                check(element, place, found)
            elif example or not was_reported:  # where no list is allowed, report it once
                found.error(element, diagnostics.list_of_other_than_maps(excerpt(element), example))
                was_reported = True


def is_reported(node: YamlNode) -> bool:
    """Return whether `check` has reported the value itself, so that its type need not be reported as well."""
    if isinstance(node, YamlList):
        return any(not isinstance(element, YamlMap) for element in node.items)
    return isinstance(node, YamlScalar) and is_unusable(node)


def is_unknown(key: YamlNode) -> bool:
    """Return whether `check` reports the key as an error, whatever its position."""
    return not isinstance(key, YamlScalar) or key.kind is not ScalarKind.STRING or key.text not in ALL_KEYS


def is_unusable(scalar: YamlScalar) -> bool:
    """Return whether envoyproxy/ratelimit accepts such a scalar only in metadata."""
    value = scalar.value
    return isinstance(value, float) or (isinstance(value, int) and value > MAX_INT64)


def _check_written_twice(node: YamlMap, found: Findings) -> None:
    """Report keys written twice in this mapping. Overriding keys merged by `<<` is the purpose of merging."""
    lines: dict[str, int] = {}
    for key, _ in node.pairs:
        if isinstance(key, YamlScalar) and not key.is_merge_key:
            if key.text in lines:
                found.warn(key, "duplicate-key", diagnostics.duplicate_key(key.text, lines[key.text]))
            lines.setdefault(key.text, key.line)


def _right_place(key: str) -> str:
    return " or ".join(_CONTEXT_NAMES[place] for place, keys in CONTEXTS.items() if key in keys)
