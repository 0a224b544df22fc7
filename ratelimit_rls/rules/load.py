"""Bytes of a rules file to a YAML document with a place for every node.

Plain text is read by lines (plain.py), everything else from parser events: no tag is ever constructed, the first
document alone is read, and what a file may cost is bounded before and while it is read, since anyone who may edit rules
could otherwise stop the service with ten lines.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import yaml

from ratelimit_rls.core.accounts import Targeting
from ratelimit_rls.core.model import Position
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.node import MERGE_KEY, YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.rules.parts import second_line
from ratelimit_rls.rules.plain import read_plain
from ratelimit_rls.rules.scalars import Kind, Value, resolve

MOST_BYTES = 16 * 2**20
"""Of one file: sixty times the largest configuration seen in public, and what parses in seconds."""

MOST_NODES = 1_000_000
"""Of one file, counted with every alias replaced by what it stands for: about 90,000 rules."""

DEEPEST = 100
"""Levels of one file, aliases included: 48 levels of descriptors."""

_UNPRINTABLE = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PRINTABLE_ASCII = bytes((*b"\t\n\r", *range(0x20, 0x7F)))
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG_PREFIX = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(kind.value for kind in Kind)
_COLLECTION_TAGS = (None, "!", _TAG_PREFIX + "map", _TAG_PREFIX + "seq")

# libyaml where it was compiled in, PyYAML's own parser otherwise: the same events at the same places.
Parser = type[yaml.SafeLoader] | type[yaml.CSafeLoader]
FASTEST_PARSER: Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


LAST_RANK = 2**31
"""Of files, and of what comes over xDS: after every priority that a stored rule can have."""


@dataclass(frozen=True, slots=True)
class Source:
    """A rules file that was read, or as much of it as shows that it is too large; or a rule of the database."""

    name: str
    content: bytes
    rank: int = LAST_RANK  # the lower, the stronger: where two ranks speak of the same descriptor, the lower one counts
    targeting: Targeting | None = None  # of a rule of the database, be it empty
    lines_above: int = 0  # in the file that it is a part of: places are told as they are there

    @property
    def is_stored(self) -> bool:
        return self.targeting is not None


def load(source: Source, parser: Parser | None = None) -> YamlNode | None:
    """The first document, None where there is none; raises RulesError if it cannot be read.

    With a `parser`, that reads all of it; otherwise the fastest, and what is plain is not for a parser.
    """
    if len(source.content) > MOST_BYTES:
        raise _refusal(source, 1, 1, offences.too_large(MOST_BYTES))
    text = _decode(source)
    plain = None if parser else read_plain(text, source.lines_above, MOST_NODES)
    return _parse(source, text, parser or FASTEST_PARSER) if plain is None else plain


def _parse(source: Source, text: str, parser: Parser) -> YamlNode | None:
    try:
        return _Composer(source).compose(yaml.parse(text, Loader=parser))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise _refusal(source, line, column, offences.not_yaml(what)) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # e.g. an escape beyond Unicode, in either parser
        raise _refusal(source, 1, 1, offences.not_yaml(str(error))) from error


def second_document(source: Source) -> Position | None:
    """Where one begins that `load` does not read; None: there is none, or nothing is in it."""
    line = second_line(_decode(source))
    return None if line is None else Position(source.name, source.lines_above + line, 1)


def _decode(source: Source) -> str:
    content = source.content
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8", "replace")
        raise _refusal(source, *_place(before), offences.not_utf8(content[error.start])) from error
    if not content.translate(None, _PRINTABLE_ASCII):  # nothing else, which is a tenth of the work to know
        return text
    unprintable = _UNPRINTABLE.search(text)
    if unprintable:
        before = text[: unprintable.start()]
        raise _refusal(source, *_place(before), offences.control_character(ord(unprintable[0])))
    return text


def _place(before: str) -> tuple[int, int]:
    """Line and column of what follows `before`."""
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def _refusal(source: Source, line: int, column: int, message: str) -> RulesError:
    """`line` is that of the source's own text."""
    return RulesError([Problem(source.name, source.lines_above + line, column, message)])


