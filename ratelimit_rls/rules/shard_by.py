"""Compilation of `shard_by`: which counters of a domain share a cluster slot."""

from __future__ import annotations

from ratelimit_rls.core.pattern import Glob
from ratelimit_rls.core.storage_keys import ShardBy, ShardByKey, Sharding
from ratelimit_rls.core.tree import Node, Tree
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.positioned_fields import Positioned
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlMap, YamlNode, YamlScalar, excerpt
from ratelimit_rls.yaml.strict_mapping import StrictMapping

_EXAMPLE = "key: org"


def compile_shard_by(written: Positioned[YamlNode] | None, found: Findings) -> Positioned[Sharding] | None:
    """Read `descriptor`, `domain` or `{key: …}`. None if it is absent or invalid."""
    if written is None:
        return None
    node = written.value
    shard_by = _read_key(node, found) if isinstance(node, YamlMap) else _read_choice(node, found)
    return None if shard_by is None else Positioned(shard_by, *written[1:])


def has_key(root: Node, key: str) -> bool:
    """Return True if a rule of the domain can match a descriptor with this key."""
    levels = Tree(domains={root.key: root}).levels()
    return any(Glob.of(child.key).matches(key) for level in levels for child in level.children())


def _read_choice(node: YamlNode, found: Findings) -> ShardBy | None:
    choices = {choice.value: choice for choice in ShardBy}
    if not isinstance(node, YamlScalar) or node.text not in choices:
        found.error(node, diagnostics.unknown_shard_by(excerpt(node), choices))
        return None
    return choices[node.text]


def _read_key(node: YamlMap, found: Findings) -> ShardByKey | None:
    key = StrictMapping(node, ("key",), found).required("key", _EXAMPLE)
    if key is None:
        return None
    if not isinstance(key, YamlScalar) or not isinstance(key.value, str) or not key.text:
        found.error(key, diagnostics.bad_shard_by_key(excerpt(key), _EXAMPLE))
        return None
    return ShardByKey(key.text)
