"""Usage as SVG: admitted and denied calls over time, and below it the heaviest, each with its share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape

from ratelimit_rls.database.usage.queries import GroupedUsage, SeriesPoint
from ratelimit_rls.database.usage.tables import SECONDS
from ratelimit_rls.simulation.xml_text import xml_text

_WIDTH, _LEFT, _RIGHT = 960, 72, 24
_PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT
_PLOT_HEIGHT, _HEAD, _AXIS, _ROW = 200, 56, 44, 30
_MAX_TIME_LABELS = 7
_MAX_NAME_LENGTH = 110

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-size: 15px; font-weight: 600 }
.grid { stroke: #ddd }
.axis { stroke: #888 }
.admitted { fill: #4c8fbd }
.denied { fill: #c8503c }
.strip { fill: #f2f2f2 }
"""


def draw(title: str, points: Sequence[SeriesPoint], granularity: str, heaviest: Sequence[GroupedUsage]) -> str:
    """Draw the usage. `points` has no entry for a time without calls."""
    each_s = SECONDS[granularity]
    height = _HEAD + _PLOT_HEIGHT + _AXIS + _ROW * len(heaviest) + 16
    label = _escaped(title)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<g transform="translate({_LEFT} 0)">',
        f'<text class="title" y="24">{label}</text>',
        *_legend(points, granularity),
        f'<g transform="translate(0 {_HEAD})">',
        *_over_time(points, each_s),
        "</g>",
        f'<g transform="translate(0 {_HEAD + _PLOT_HEIGHT + _AXIS})">',
        *_rows(heaviest),
        "</g></g></svg>",
        "",
    ]
    return "\n".join(lines)


def _legend(points: Sequence[SeriesPoint], granularity: str) -> Iterator[str]:
    denied = sum(point.throttled + point.blocked for point in points)
    admitted = sum(point.total for point in points) - denied
    yield '<rect class="admitted" y="35" width="10" height="10"/>'
    yield f'<text x="15" y="44">{admitted:,} admitted</text>'
    yield '<rect class="denied" x="150" y="35" width="10" height="10"/>'
    yield f'<text x="165" y="44">{denied:,} denied</text>'
    yield f'<text x="{_PLOT_WIDTH}" y="44" text-anchor="end">calls per {granularity}</text>'


def _over_time(points: Sequence[SeriesPoint], each_s: int) -> Iterator[str]:
    scale = _round_up(max((point.total for point in points), default=0))
    for part in range(5):
        y = _PLOT_HEIGHT - _PLOT_HEIGHT * part / 4
        yield f'<line class="grid" x2="{_PLOT_WIDTH}" y1="{y:g}" y2="{y:g}"/>'
        yield f'<text x="-8" y="{y + 4:g}" text-anchor="end">{scale * part / 4:,g}</text>'
    if points:
        first_s = points[0].at_s
        bars = round((points[-1].at_s - first_s) / each_s) + 1
        width = _PLOT_WIDTH / bars
        for point in points:
            yield from _bar(point, (point.at_s - first_s) / each_s * width, width, scale)
        yield from _times(first_s, each_s, bars)
    yield f'<line class="axis" x2="{_PLOT_WIDTH}" y1="{_PLOT_HEIGHT}" y2="{_PLOT_HEIGHT}"/>'


def _bar(point: SeriesPoint, x: float, width: float, scale: float) -> Iterator[str]:
    denied = point.throttled + point.blocked
    admitted = point.total - denied
    low, high = _PLOT_HEIGHT * admitted / scale, _PLOT_HEIGHT * denied / scale
    place = f'x="{x:.2f}" width="{max(width * 0.92, 0.5):.2f}"'
    yield f"<g><title>{_format_time(point.at_s)}: {admitted:,} admitted, {denied:,} denied</title>"
    yield f'<rect class="admitted" {place} y="{_PLOT_HEIGHT - low:.2f}" height="{low:.2f}"/>'
    yield f'<rect class="denied" {place} y="{_PLOT_HEIGHT - low - high:.2f}" height="{high:.2f}"/></g>'


def _times(first_s: float, each_s: int, bars: int) -> Iterator[str]:
    step = -(-bars // _MAX_TIME_LABELS)
    for number in range(0, bars, step):
        x = number / bars * _PLOT_WIDTH
        yield f'<line class="axis" x1="{x:.2f}" x2="{x:.2f}" y1="{_PLOT_HEIGHT}" y2="{_PLOT_HEIGHT + 5}"/>'
        yield f'<text x="{x:.2f}" y="{_PLOT_HEIGHT + 19}">{_format_time(first_s + number * each_s)}</text>'


def _rows(heaviest: Sequence[GroupedUsage]) -> Iterator[str]:
    maximum = max((use.total for use in heaviest), default=1)
    for number, use in enumerate(heaviest):
        top = number * _ROW
        admitted = _PLOT_WIDTH * (use.total - use.denied) / maximum
        denied = _PLOT_WIDTH * use.denied / maximum
        name = use.name if len(use.name) <= _MAX_NAME_LENGTH else f"{use.name[: _MAX_NAME_LENGTH - 1]}…"
        yield f'<text y="{top + 12}">{_escaped(name)}: {use.total:,} calls, {use.denied:,} denied</text>'
        yield f'<rect class="strip" y="{top + 16}" width="{_PLOT_WIDTH}" height="8"/>'
        yield f'<rect class="admitted" y="{top + 16}" width="{admitted:.2f}" height="8"/>'
        yield f'<rect class="denied" x="{admitted:.2f}" y="{top + 16}" width="{denied:.2f}" height="8"/>'


def _round_up(maximum: int) -> float:
    """Return the next of 4, 8, 20, 40, 80, 200 …, so that a quarter of it is an integer."""
    scale = 4
    while scale < maximum:
        scale = scale * 5 // 2 if str(scale)[0] == "8" else scale * 2
    return scale


def _format_time(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%m-%d %H:%M}"


def _escaped(text: str) -> str:
    return escape(xml_text(text))
