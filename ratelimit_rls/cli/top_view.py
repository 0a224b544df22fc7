"""Text output of `top`: two tables that fit the terminal, whatever characters the names contain."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ratelimit_rls.cli.formatting import escape_unprintable, format_bytes, format_count

_FIGURES = "{:>10}  {:>6}  {:>10}  {:<5}"
_FIGURES_WIDTH = len(_FIGURES.format("", "", "", ""))
_MIN_NAME_WIDTH = 20
"""Minimum width of the name column. In a narrower terminal the figures are truncated."""

MAX_NODES = 8
"""Nodes of Redis with a line of their own."""


class Screen:
    """Redraws its output in place; the earlier content of the terminal stays."""

    def __init__(self) -> None:
        self._drawn = 0

    def show(self, stats: dict[str, Any]) -> None:
        columns, rows = shutil.get_terminal_size((100, 24))
        lines = list(view_lines(stats, columns, max_lines=rows - 1))
        if self._drawn:
            click.echo(f"\x1b[{self._drawn}F\x1b[J", nl=False, color=True)  # cursor movement, needed even with NO_COLOR
        click.echo("\n".join(lines))
        self._drawn = len(lines)


def view_lines(stats: dict[str, Any], columns: int, max_lines: int | None = None) -> Iterator[str]:
    """Yield the totals, then the two tables, in at most `most` lines if possible."""
    nodes = list(_node_lines(stats.get("store") or ()))
    few = None if max_lines is None else max(1, (max_lines - 5 - len(nodes)) // 2)
    width = max(_MIN_NAME_WIDTH, columns - _FIGURES_WIDTH)
    yield _truncate(f"{_number(stats['calls_per_second'])} calls/s in the last {stats['seconds']:.0f} s", columns)
    for line in nodes:
        yield _truncate(line, columns)
    for title, rows, nothing in (
        ("HOTTEST", stats["hottest"], "no calls"),
        ("MOST LIMITED", stats["denied"], "no denials"),
    ):
        yield ""
        head = _padded(title, width) + _FIGURES.format("calls/s", "share", "denied/s", "lease")
        yield click.style(_truncate(head, columns), bold=True)
        for row in rows[:few]:
            yield _truncate(_padded(_name(row), width) + _figures(row), columns)
        if not rows:
            yield click.style(_truncate(nothing, columns), dim=True)


def _node_lines(nodes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each node of Redis, of many only for the busiest."""
    busiest = sorted(nodes, key=lambda node: -(node["cpu_cores"] or 0))[:MAX_NODES]
    for node in sorted(busiest, key=lambda node: str(node["node"])):
        yield f"redis {escape_unprintable(node['node'])}  " + ", ".join(_node_figures(node))
    if len(nodes) > MAX_NODES:
        yield f"… and {len(nodes) - MAX_NODES} more nodes that use less CPU"


def _node_figures(node: dict[str, Any]) -> Iterator[str]:
    """Yield what is known."""
    if node["memory_bytes"] is not None:
        share = "" if node["memory_share"] is None else f" ({100 * node['memory_share']:.0f} % of maxmemory)"
        yield f"{format_bytes(node['memory_bytes'])}{share}"
    if node["commands_per_second"] is not None:
        yield f"{_number(node['commands_per_second'])} commands/s"
    if node["clients"] is not None:
        yield format_count(node["clients"], "client")
    if node["cpu_cores"] is not None:
        yield f"CPU {100 * node['cpu_cores']:.0f} %"
    if node["evicted_per_second"] is not None:
        yield f"{_number(node['evicted_per_second'])} evicted/s"
    if node["p95_ms"] is not None:
        yield f"p95 {node['p95_ms']:.2g} ms"


def _name(row: dict[str, Any]) -> str:
    """Return the domain and the descriptor, or the key itself if it cannot be parsed."""
    return escape_unprintable(f"{row['domain']}  {row['descriptor']}" if row["domain"] else row["key"])


def _figures(row: dict[str, Any]) -> str:
    share = f"{100 * row['share']:.0f} %"
    lease = "yes" if row["leased"] else ""
    return _FIGURES.format(_number(row["per_second"]), share, _number(row["denied_per_second"]), lease).rstrip()


def _number(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def _padded(text: str, width: int) -> str:
    """Pad or truncate the text to `width` terminal cells."""
    cut = _truncate(text, width)
    return cut + " " * (width - sum(map(_cells, cut)))


def _truncate(text: str, width: int) -> str:
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
    """Return the number of terminal cells a character occupies."""
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