@dataclass(slots=True)
class _Open:
    """A collection whose end has not come yet."""

    event: yaml.CollectionStartEvent
    children: list[YamlNode] = field(default_factory=list)
    size: int = 1
    depth: int = 1


@dataclass(frozen=True, slots=True)
class _Anchored:
    node: YamlNode
    size: int  # nodes, aliases expanded
    depth: int


class _Composer:
    """Builds the document from events, on a stack of its own: nesting never becomes recursion."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: list[_Open] = []
        self._anchors: dict[str, _Anchored | None] = {}  # None: its end has not come yet
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
            raise self._refuse(event, offences.foreign_tag(_short(str(event.tag))))
        if event.anchor:
            self._anchors[event.anchor] = None
        self._open.append(_Open(event))
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
            raise self._refuse(event, offences.unknown_anchor(anchor))
        found = self._anchors[anchor]
        if found is None:
            raise self._refuse(event, offences.endless_anchor(anchor))
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
        if self._nodes > MOST_NODES:
            raise self._refuse(event, offences.too_many_nodes(MOST_NODES))
        if len(self._open) + depth > DEEPEST:
            raise self._refuse(event, offences.too_deep(DEEPEST))

    def _scalar(self, event: yaml.ScalarEvent) -> YamlScalar:
        line, column = self._mark(event)
        text: str = event.value
        if _SURROGATE.search(text):  # only PyYAML's own parser lets such an escape through
            raise self._refuse(event, offences.not_yaml("found invalid Unicode character escape code"))
        is_plain = event.implicit[0]
        if event.tag is None or event.tag == "!":
            kind, value = resolve(text) if is_plain and event.tag is None else (Kind.STRING, text)
            return YamlScalar(line, column, text, kind, value, is_plain and text == MERGE_KEY)
        return self._tagged(event, _short(event.tag))

    def _tagged(self, event: yaml.ScalarEvent, tag: str) -> YamlScalar:
        line, column = self._mark(event)
        text: str = event.value
        kind: Kind = Kind.STRING
        value: Value = text
        if tag == "!!merge" and text == MERGE_KEY:
            return YamlScalar(line, column, text, kind, text, is_merge_key=True)
        if tag == "!!binary":
            text = self._binary(event)
            return YamlScalar(line, column, text, kind, text)
        if tag not in ("!!str", "!!timestamp"):
            if tag not in _SCALAR_TAGS:
                raise self._refuse(event, offences.foreign_tag(tag))
            kind, value = resolve(text)
            if isinstance(value, int) and kind is Kind.INT and tag == "!!float":
                kind, value = Kind.FLOAT, float(value)
            if kind.value != tag:
                raise self._refuse(event, offences.mistagged(kind.value, text, tag))
        return YamlScalar(line, column, text, kind, value)

    def _binary(self, event: yaml.ScalarEvent) -> str:
        try:
            return base64.b64decode("".join(event.value.split()), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise self._refuse(event, offences.bad_base64()) from error

    def _has_merge(self, pairs: Iterable[tuple[YamlNode, YamlNode]]) -> bool:
        """Each of which merges what can be merged."""
        has_merge = False
        for key, value in pairs:
            if isinstance(key, YamlScalar) and key.is_merge_key:
                has_merge = True
                merged = value.items if isinstance(value, YamlList) else (value,)
                if not all(isinstance(item, YamlMap) for item in merged):
                    raise RulesError([Problem(self._source.name, value.line, value.column, offences.bad_merge())])
        return has_merge

    def _refuse(self, event: yaml.Event, message: str) -> RulesError:
        return RulesError([Problem(self._source.name, *self._mark(event), message)])

    def _mark(self, event: yaml.Event) -> tuple[int, int]:
        mark = event.start_mark
        assert mark is not None  # every event of a parser has one
        return self._source.lines_above + mark.line + 1, mark.column + 1


def _short(tag: str) -> str:
    return "!!" + tag.removeprefix(_TAG_PREFIX) if tag.startswith(_TAG_PREFIX) else tag
