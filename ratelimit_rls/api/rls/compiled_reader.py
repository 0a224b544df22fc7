"""Reader of RateLimitRequests along the rules: from the bytes of a message to its counters, without message objects.

    0A 04 edge │ 12 1D │ 0A 0C │ 0A 04 plan 12 │ 04 free │ 0A 0D │ 0A 04 user 12 │ 05 alice │ 12 …
    domain                       key             value           key             value
    path:   edge ──────────────────────────────► free ─────────────────────────► any value ● rule
    tag:    rl:{edge/plan=free/user=%b}                                          alice

Each descriptor is read along a path through the tree of rules. At each node, the bytes of a key select the children
that an entry with this key can match, usually a single one. Values that no rule names are collected on the way. At the
end of the path, the tag of the descriptor's counters is a constant text with these values in it (`TagFormat`).

The rules at the ends of the paths, with the hits, are the shape of a request. Requests of one shape differ in their
values only: they share the plan template and all that is derived from it. The meaning of a shape is learned from the
first request that has it, which the general reader (decode.py, core/match.py, core/plan.py) prepares. The general
reader also prepares requests that this reader does not cover, and it rejects invalid requests. So it alone defines what
a request means; tests compare both readers on random rules and bytes.

Not covered, and where this is found out:

    domains whose entries carry credentials      RlsCodec._make_reader leaves them out
    texts that are not ASCII                     CompiledReader.read, for the whole message
    texts, entries and descriptors over 127 bytes
                                                 CompiledReader.read: their lengths have bytes that are not ASCII
    more than 16 hits                            CompiledReader.read
    callers that are blocked                     CompiledReader.read, by their entitlement
    limits or hits of a single descriptor        _DomainPaths.read_descriptor: their fields are not entries
    values that are left out because empty       _DomainPaths.read_descriptor: the lengths of their entry do not fit
    keys that a wildcard matches                 _Path.step
    tags that must be shortened                  TagFormat.of, called by _Path.shape_part_and_tag
    tags with colons, if keys share a slot       TagEncoder.tag_format and TagFormat.of
    a rule with `limits_of` and an entry `tier`  _Path.__init__: it has no tag format
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import NamedTuple

from ratelimit_rls.core.entitlements import Entitlement, Entitlements
from ratelimit_rls.core.model import Entry, Subject, construct
from ratelimit_rls.core.plan import MAX_SHARED_HITS
from ratelimit_rls.core.storage_keys import ShardBy, TagEncoder, TagFormat, tag_encoder
from ratelimit_rls.core.subject_limits import TIER
from ratelimit_rls.core.tree import Node, find_child

MAX_PATHS = 4096
"""Maximum paths that a level keeps for its children; beyond that, it compiles all of them again."""

MAX_DESCRIPTORS = 8192
"""Maximum descriptors of one generation, shared by all domains. Two generations are kept: about 5 MiB with descriptors
as those of an edge, and at most 16 MiB."""

MIN_DESCRIPTORS = 256
"""A domain's part of `MAX_DESCRIPTORS`, even if there are many domains."""

MAX_LENGTH = 127
"""Maximum length of a text, an entry or a descriptor: longer lengths take more than one byte."""

# The tag of a field is its number times 8, plus 0 for a varint or 2 for length-delimited bytes.
_DOMAIN = 1 << 3 | 2
_DESCRIPTOR = 2 << 3 | 2
_HITS = 3 << 3
_ENTRY = 1 << 3 | 2
_KEY = 1 << 3 | 2
_VALUE = 2 << 3 | 2

_Entry = tuple[str, str | None]
"""Key and value; None if each value has a counter of its own."""


class _ReadDescriptor(NamedTuple):
    shape_part: Hashable
    tag: bytes
    recorded: tuple[Entry, ...]
    subject: tuple[Subject, str] | None  # the subject whose limits may replace those of the rule


Shape = tuple[object, ...]
"""Hits, then the identity of each descriptor's rule; with the descriptor's bytes, if its values are part of metrics."""


class ReadRequest(NamedTuple):
    """The result for one request: all that decides what is counted and recorded."""

    shape: Shape
    tags: list[bytes]  # for each descriptor, the tag of its counters; b"" if it has no rule
    recorded: list[Entry]  # the entries that are recorded
    entitlements: list[Entitlement]  # the entitlements that the shape depends on


class DomainRules(NamedTuple):
    """The rules of a domain, and the encoder of its tags."""

    root: Node
    tags: TagEncoder


