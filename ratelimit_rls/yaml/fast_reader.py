"""Fast line-based reader for the YAML subset that nearly all rules use.

    domain: edge                                        # comments
    descriptors:                                        a list indented like its key, or deeper
      - key: plan                                       words, numbers, paths …
        value: "free"                                   … and quotes without escapes
        rate_limit: {unit: day, requests_per_unit: 5}   brackets that close on their line

Of repeated items, one is read; the others are read when they are accessed (repeated_items.py).

The result equals the parser's, including all positions; otherwise there is none, and the parser reads the text. That
applies to everything outside the subset (anchors, tags, escapes, empty values, values that continue on the next line)
and to every error. So this module reports no errors and guesses nothing. It exists for large rules: a parser creates
several objects per node.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial

from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.yaml.repeated_items import ITEM, ItemShape
from ratelimit_rls.yaml.scalars import ScalarKind, ScalarValue, resolve

MAX_FAST_DEPTH = 30
"""Levels of nesting. Deeper text is left to the parser, which also decides whether it is too deep."""

_UNSUPPORTED_CHARACTERS = "\t\r\x85\u2028\u2029\ufeff"
"""White space and line breaks other than space and line feed."""

_KEY = r"[A-Za-z_][\w.-]{0,99}+"
_QUOTED = r"\"[^\"\\]*+\"|'[^']*+'"
_FIRST = r"[A-Za-z0-9_/.^$(+=~]"
_INSIDE = r"[!\"$-9;-~]"  # no blank, colon or number sign
_IN_FLOW = r"[!\"$-+\--9;->@-Z\\^-z|~]"  # additionally no comma, bracket or question mark

_LINE = re.compile(
    rf"(\ *+)(-\ ++)?(?:({_KEY}):(?:\ ++|\Z))?"
    rf"(?:({_FIRST}{_INSIDE}*+(?:(?::|\ ++){_INSIDE}++)*+)|({_QUOTED})|([{{\[].*+))?"
    r"(?:\ *\Z|(?:\A|\ +|(?<=\ ))\#.*+)",
    re.ASCII,
)
_ELEMENT = re.compile(
    rf"\ *+(?:({_KEY}):\ ++)?"
    rf"(?:(?:({_FIRST}{_IN_FLOW}*+(?:\ ++{_IN_FLOW}++)*+)|({_QUOTED}))\ *+([,}}\]])|[{{\[])",
    re.ASCII,
)
_END_OF_ELEMENT = re.compile(r"\ *+([,}\]])")
_REST = re.compile(r"\ *+(?:(?<=\ )\#.*+)?")

MAX_CACHED_SCALARS = 1000
"""Scalars whose resolved value is cached. In large rules everything but names and values is repeated, from the start.
"""

MAX_SHAPES = 1000
"""Shapes per text. With more of them, few items share one."""

_new_scalar = partial(tuple.__new__, YamlScalar)  # half the time of calling the class, for the most frequent object


class _Unsupported(Exception):
    """The text is outside the supported subset, or invalid."""


class _OpenBlock:
    """A collection that is not complete yet. The children of a map are keys and values alternately."""

    __slots__ = ("children", "column", "is_list", "line")

    def __init__(self, line: int, column: int, *, is_list: bool) -> None:
        self.line = line
        self.column = column
        self.is_list = is_list
        self.children: list[YamlNode] = []


def read_fast(text: str, lines_above: int, max_nodes: int) -> YamlNode | None:
    """Read the document `text`. Return None if it is outside the subset or has more than `max_nodes` nodes or lines."""
    if any(one in text for one in _UNSUPPORTED_CHARACTERS) or text.count("\n") > max_nodes:
        return None
    try:
        lines = _LineReader(max_nodes, find_repeats=True)
        return lines.read(text.removeprefix("---") if text.startswith("---\n") else text, lines_above + 1)
    except _Unsupported:
        return None


class _LineReader:
    def __init__(self, max_nodes: int, *, find_repeats: bool) -> None:
        self._max_nodes = max_nodes
        self._find_repeats = find_repeats
        self._shapes: dict[tuple[str, str], ItemShape | None] = {}  # by the text around the value; None: not repeatable
        self.nodes = 0
        self._blocks: list[_OpenBlock] = []
        self._needs_value = False  # the last line ended with a key
        self._resolved: dict[str, tuple[ScalarKind, ScalarValue]] = {}

    def read(self, text: str, number: int) -> YamlNode:
        """Read the text; `number` is that of its first line. Raise _Unsupported."""
        at = 0
        while at <= len(text):
            item = ITEM.match(text, at) if self._find_repeats else None
            if item is not None and self._item(number, item):
                end = item.end()
            else:
                end = text.find("\n", at)
                end = len(text) if end < 0 else end
                self._line(number, text[at:end])
            self._check_size()
            number += text.count("\n", at, end) + 1
            at = end + 1
        if self._needs_value or not self._blocks:
            raise _Unsupported
        while len(self._blocks) > 1:
            self._close_block()
        return _close(self._blocks[0])

    def _item(self, number: int, item: re.Match[str]) -> bool:
        """Try to read a list item by its shape. Return False if it has to be read line by line."""
        before, indent, _, value, after = item.groups()
        shape = self._shapes.get((before, after))
        node: YamlNode
        if shape is not None and shape.accepts(value):
            node, nodes = shape.to_map(number, value), shape.nodes
        elif (before, after) in self._shapes or len(self._shapes) >= MAX_SHAPES:
            return False
        else:
            node, nodes = _read_item(item[0], number, self._max_nodes - self.nodes)
            self._shapes[before, after] = ItemShape.of(item, number, node, nodes, _read_repeated)
        self._continue(number, len(indent) + 1, is_list=True)
        self._blocks[-1].children.append(node)
        self._needs_value = False
        self.nodes += nodes
        return True

    def _line(self, number: int, line: str) -> None:
        found = _LINE.fullmatch(line)
        if found is None:
            raise _Unsupported
        indent, dash, key, plain, quoted, flow = found.groups()
        value = plain or quoted or flow
        if value is None and key is None:
            if dash:
                raise _Unsupported
            return  # a comment or an empty line
        column = len(indent) + 1
        self._continue(number, column, is_list=dash is not None)
        blocks = self._blocks
        if dash is not None:
            column += len(dash)
            if key is not None:
                self._open(number, column, is_list=False)
        elif key is None:
            raise _Unsupported
        children = blocks[-1].children
        if key is not None:
            children.append(self._plain_scalar(number, column, key))
        if plain is not None:
            children.append(self._plain_scalar(number, found.start(4) + 1, plain))
        elif quoted is not None:
            children.append(self._quoted_scalar(number, found.start(5) + 1, quoted))
        elif flow is not None:
            node, end = self._flow(number, line, found.start(6), len(blocks))
            if not _REST.fullmatch(line, end):
                raise _Unsupported
            children.append(node)
        self._needs_value = value is None

    def _continue(self, line: int, column: int, *, is_list: bool) -> None:
        """Open or close blocks until the last one is the block that a line at `column` belongs to."""
        if self._needs_value or not self._blocks:
            self._open_value(line, column, is_list=is_list)
        else:
            self._close_deeper(column, is_list=is_list)

    def _open_value(self, line: int, column: int, *, is_list: bool) -> None:
        """Open the collection that is the value of the last key, or the document."""
        if self._blocks:
            above = self._blocks[-1].column
            is_deeper = column > above or (is_list and column == above)
            if not is_deeper or len(self._blocks) > MAX_FAST_DEPTH:
                raise _Unsupported
        self._open(line, column, is_list=is_list)

    def _open(self, line: int, column: int, *, is_list: bool) -> None:
        self.nodes += 1
        self._blocks.append(_OpenBlock(line, column, is_list=is_list))

    def _close_deeper(self, column: int, *, is_list: bool) -> None:
        """Close deeper blocks until the last one is the block that a line at `column` continues."""
        blocks = self._blocks
        last = blocks[-1]
        while len(blocks) > 1 and (last.column > column or (last.column == column and last.is_list and not is_list)):
            self._close_block()
            last = blocks[-1]
        if last.column != column or last.is_list is not is_list:
            raise _Unsupported

    def _close_block(self) -> None:
        done = _close(self._blocks.pop())
        self._blocks[-1].children.append(done)

    def _plain_scalar(self, line: int, column: int, text: str) -> YamlScalar:
        meaning = self._resolved.get(text)
        if meaning is None:
            meaning = resolve(text)
            if len(self._resolved) < MAX_CACHED_SCALARS:
                self._resolved[text] = meaning
        self.nodes += 1
        return _new_scalar((line, column, text, *meaning, False))

    def _quoted_scalar(self, line: int, column: int, quoted: str) -> YamlScalar:
        self.nodes += 1
        return YamlScalar(line, column, quoted[1:-1], ScalarKind.STRING, quoted[1:-1])

    def _check_size(self) -> None:
        if self.nodes > self._max_nodes:
            raise _Unsupported

    def _flow(self, line: int, text: str, start: int, depth: int) -> tuple[YamlNode, int]:
        """Read the collection that the bracket at `start` opens. Return it and the position after it."""
        is_list = text[start] == "["
        closing = "]" if is_list else "}"
        if depth > MAX_FAST_DEPTH:
            raise _Unsupported
        self.nodes += 1
        is_empty = text.startswith(closing, start + 1)
        at = start + 2 if is_empty else start + 1
        is_open = not is_empty
        children: list[YamlNode] = []
        while is_open:
            found = _ELEMENT.match(text, at)
            if found is None:
                raise _Unsupported
            key, plain, quoted, end = found.groups()
            at = found.end()
            if (key is None) is not is_list:
                raise _Unsupported
            if key is not None:
                children.append(self._plain_scalar(line, found.start(1) + 1, key))
            if plain is not None:
                children.append(self._plain_scalar(line, found.start(2) + 1, plain))
            elif quoted is not None:
                children.append(self._quoted_scalar(line, found.start(3) + 1, quoted))
            else:
                inner, at = self._flow(line, text, at - 1, depth + 1)
                children.append(inner)
                found = _END_OF_ELEMENT.match(text, at)
                if found is None:
                    raise _Unsupported
                end, at = found[1], found.end()
            if end != "," and end != closing:
                raise _Unsupported
            is_open = end == ","
            self._check_size()
        return _collection(line, start + 1, children, is_list=is_list), at


def _read_item(text: str, number: int, max_nodes: int) -> tuple[YamlNode, int]:
    """Read `text`, a list of one item. Return the item and its number of nodes. Raise _Unsupported.

    The item may be as deep as a document, wherever it is nested: twice the depth is still less than the parser allows.
    """
    lines = _LineReader(max_nodes, find_repeats=False)
    document = lines.read(text, number)
    assert isinstance(document, YamlList)  # it starts with a dash
    (node,) = document.items
    return node, lines.nodes - 1


def _read_repeated(text: str, number: int) -> YamlMap:
    """Read a repeated item, whose shape was read before."""
    node, _ = _read_item(text, number, sys.maxsize)
    assert isinstance(node, YamlMap)
    return node


def _close(done: _OpenBlock) -> YamlNode:
    return _collection(done.line, done.column, done.children, is_list=done.is_list)


def _collection(line: int, column: int, children: Sequence[YamlNode], *, is_list: bool) -> YamlNode:
    if is_list:
        return YamlList(line, column, tuple(children))
    return YamlMap(line, column, tuple(zip(children[::2], children[1::2], strict=True)), may_merge=False)
