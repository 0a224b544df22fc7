"""SVG of admitted and denied calls over time: one panel per rule set, and below it the denials of its rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from ratelimit_rls.core.duration import format_duration_us
from ratelimit_rls.simulation.histogram import TimeHistogram
from ratelimit_rls.simulation.tally import RuleTally, Tally
from ratelimit_rls.simulation.xml_text import xml_text

_WIDTH, _LEFT, _RIGHT = 960, 72, 24
_PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT
_PLOT_HEIGHT, _HEAD, _AXIS, _STRIP = 200, 56, 36, 34
_MAX_STRIPS = 6
_MAX_TIMES = 7
_SECOND_US = 1_000_000
_MINUTE_US = 60 * _SECOND_US
_DAY_US = 86_400 * _SECOND_US

_TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-size: 15px; font-weight: 600 }
.grid { stroke: #ddd }
.axis { stroke: #888 }
.admitted { fill: #4c8fbd }
.denied { fill: #c8503c }
.strip { fill: #f2f2f2 }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    tally: Tally

    @property
    def strips(self) -> list[RuleTally]:
        return [one for one in self.tally.rules() if one.series is not None][:_MAX_STRIPS]

    @property
    def height(self) -> int:
        return _HEAD + _PLOT_HEIGHT + _AXIS + _STRIP * len(self.strips)


def draw(panels: Sequence[Panel]) -> str:
    """Return the SVG of all panels, in one scale for comparison."""
    height = sum(panel.height for panel in panels) + 16
    most = max((sum(bucket) for panel in panels for bucket in panel.tally.series.buckets), default=0)
    label = _escaped("; ".join(panel.title for panel in panels))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    top = 0
    for panel in panels:
        lines += [f'<g transform="translate({_LEFT} {top})">', *_panel(panel, most), "</g>"]
        top += panel.height
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, most: int) -> Iterator[str]:
    series, tally = panel.tally.series, panel.tally
    admitted, denied = tally.calls - tally.denied, tally.denied
    yield f'<text class="title" y="24">{_escaped(panel.title)}</text>'
    yield '<rect class="admitted" y="35" width="10" height="10"/>'
    yield f'<text x="15" y="44">{admitted:,} admitted</text>'
    yield '<rect class="denied" x="150" y="35" width="10" height="10"/>'
    yield f'<text x="165" y="44">{denied:,} denied</text>'
    yield f'<text x="{_PLOT_WIDTH}" y="44" text-anchor="end">requests per {_bucket_name(series.width_us)}</text>'
    yield f'<g transform="translate(0 {_HEAD})">'
    scale = _round_up(most)
    for part in range(5):
        y = _PLOT_HEIGHT - _PLOT_HEIGHT * part / 4
        yield f'<line class="grid" x2="{_PLOT_WIDTH}" y1="{y:g}" y2="{y:g}"/>'
        yield f'<text x="-8" y="{y + 4:g}" text-anchor="end">{_number(scale * part / 4)}</text>'
    yield from _bars(series, scale)
    yield f'<line class="axis" x2="{_PLOT_WIDTH}" y1="{_PLOT_HEIGHT}" y2="{_PLOT_HEIGHT}"/>'
    yield from _times(series)
    for row, one in enumerate(panel.strips):
        yield from _strip(one, series, _PLOT_HEIGHT + _AXIS + row * _STRIP)
    yield "</g>"


def _bucket_name(width_us: int) -> str:
    names = {_SECOND_US: "second", _MINUTE_US: "minute", 60 * _MINUTE_US: "hour", _DAY_US: "day"}
    return names.get(width_us, format_duration_us(width_us))


def _bars(series: TimeHistogram, scale: float) -> Iterator[str]:
    buckets = series.buckets
    width = _PLOT_WIDTH / max(1, len(buckets))
    for number, (admitted, denied) in enumerate(buckets):
        if not admitted and not denied:
            continue
        title = f"{_clock(series.start_us + number * series.width_us)}: {admitted:,} admitted, {denied:,} denied"
        low, high = _PLOT_HEIGHT * admitted / scale, _PLOT_HEIGHT * denied / scale
        place = f'x="{number * width:.2f}" width="{max(width * 0.92, 0.5):.2f}"'
        yield f"<g><title>{title}</title>"
        yield f'<rect class="admitted" {place} y="{_PLOT_HEIGHT - low:.2f}" height="{low:.2f}"/>'
        yield f'<rect class="denied" {place} y="{_PLOT_HEIGHT - low - high:.2f}" height="{high:.2f}"/></g>'


def _times(series: TimeHistogram) -> Iterator[str]:
    """Draw a time axis with a few round times."""
    span_us = max(1, len(series.buckets)) * series.width_us
    each_us = next((tick * _SECOND_US for tick in _TICKS_S if span_us <= tick * _SECOND_US * _MAX_TIMES), 0)
    if not each_us:
        each_us = -(-span_us // (_DAY_US * _MAX_TIMES)) * _DAY_US
    form = "%Y-%m-%d" if each_us >= _DAY_US else "%H:%M:%S" if each_us % _MINUTE_US else "%H:%M"
    y = _PLOT_HEIGHT
    tick_us = -(-series.start_us // each_us) * each_us
    first = True
    while series.buckets and tick_us <= series.start_us + span_us:
        x = _PLOT_WIDTH * (tick_us - series.start_us) / span_us
        at = datetime.fromtimestamp(tick_us / _SECOND_US, UTC)
        day = f" {at:%Y-%m-%d}" if first and each_us < _DAY_US else ""
        anchor = "start" if x < 40 else "end" if x > _PLOT_WIDTH - 40 else "middle"
        yield f'<line class="axis" x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{y + 5}"/>'
        yield f'<text x="{x:.2f}" y="{y + 19}" text-anchor="{anchor}">{at:{form}}{day}</text>'
        first = False
        tick_us += each_us


def _strip(one: RuleTally, overall: TimeHistogram, top: int) -> Iterator[str]:
    """Draw a rule's denials, darker where there are more."""
    series = one.series
    assert series is not None
    if series.width_us < overall.width_us:
        series.widen(overall.width_us)
    buckets = series.buckets
    most = max(denied for _, denied in buckets)
    width = _PLOT_WIDTH / max(1, len(overall.buckets))
    shift = (series.start_us - overall.start_us) // overall.width_us
    spared = f", {one.passed_over_limit:,} over the limit but admitted" if one.passed_over_limit else ""
    yield f'<text y="{top + 12}">{_escaped(one.path)}: {one.denied:,} denied{spared}</text>'
    yield f'<rect class="strip" y="{top + 16}" width="{_PLOT_WIDTH}" height="10"/>'
    for number, (_, denied) in enumerate(buckets):
        if denied:
            x, opacity = (shift + number) * width, 0.25 + 0.75 * denied / most
            yield (
                f'<rect class="denied" x="{x:.2f}" y="{top + 16}" width="{max(width, 0.5):.2f}" height="10" '
                f'opacity="{opacity:.2f}"><title>{denied:,}</title></rect>'
            )


def _round_up(most: int) -> float:
    """Return the next number of 1, 2, 4, 6, 8 times a power of ten, so that a quarter of it is easy to read."""
    power = 1
    while power * 10 < most:
        power *= 10
    return next(power * step for step in (1, 2, 4, 6, 8, 10) if power * step >= max(1, most))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def _clock(us: int) -> str:
    return f"{datetime.fromtimestamp(us / _SECOND_US, UTC):%Y-%m-%d %H:%M:%S}"


def _escaped(text: str) -> str:
    return escape(xml_text(text))
