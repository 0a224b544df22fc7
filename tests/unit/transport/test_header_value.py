"""Conversion of arbitrary text to the value of a header."""

from __future__ import annotations

import pytest

from ratelimit_rls.errors import Problem
from ratelimit_rls.transport.http.header_value import MAX_LENGTH, header_value


@pytest.mark.parametrize("text", ["a\0b", "a\r\nb", "a\x1b[31mb", "a\x7fb", "a\u0085b", "a\u2028b", "  a \t b "])
def test_line_is_printable_ascii(text: str) -> None:
    line = header_value(text)

    assert line.isprintable()
    assert line.isascii()
    assert line.split()[0] == "a"
    assert line.endswith("b")


def test_line_length_is_limited() -> None:
    assert len(header_value("x" * 10_000)) == MAX_LENGTH


def test_control_characters_are_escaped_in_problems() -> None:
    assert str(Problem("f", 1, 2, "unknown key 'a\0\x1b\n'")) == "f:1:2: error: unknown key 'a\\x00\\x1b\\n'"
