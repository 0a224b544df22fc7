"""The part of YAML that nearly all rules are written in, read line by line and without a parser.

    domain: edge                                        # comments
    descriptors:                                        a list as deep as its key, or deeper
      - key: plan                                       words, numbers, paths …
        value: "free"                                   … and quotes without escapes
        rate_limit: {unit: day, requests_per_unit: 5}   brackets that close on their line

Of items that are written alike, one is read, and the others when they are looked into (alike.py).

Either the result is the parser's to the last place, or there is none, and the parser reads the text: all that is beyond
(anchors, tags, escapes, nothing for a value, what goes on in the next line), and whatever is wrong. So nothing here
knows what an error is, and nothing is guessed. It is for large rules: a parser makes several objects of every node.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial

from ratelimit_rls.rules.alike import ITEM, Shape
from ratelimit_rls.rules.node import YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.rules.scalars import Kind, Value, resolve

DEEPEST_PLAIN = 30
"""Levels. What is deeper is for the parser, and whether it is too deep."""

_FOREIGN = "\t\r\x85\u2028\u2029\ufeff"
"""Blanks and breaks other than a space and a line feed."""

_KEY = r"[A-Za-z_][\w.-]{0,99}+"
_QUOTED = r"\"[^\"\\]*+\"|'[^']*+'"
_FIRST = r"[A-Za-z0-9_/.^$(+=~]"
_INSIDE = r"[!\"$-9;-~]"  # neither blank nor colon nor number sign
_IN_FLOW = r"[!\"$-+\--9;->@-Z\\^-z|~]"  # nor a comma, a bracket or a question mark

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

MOST_REMEMBERED = 1000
"""Words whose meaning is kept: of large rules, all but names and values is said again and again, and from the start."""

MOST_SHAPES = 1000
"""Of one text; where there are more, there are few of each."""

_new_scalar = partial(tuple.__new__, YamlScalar)  # without a step in between: half the time of what is made most often


class _Beyond(Exception):
    """The text is more than plain, or wrong."""


class _Open:
    """A collection whose end has not come yet; a map's children are its keys and values in turns."""

    __slots__ = ("children", "column", "is_list", "line")

    def __init__(self, line: int, column: int, *, is_list: bool) -> None:
        self.line = line
        self.column = column
        self.is_list = is_list
        self.children: list[YamlNode] = []


def read_plain(text: str, lines_above: int, most_nodes: int) -> YamlNode | None:
    """The document that `text` is; None: it is beyond what is read here, or has more nodes, or lines, than that."""
    if any(one in text for one in _FOREIGN) or text.count("\n") > most_nodes:
        return None
    try:
        lines = _Lines(most_nodes, knows_shapes=True)
        return lines.read(text.removeprefix("---") if text.startswith("---\n") else text, lines_above + 1)
    except _Beyond:
        return None


