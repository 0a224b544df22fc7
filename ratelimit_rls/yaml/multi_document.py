"""Splits a text into YAML documents: where each starts, and whether it has content.

Splitting by lines is exact: `---` and `...` at the start of a line always end a document, and in a text within a
document (`body: |`) they are indented. So the documents need not be valid otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

LINE_BREAKS = "\n\r\x85\u2028\u2029"
"""Characters that end a line in YAML."""

_MARK = re.compile(rf"(?:\A|(?<=[{LINE_BREAKS}]))(---|\.\.\.)(?=[ \t{LINE_BREAKS}]|\Z)")
_CONTENT = re.compile(rf"(?:\A|[{LINE_BREAKS}])(?:[ \t]*[^ \t#%{LINE_BREAKS}]|[ \t]+%)")
_LINE_END = re.compile(rf"\r\n|[{LINE_BREAKS}]")


class YamlDocument(NamedTuple):
    """One document: from a marker, or the beginning, to the next marker."""

    start: int  # offset in the text
    end: int
    line: int  # number of its first line
    mark: str  # "---" or "..."; "" for the first document
    has_content: bool  # anything but comments, directives and empty lines


def split_documents(text: str) -> Iterator[YamlDocument]:
    """Yield the documents of the text, which together are the whole text; a text without markers is one document."""
    starts = [(0, ""), *((found.start(), found[1]) for found in _MARK.finditer(text))]
    line = 1
    for number, (start, mark) in enumerate(starts):
        end = starts[number + 1][0] if number + 1 < len(starts) else len(text)
        part = text[start:end]
        yield YamlDocument(start, end, line, mark, _CONTENT.search(part[len(mark) :]) is not None)
        line += len(_LINE_END.findall(part))


def second_document_line(text: str) -> int | None:
    """Return the line number at which a second document starts; None if there is none or it is empty."""
    if "---" not in text and "..." not in text:  # much faster for a large text than searching for line starts
        return None
    with_content = [part for part in split_documents(text) if part.has_content]
    return with_content[1].line if len(with_content) > 1 else None
