"""Parser of YAML files: bytes to a document with positions.

fast_reader.py reads the common YAML subset; the rest is composed from parser events. Tags never construct objects, only
the first document is read, and the cost of a file is bounded before and while it is read: otherwise anyone who may edit
rules could stop the service with ten lines.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import yaml

from ratelimit_rls.yaml.fast_reader import read_fast
from ratelimit_rls.yaml.messages import cut
from ratelimit_rls.yaml.nodes import MERGE_KEY, YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.yaml.scalars import ScalarKind, ScalarValue, resolve

MAX_NODES = 1_000_000
"""Nodes of one file with every alias expanded: about 90,000 rules."""

MAX_DEPTH = 100
"""Levels of nesting of one file, aliases included: 48 levels of descriptors."""

_UNPRINTABLE = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PRINTABLE_ASCII = bytes((*b"\t\n\r", *range(0x20, 0x7F)))
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG_PREFIX = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(kind.value for kind in ScalarKind)
_COLLECTION_TAGS = (None, "!", _TAG_PREFIX + "map", _TAG_PREFIX + "seq")

# libyaml if it is compiled in, otherwise PyYAML's own parser: both give the same events at the same positions.
Parser = type[yaml.SafeLoader] | type[yaml.CSafeLoader]
FASTEST_PARSER: Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class NotYaml(Exception):
    """The text cannot be parsed. Line and column are those in the file; `reason` completes "this is not YAML: …"."""

    def __init__(self, line: int, column: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.column = column
        self.reason = reason


class TooDeep(NotYaml):
    """The text is nested more than MAX_DEPTH levels deep."""


def parse(content: bytes, lines_above: int = 0, parser: Parser | None = None) -> YamlNode | None:
    """Return the first document; None if there is none. Raise NotYaml if it cannot be parsed.

    The caller limits the size. `lines_above` is the number of lines before the content in its file. `parser` forces
    that parser; by default the fast reader is tried before the fastest parser.
    """
    text = decode(content, lines_above)
    plain = None if parser else read_fast(text, lines_above, MAX_NODES)
    return _parse(text, lines_above, parser or FASTEST_PARSER) if plain is None else plain


def _parse(text: str, lines_above: int, parser: Parser) -> YamlNode | None:
    try:
        return _Composer(lines_above).compose(yaml.parse(text, Loader=parser))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise NotYaml(lines_above + line, column, what) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # e.g. an escape beyond Unicode, in either parser
        raise NotYaml(lines_above + 1, 1, str(error)) from error


def decode(content: bytes, lines_above: int = 0) -> str:
    """Return the text, which is UTF-8, or UTF-16 with a byte order mark. Raise NotYaml if it is neither."""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _place(content[: error.start].decode("utf-8", "replace"))
        reason = f"invalid UTF-8: byte 0x{content[error.start]:02x}; save the file as UTF-8"
        raise NotYaml(lines_above + line, column, reason) from error
    if not content.translate(None, _PRINTABLE_ASCII):  # only printable ASCII; ten times faster than the search
        return text
    unprintable = _UNPRINTABLE.search(text)
    if unprintable:
        line, column = _place(text[: unprintable.start()])
        reason = f"control characters are not allowed: U+{ord(unprintable[0]):04X}; is this a text file?"
        raise NotYaml(lines_above + line, column, reason)
    return text


def _place(before: str) -> tuple[int, int]:
    """Return line and column of the text that follows `before`."""
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def too_many_nodes(most: int) -> str:
    return (
        f"document contains excessive aliasing or is too large: more than {most:,} nodes with every alias expanded; "
        "write less, or split it into several files"
    )


@dataclass(slots=True)
class _OpenCollection:
    """A collection that is not complete yet."""

    event: yaml.CollectionStartEvent
    children: list[YamlNode] = field(default_factory=list)
    size: int = 1
    depth: int = 1


@dataclass(frozen=True, slots=True)
class _Anchored:
    node: YamlNode
    size: int  # nodes with aliases expanded
    depth: int


class _Composer:
    """Composes the document from parser events, on an explicit stack: nesting never becomes recursion."""

    def __init__(self, lines_above: int) -> None:
        self._lines_above = lines_above
        self._open: list[_OpenCollection] = []
        self._anchors: dict[str, _Anchored | None] = {}  # None: not complete yet
        self._nodes = 0
        self._root: YamlNode | None = None

    def compose(self, events: Iterable[yaml.Event]) -> YamlNode | None:
        for event in events:
            if isinstance(event, yaml.ScalarEvent):
                self._add(event, self._scalar(event))
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event)
            elif isinstance(event, yaml.CollectionStartEvent):
                self._start(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._end()
            elif isinstance(event, yaml.DocumentEndEvent):
                break
        return self._root

    def _start(self, event: yaml.CollectionStartEvent) -> None:
        if event.tag not in _COLLECTION_TAGS:
            raise self._error(event, _unsupported_tag(_short(str(event.tag))))
        if event.anchor:
            self._anchors[event.anchor] = None
        self._open.append(_OpenCollection(event))
        self._bound(event, 0)

    def _end(self) -> None:
        done = self._open.pop()
        line, column = self._mark(done.event)
        node: YamlNode
        if isinstance(done.event, yaml.SequenceStartEvent):
            node = YamlList(line, column, tuple(done.children))
        else:
            pairs = tuple(zip(done.children[::2], done.children[1::2], strict=True))
            node = YamlMap(line, column, pairs, may_merge=self._has_merge(pairs))
        self._add(done.event, node, done.size, done.depth)

    def _alias(self, event: yaml.AliasEvent) -> None:
        anchor = str(event.anchor)
        if anchor not in self._anchors:
            name = cut(anchor)
            raise self._error(
                event, f"unknown anchor '{name}' referenced; an anchor (&{name}) must come before its aliases"
            )
        found = self._anchors[anchor]
        if found is None:
            raise self._error(event, f"anchor '{cut(anchor)}' value contains itself")
        self._nodes += found.size - 1
        self._put(event, found.node, found.size, found.depth)

    def _add(self, event: yaml.NodeEvent, node: YamlNode, size: int = 1, depth: int = 1) -> None:
        if event.anchor:
            self._anchors[event.anchor] = _Anchored(node, size, depth)
        self._put(event, node, size, depth)

    def _put(self, event: yaml.NodeEvent, node: YamlNode, size: int, depth: int) -> None:
        self._nodes += 1
        self._bound(event, depth)
        if not self._open:
            self._root = node
            return
        parent = self._open[-1]
        parent.children.append(node)
        parent.size += size
        parent.depth = max(parent.depth, depth + 1)

    def _bound(self, event: yaml.NodeEvent, depth: int) -> None:
        if self._nodes > MAX_NODES:
            raise self._error(event, too_many_nodes(MAX_NODES))
        if len(self._open) + depth > MAX_DEPTH:
            raise TooDeep(*self._mark(event), f"nested more than {MAX_DEPTH} levels deep")

    def _scalar(self, event: yaml.ScalarEvent) -> YamlScalar:
        line, column = self._mark(event)
        text: str = event.value
        if _SURROGATE.search(text):  # only PyYAML's own parser accepts such an escape
            raise self._error(event, "found invalid Unicode character escape code")
        is_plain = event.implicit[0]
        if event.tag is None or event.tag == "!":
            kind, value = resolve(text) if is_plain and event.tag is None else (ScalarKind.STRING, text)
            return YamlScalar(line, column, text, kind, value, is_plain and text == MERGE_KEY)
        return self._tagged(event, _short(event.tag))

    def _tagged(self, event: yaml.ScalarEvent, tag: str) -> YamlScalar:
        line, column = self._mark(event)
        text: str = event.value
        kind: ScalarKind = ScalarKind.STRING
        value: ScalarValue = text
        if tag == "!!merge" and text == MERGE_KEY:
            return YamlScalar(line, column, text, kind, text, is_merge_key=True)
        if tag == "!!binary":
            text = self._binary(event)
            return YamlScalar(line, column, text, kind, text)
        if tag not in ("!!str", "!!timestamp"):
            if tag not in _SCALAR_TAGS:
                raise self._error(event, _unsupported_tag(tag))
            kind, value = resolve(text)
            if isinstance(value, int) and kind is ScalarKind.INT and tag == "!!float":
                kind, value = ScalarKind.FLOAT, float(value)
            if kind.value != tag:
                raise self._error(
                    event, f"cannot decode {kind.value} `{cut(text)}` as a {tag}; drop the tag or correct the value"
                )
        return YamlScalar(line, column, text, kind, value)

    def _binary(self, event: yaml.ScalarEvent) -> str:
        try:
            return base64.b64decode("".join(event.value.split()), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            reason = "!!binary value contains invalid base64 data, or is not text; write the text itself"
            raise self._error(event, reason) from error

    def _has_merge(self, pairs: Iterable[tuple[YamlNode, YamlNode]]) -> bool:
        """Return whether there is a merge key. Raise NotYaml if a merged value is not a map."""
        has_merge = False
        for key, value in pairs:
            if isinstance(key, YamlScalar) and key.is_merge_key:
                has_merge = True
                merged = value.items if isinstance(value, YamlList) else (value,)
                if not all(isinstance(item, YamlMap) for item in merged):
                    reason = "map merge requires map or sequence of maps as the value"
                    raise NotYaml(value.line, value.column, reason)
        return has_merge

    def _error(self, event: yaml.Event, reason: str) -> NotYaml:
        return NotYaml(*self._mark(event), reason)

    def _mark(self, event: yaml.Event) -> tuple[int, int]:
        mark = event.start_mark
        assert mark is not None  # every parser event has one
        return self._lines_above + mark.line + 1, mark.column + 1


def _short(tag: str) -> str:
    return "!!" + tag.removeprefix(_TAG_PREFIX) if tag.startswith(_TAG_PREFIX) else tag


def _unsupported_tag(tag: str) -> str:
    return f"tag '{tag}' has no meaning here; write the plain value"
