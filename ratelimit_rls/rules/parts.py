"""A text as YAML documents, one after the other: where each begins, and whether there is anything in it.

By its lines alone, which is exact: `---` and `...` at the start of a line end a document wherever they stand, and a
text within a document (`body: |`) has them further to the right. So what is parted need not be right otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

BREAKS = "\n\r\x85\u2028\u2029"
"""Each ends a line to a parser of YAML."""

_MARK = re.compile(rf"(?:\A|(?<=[{BREAKS}]))(---|\.\.\.)(?=[ \t{BREAKS}]|\Z)")
_CONTENT = re.compile(rf"(?:\A|[{BREAKS}])(?:[ \t]*[^ \t#%{BREAKS}]|[ \t]+%)")
_LINE_END = re.compile(rf"\r\n|[{BREAKS}]")


class Part(NamedTuple):
    """From a mark, or from the beginning, to the next mark."""

    start: int  # in the text
    end: int
    line: int  # the number of its first one
    mark: str  # "---" or "..."; "": it is the first
    has_content: bool  # anything but comments, directives and empty lines


def parts(text: str) -> Iterator[Part]:
    """All of the text, be it that there are no marks in it."""
    starts = [(0, ""), *((found.start(), found[1]) for found in _MARK.finditer(text))]
    line = 1
    for number, (start, mark) in enumerate(starts):
        end = starts[number + 1][0] if number + 1 < len(starts) else len(text)
        part = text[start:end]
        yield Part(start, end, line, mark, _CONTENT.search(part[len(mark) :]) is not None)
        line += len(_LINE_END.findall(part))


def second_line(text: str) -> int | None:
    """The number of the line at which a second document begins; None: there is none, or nothing is in it."""
    if "---" not in text and "..." not in text:  # of a large text, far sooner known than where one begins a line
        return None
    with_content = [part for part in parts(text) if part.has_content]
    return with_content[1].line if len(with_content) > 1 else None
