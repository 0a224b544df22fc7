"""Splitting of a text into YAML documents, by lines alone and compared with a parser."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ratelimit_rls.yaml.multi_document import second_document_line, split_documents

ENDS = ("\n", "\r\n", "\r", "\x85", "\u2028", "\u2029")
LINES = ("a: 1", "b: ü", "---", "--- ", "--- # c", "---x: 1", " ---", "...", "# c", "", "  # c", "t: |", "  ---", "  x")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\n", None),
        ("a: 1\n---\n", None),
        ("a: 1\n---\n# nothing\n\n---\n...\n", None),
        ("a: 1\n...\n# nothing", None),
        ("# c\n%YAML 1.1\n---\na: 1\n", None),
        ("t: |\n  ---\n  x\n", None),
        ("t: '\n  ---\n  x'\n", None),
        ("a: 1\n---x: 2\n", None),
        ("a: 1\n---\nb: 2\n", 2),
        ("---\r\na: 1\r\n--- {b: 2}", 3),
        ("a: 1\n...\nb: 2\n", 2),
        ("a: 1\n...\n---\nb: [\n", 3),
        ("a: 1\n---\n---\n# c\nb: 2\n", 3),
        ("a: 1\r---\rb: 2", 2),
        ("a: 1\u2028--- |\u2028  b", 2),
    ],
)
def test_second_document_line_ignores_empty_documents(text: str, line: int | None) -> None:
    assert second_document_line(text) == line


@given(st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(ENDS))))
@example([("t: |", "\n"), ("  ---", "\n"), ("---", "\n"), ("b: ü", "\n")])
def test_split_documents_agrees_with_the_parser(lines: list[tuple[str, str]]) -> None:
    text = "".join(line + end for line, end in lines)
    found = list(split_documents(text))
    assert "".join(text[part.start : part.end] for part in found) == text
    marks = [part for part in found if part.mark == "---"]
    try:
        events = list(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError:
        return  # split nevertheless
    starts = [event.start_mark for event in events if isinstance(event, yaml.DocumentStartEvent) and event.explicit]
    assert [(part.start, part.line) for part in marks] == [(mark.index, mark.line + 1) for mark in starts if mark]