class _Lines:
    def __init__(self, most_nodes: int, *, knows_shapes: bool) -> None:
        self._most_nodes = most_nodes
        self._knows_shapes = knows_shapes
        self._shapes: dict[tuple[str, str], Shape | None] = {}  # by what is around the value; None: there is none
        self.nodes = 0
        self._blocks: list[_Open] = []
        self._needs_value = False  # the last line ends with a key
        self._meanings: dict[str, tuple[Kind, Value]] = {}

    def read(self, text: str, number: int) -> YamlNode:
        """Raises _Beyond. `number` is that of the first line."""
        at = 0
        while at <= len(text):
            item = ITEM.match(text, at) if self._knows_shapes else None
            if item is not None and self._item(number, item):
                end = item.end()
            else:
                end = text.find("\n", at)
                end = len(text) if end < 0 else end
                self._line(number, text[at:end])
            self._bound()
            number += text.count("\n", at, end) + 1
            at = end + 1
        if self._needs_value or not self._blocks:
            raise _Beyond
        while len(self._blocks) > 1:
            self._end()
        return _closed(self._blocks[0])

    def _item(self, number: int, item: re.Match[str]) -> bool:
        """Whether it is read by now: if not, it is nothing but its lines."""
        before, indent, _, value, after = item.groups()
        shape = self._shapes.get((before, after))
        node: YamlNode
        if shape is not None and shape.takes(value):
            node, nodes = shape.map(number, value), shape.nodes
        elif (before, after) in self._shapes or len(self._shapes) >= MOST_SHAPES:
            return False
        else:
            node, nodes = _read_item(item[0], number, self._most_nodes - self.nodes)
            self._shapes[before, after] = Shape.of(item, number, node, nodes, _read_alike)
        self._continue(number, len(indent) + 1, is_list=True)
        self._blocks[-1].children.append(node)
        self._needs_value = False
        self.nodes += nodes
        return True

    def _line(self, number: int, line: str) -> None:
        found = _LINE.fullmatch(line)
        if found is None:
            raise _Beyond
        indent, dash, key, plain, quoted, flow = found.groups()
        value = plain or quoted or flow
        if value is None and key is None:
            if dash:
                raise _Beyond
            return  # a comment, or nothing
        column = len(indent) + 1
        self._continue(number, column, is_list=dash is not None)
        blocks = self._blocks
        if dash is not None:
            column += len(dash)
            if key is not None:
                self._open(number, column, is_list=False)
        elif key is None:
            raise _Beyond
        children = blocks[-1].children
        if key is not None:
            children.append(self._word(number, column, key))
        if plain is not None:
            children.append(self._word(number, found.start(4) + 1, plain))
        elif quoted is not None:
            children.append(self._quoted(number, found.start(5) + 1, quoted))
        elif flow is not None:
            node, end = self._flow(number, line, found.start(6), len(blocks))
            if not _REST.fullmatch(line, end):
                raise _Beyond
            children.append(node)
        self._needs_value = value is None

    def _continue(self, line: int, column: int, *, is_list: bool) -> None:
        """Then the last block is the one that a line at `column` belongs to."""
        if self._needs_value or not self._blocks:
            self._begin(line, column, is_list=is_list)
        else:
            self._end_deeper(column, is_list=is_list)

    def _begin(self, line: int, column: int, *, is_list: bool) -> None:
        """A collection is what the last key stands for, or the document."""
        if self._blocks:
            above = self._blocks[-1].column
            is_deeper = column > above or (is_list and column == above)
            if not is_deeper or len(self._blocks) > DEEPEST_PLAIN:
                raise _Beyond
        self._open(line, column, is_list=is_list)

    def _open(self, line: int, column: int, *, is_list: bool) -> None:
        self.nodes += 1
        self._blocks.append(_Open(line, column, is_list=is_list))

    def _end_deeper(self, column: int, *, is_list: bool) -> None:
        """Then the last is the one that a line at `column` goes on with."""
        blocks = self._blocks
        last = blocks[-1]
        while len(blocks) > 1 and (last.column > column or (last.column == column and last.is_list and not is_list)):
            self._end()
            last = blocks[-1]
        if last.column != column or last.is_list is not is_list:
            raise _Beyond

    def _end(self) -> None:
        done = _closed(self._blocks.pop())
        self._blocks[-1].children.append(done)

    def _word(self, line: int, column: int, text: str) -> YamlScalar:
        meaning = self._meanings.get(text)
        if meaning is None:
            meaning = resolve(text)
            if len(self._meanings) < MOST_REMEMBERED:
                self._meanings[text] = meaning
        self.nodes += 1
        return _new_scalar((line, column, text, *meaning, False))

    def _quoted(self, line: int, column: int, quoted: str) -> YamlScalar:
        self.nodes += 1
        return YamlScalar(line, column, quoted[1:-1], Kind.STRING, quoted[1:-1])

    def _bound(self) -> None:
        if self.nodes > self._most_nodes:
            raise _Beyond

    def _flow(self, line: int, text: str, start: int, depth: int) -> tuple[YamlNode, int]:
        """What the bracket at `start` opens, and where it has ended."""
        is_list = text[start] == "["
        closing = "]" if is_list else "}"
        if depth > DEEPEST_PLAIN:
            raise _Beyond
        self.nodes += 1
        is_empty = text.startswith(closing, start + 1)
        at = start + 2 if is_empty else start + 1
        is_open = not is_empty
        children: list[YamlNode] = []
        while is_open:
            found = _ELEMENT.match(text, at)
            if found is None:
                raise _Beyond
            key, plain, quoted, end = found.groups()
            at = found.end()
            if (key is None) is not is_list:
                raise _Beyond
            if key is not None:
                children.append(self._word(line, found.start(1) + 1, key))
            if plain is not None:
                children.append(self._word(line, found.start(2) + 1, plain))
            elif quoted is not None:
                children.append(self._quoted(line, found.start(3) + 1, quoted))
            else:
                inner, at = self._flow(line, text, at - 1, depth + 1)
                children.append(inner)
                found = _END_OF_ELEMENT.match(text, at)
                if found is None:
                    raise _Beyond
                end, at = found[1], found.end()
            if end != "," and end != closing:
                raise _Beyond
            is_open = end == ","
            self._bound()
        return _collection(line, start + 1, children, is_list=is_list), at


def _read_item(text: str, number: int, most_nodes: int) -> tuple[YamlNode, int]:
    """The one item of the list that `text` is, and how many nodes it has. Raises _Beyond.

    It may be as deep as a document, wherever it hangs: twice that is still less than the parser takes.
    """
    lines = _Lines(most_nodes, knows_shapes=False)
    document = lines.read(text, number)
    assert isinstance(document, YamlList)  # it begins with a dash
    (node,) = document.items
    return node, lines.nodes - 1


def _read_alike(text: str, number: int) -> YamlMap:
    """An item that is like one that was read."""
    node, _ = _read_item(text, number, sys.maxsize)
    assert isinstance(node, YamlMap)
    return node


def _closed(done: _Open) -> YamlNode:
    return _collection(done.line, done.column, done.children, is_list=done.is_list)


def _collection(line: int, column: int, children: Sequence[YamlNode], *, is_list: bool) -> YamlNode:
    if is_list:
        return YamlList(line, column, tuple(children))
    return YamlMap(line, column, tuple(zip(children[::2], children[1::2], strict=True)), may_merge=False)
