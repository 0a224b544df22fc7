"""What `top` shows: two tables that fit the terminal, whatever clients have put into their names."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Iterator
from typing import Any

import click

from ratelimit_rls.cli.words import printable

_FIGURES = "{:>10}  {:>6}  {:>10}  {:<5}"
_WIDTH_OF_FIGURES = len(_FIGURES.format("", "", "", ""))
_NARROWEST = 20
"""For a name, however narrow the terminal is: then the figures are cut."""


class Screen:
    """Draws each view over the one before, where the cursor is: what was on the terminal before `top` stays."""

    def __init__(self) -> None:
        self._drawn = 0

    def show(self, seen: dict[str, Any]) -> None:
        columns, rows = shutil.get_terminal_size((100, 24))
        lines = list(view_lines(seen, columns, most=rows - 1))
        if self._drawn:
            click.echo(f"\x1b[{self._drawn}F\x1b[J", nl=False, color=True)  # a movement, also where NO_COLOR is set
        click.echo("\n".join(lines))
        self._drawn = len(lines)


def view_lines(seen: dict[str, Any], columns: int, most: int | None = None) -> Iterator[str]:
    """A line of what there is altogether, then the two tables; in `most` lines, if that is possible."""
    few = None if most is None else max(1, (most - 5) // 2)
    width = max(_NARROWEST, columns - _WIDTH_OF_FIGURES)
    yield _cut(f"{_number(seen['calls_per_second'])} calls/s in the last {seen['seconds']:.0f} s", columns)
    for title, rows, nothing in (
        ("HOTTEST", seen["hottest"], "nobody asks"),
        ("MOST LIMITED", seen["refused"], "nobody is refused"),
    ):
        yield ""
        head = _padded(title, width) + _FIGURES.format("calls/s", "share", "refused/s", "lease")
        yield click.style(_cut(head, columns), bold=True)
        for row in rows[:few]:
            yield _cut(_padded(_name(row), width) + _figures(row), columns)
        if not rows:
            yield click.style(_cut(nothing, columns), dim=True)


def _name(row: dict[str, Any]) -> str:
    """The domain and the descriptor; the key itself, if they cannot be read from it."""
    return printable(f"{row['domain']}  {row['descriptor']}" if row["domain"] else row["key"])


def _figures(row: dict[str, Any]) -> str:
    share = f"{100 * row['share']:.0f} %"
    lease = "yes" if row["leased"] else ""
    return _FIGURES.format(_number(row["per_second"]), share, _number(row["refused_per_second"]), lease).rstrip()


def _number(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def _padded(text: str, width: int) -> str:
    """As wide as that on a terminal, and no wider."""
    cut = _cut(text, width)
    return cut + " " * (width - sum(map(_cells, cut)))


def _cut(text: str, width: int) -> str:
    if sum(map(_cells, text)) <= width:
        return text
    room, kept = width - 1, []
    for letter in text:
        room -= _cells(letter)
        if room < 0:
            break
        kept.append(letter)
    return "".join(kept) + "…"


def _cells(letter: str) -> int:
    """How much of a line a terminal gives to a character."""
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