class CompiledReader:
    """Reads the requests of some domains. A path is compiled when a request takes it for the first time."""

    def __init__(
        self,
        domains: Mapping[str, DomainRules],
        *,
        max_bytes: int,
        max_descriptors: int,
        recorded_keys: Collection[str] = (),
        entitlements: Entitlements | None = None,
    ) -> None:
        """Cover messages of at most `max_bytes` with at most `max_descriptors` descriptors.

        Without `entitlements`, subjects have no limits of their own.
        """
        part = max(MIN_DESCRIPTORS, MAX_DESCRIPTORS // max(1, len(domains)))
        recorded = {bytes((_KEY, len(key))) + key.encode() + bytes((_VALUE,)): key for key in recorded_keys}
        self._max_bytes = max_bytes
        self._max_descriptors = max_descriptors
        self._entitlements = entitlements
        self._domains: dict[bytes, _DomainPaths] = {}
        for name, rules in domains.items():
            if name.isascii() and 0 < len(name) <= MAX_LENGTH:
                start = bytes((_DOMAIN, len(name))) + name.encode()
                self._domains[start] = _DomainPaths(_Path(rules, rules.root, ()), recorded, part)

    def read(self, message: bytes) -> ReadRequest | None:
        """Read a request. Return None if it is not covered, or invalid."""
        size = len(message)
        if not 2 < size <= self._max_bytes or not message.isascii():
            return None
        # In a message of ASCII bytes every length is a single byte: longer ones begin with a byte above 127.
        at = 2 + message[1]
        domain = self._domains.get(message[:at])
        if domain is None:
            return None
        known = domain.descriptors.get
        shape: list[object] = [0]
        tags: list[bytes] = []
        recorded: list[Entry] = []
        entitlements: list[Entitlement] = []
        try:
            while at < size and message[at] == _DESCRIPTOR:
                begin = at + 2
                at = begin + message[at + 1]
                text = message[begin:at]
                shape_part, tag, entries, subject = known(text) or domain.read_descriptor(text)
                if subject is not None and self._entitlements is not None:
                    entitlement = self._entitlements.of(*subject, "")
                    if entitlement.block is not None:
                        return None
                    entitlements.append(entitlement)
                    if entitlement.limits is not None:
                        shape_part = shape_part, id(entitlement.limits)  # the shape keeps the entitlement
                shape.append(shape_part)
                tags.append(tag)
                if entries:
                    recorded += entries
            if at < size:
                shape[0] = hits = message[at + 1]
                if message[at] != _HITS or at + 2 != size or hits > MAX_SHARED_HITS:
                    return None
        except (IndexError, _NotCovered):
            return None
        if at > size or not 0 < len(tags) <= self._max_descriptors:
            return None
        return construct(ReadRequest, (tuple(shape), tags, recorded, entitlements))


class _DomainPaths:
    """The paths of a domain's rules, and the descriptors that were read recently."""

    __slots__ = ("_max_descriptors", "_older", "_recorded_keys", "_root", "descriptors")

    def __init__(self, root: _Path, recorded_keys: Mapping[bytes, str], max_descriptors: int) -> None:
        """Create the paths below `root`. `recorded_keys` maps the key fields of recorded entries to their keys."""
        self._max_descriptors = max_descriptors
        self._root = root
        self._recorded_keys = recorded_keys
        # Two generations: when `descriptors` is full, it becomes `_older`. A descriptor that is read again returns to
        # `descriptors`; the others are dropped with their generation.
        self.descriptors: dict[bytes, _ReadDescriptor] = {}
        self._older: dict[bytes, _ReadDescriptor] = {}

    def read_descriptor(self, text: bytes) -> _ReadDescriptor:
        """Read a descriptor that is not in `descriptors`, and add it. Raises IndexError if a length is wrong.

        `text` is a sequence of entries:

            0A  length  │ 0A  length  key  12 │ length  value
            at          │ the key field       │         value_at
        """
        read = self._older.get(text)
        if read is None:
            path, values, value = self._root, [], b""
            recorded_keys, recorded = self._recorded_keys, []
            at, size = 0, len(text)
            while at < size:
                value_at = at + 6 + text[at + 3]
                end = value_at + text[value_at - 1]
                if text[at] != _ENTRY or text[at + 1] != end - at - 2:
                    raise _NotCovered
                key_field = text[at + 2 : value_at - 1]
                step = path.steps.get(key_field) or path.step(key_field)
                value = text[value_at:end]
                path = step.select(value) if isinstance(step, _Level) else step
                if path.has_open_value:
                    values.append(value)
                if recorded_keys and key_field in recorded_keys:
                    recorded.append(Entry(recorded_keys[key_field], value.decode()))
                at = end
            if at != size:
                raise _NotCovered
            shape_part, tag = path.shape_part_and_tag(text, values)
            subject = (path.limits_of, value.decode()) if path.limits_of is not None else None
            read = construct(_ReadDescriptor, (shape_part, tag, tuple(recorded), subject))
        if len(self.descriptors) >= self._max_descriptors:
            self._older, self.descriptors = self.descriptors, {}
        self.descriptors[text] = read
        return read


class _NotCovered(Exception):
    """Only the general reader can read this request."""


class _Path:
    """A node of the rules, and the entries that lead to it."""

    __slots__ = (
        "_entries",
        "_exact_keys",
        "_metrics_have_values",
        "_node",
        "_rules",
        "_tag_format",
        "has_open_value",
        "limits_of",
        "rule_id",
        "shape_has_text",
        "steps",
    )

    def __init__(
        self, rules: DomainRules, node: Node, entries: tuple[_Entry, ...], *, metrics_have_values: bool = False
    ) -> None:
        self._rules = rules
        self._node = node
        self._entries = entries
        self._exact_keys: frozenset[str] | None = None  # keys of children with one value; None: not computed yet
        self._metrics_have_values = metrics_have_values or node.value_to_metric
        self._tag_format: TagFormat | None = None  # None: not covered
        rule = node.rule
        self.limits_of = None if rule is None else rule.limits_of
        if rule is not None and not (rule.limits_of is not None and TIER in dict(entries)):
            self._tag_format = rules.tags.tag_format(entries)
        # By key field: the path that all values share, or the level that selects a path by the value.
        self.steps: dict[bytes, _Path | _Level] = {}
        self.has_open_value = bool(entries) and entries[-1][1] is None  # True if the last value is part of the tag
        # Metrics have values of the descriptor, so its shape part includes its text.
        self.shape_has_text = self._metrics_have_values or (rule is not None and rule.detailed_metric)
        self.rule_id = 0 if rule is None else id(rule)  # unique, because `_node` keeps the rule

    def shape_part_and_tag(self, text: bytes, values: list[bytes]) -> tuple[object, bytes]:
        """Return the shape part and the tag of the descriptor of this text, whose path ends here.

        Raises _NotCovered.
        """
        rule_id = self.rule_id
        if not rule_id:
            return 0, b""
        tag_format = self._tag_format
        tag = tag_format.of(values) if tag_format is not None else None
        if tag is None:
            raise _NotCovered
        return (rule_id, text) if self.shape_has_text else rule_id, tag

    def step(self, key_field: bytes) -> _Path | _Level:
        """Compile the step of an entry with this key. Raises _NotCovered.

        Steps are kept only for keys that the rules have, because clients may send any number of other keys.
        """
        if len(key_field) < 3 or key_field[0] != _KEY or key_field[-1] != _VALUE:
            raise _NotCovered
        node, key = self._node, key_field[2:-1].decode()
        if self._exact_keys is None:
            self._exact_keys = frozenset([exact_key for exact_key, _ in node.exact])
        index = node.pattern_index
        if index is not None and any(glob.matches(key) for glob, _ in index.by_key_glob):
            raise _NotCovered
        step: _Path | _Level
        if key in self._exact_keys or (index is not None and key in index.by_key):
            step = _Level(self, node, key)
        elif key in node.by_key:
            step = self.child(node.by_key[key], key, False)
        else:
            return _NO_MATCH
        self.steps[key_field] = step
        return step

    def child(self, node: Node, key: str, is_pattern: bool) -> _Path:
        """Compile the path to a child. `is_pattern`: a wildcard or pattern selects it, so its values vary."""
        value = node.value or None
        if is_pattern:
            value = (node.shared_value or node.key) if node.share_threshold else None
        return _Path(self._rules, node, (*self._entries, (key, value)), metrics_have_values=self._metrics_have_values)


class _Level:
    """The children of a node that an entry with one key can select, by its value."""

    __slots__ = ("_exact", "_key", "_node", "_others", "_parent")

    def __init__(self, parent: _Path, node: Node, key: str) -> None:
        self._parent = parent
        self._node = node
        self._key = key
        self._exact: dict[bytes, _Path] = {}  # by their value
        self._others: dict[int, _Path] = {}  # of children that many values select, by the id() of their node

    def select(self, value: bytes) -> _Path:
        """Return the path of an entry with this value."""
        return self._exact.get(value) or self._find(value)

    def _find(self, value: bytes) -> _Path:
        child, is_pattern = find_child(self._node, Entry(self._key, value.decode()))
        if child is None:
            return _NO_MATCH
        if child.value and not is_pattern:
            if len(self._exact) == MAX_PATHS:
                self._exact.clear()
            path = self._exact[value] = self._parent.child(child, self._key, is_pattern)
            return path
        shared_path = self._others.get(id(child))
        if shared_path is None:
            shared_path = self._others[id(child)] = self._parent.child(child, self._key, is_pattern)
        return shared_path


_NO_RULES = DomainRules(Node(""), tag_encoder(b"", "", ShardBy.DESCRIPTOR))
_NO_MATCH = _Path(_NO_RULES, _NO_RULES.root, ())
"""The path of a descriptor that matches no rule, whatever its further entries are."""
