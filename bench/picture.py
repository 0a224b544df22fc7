"""SVG chart of the CPU per call of every scenario, separately for service and Redis, with spread and bare echo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from math import ceil
from statistics import median

from bench.measure import Measurement
from bench.scenarios import ECHO, Scenario

_WIDTH, _LEFT, _RIGHT = 990, 250, 160
_PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT
_HEAD, _FOOT, _BAR, _GAP = 78, 30, 9, 7
_MAX_TICKS = 10
_STEPS_US = (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000)

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-size: 15px; font-weight: 600 }
.grid { stroke: #ddd }
.service { fill: #4c8fbd }
.redis { fill: #c8503c }
.envoy { fill: #b08a2e }
.strip { fill: #f6f6f6 }
.spread { stroke: #333; stroke-width: 1.2 }
.echo { stroke: #111; stroke-dasharray: 5 4 }
"""

PARTS: Mapping[str, tuple[str, Callable[[Measurement], float]]] = {
    "service": ("service", lambda one: one.service_us),
    "redis": ("Redis", lambda one: one.redis_us),
    "envoy": ("Envoy", lambda one: one.envoy_us),
}
"""CPU per call by CSS class and process. A process without CPU has no bar."""


def draw(results: Mapping[Scenario, Sequence[Measurement]], seconds: float) -> str:
    """Draw one row per scenario, all on one scale."""
    rows = {scenario: _parts(rounds) for scenario, rounds in results.items()}
    heights = [_height(parts) for parts in rows.values()]
    step_us, max_us = _scale(rows)
    bottom = _HEAD + sum(heights)
    height = bottom + _FOOT
    repeats = max(map(len, results.values()))
    title = "CPU per call, µs"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{title}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="16" y="26">{title}</text>',
        *_legend(rows.values(), f"median of {repeats} × {seconds:g} s, with the least and the most"),
    ]
    lines += _strips(heights)
    lines += [f'<g transform="translate({_LEFT} 0)">', *_grid(step_us, max_us, bottom)]
    top = _HEAD
    for (scenario, parts), row_height in zip(rows.items(), heights, strict=True):
        lines += _row(scenario.name, parts, top, row_height, max_us)
        top += row_height
    if ECHO in rows:
        lines += _echo(median(rows[ECHO]["service"]), max_us, bottom)
    return "\n".join([*lines, "</g></svg>", ""])


def _parts(rounds: Sequence[Measurement]) -> dict[str, list[float]]:
    """Return the sorted microseconds of all rounds for each process that used CPU."""
    parts = {name: sorted(us(one) for one in rounds) for name, (_, us) in PARTS.items()}
    return {name: us for name, us in parts.items() if us[-1] > 0}


def _height(parts: Mapping[str, object]) -> int:
    return _GAP + _BAR * max(1, len(parts)) + _GAP // 2


def _legend(rows: Iterable[Mapping[str, object]], words: str) -> Iterator[str]:
    used = {name for parts in rows for name in parts}
    x = 16
    for name, (label, _) in PARTS.items():
        if name in used:
            yield f'<rect class="{name}" x="{x}" y="38" width="10" height="10"/>'
            yield f'<text x="{x + 15}" y="47">{label}</text>'
            x += 80
    yield f'<text x="{_WIDTH - 16}" y="47" text-anchor="end">{words}</text>'


def _strips(heights: Sequence[int]) -> Iterator[str]:
    """Draw a background behind every other row."""
    top = _HEAD
    for number, height in enumerate(heights):
        if number % 2 == 0:
            yield f'<rect class="strip" y="{top}" width="{_WIDTH}" height="{height}"/>'
        top += height


def _grid(step_us: float, max_us: float, bottom: int) -> Iterator[str]:
    for number in range(round(max_us / step_us) + 1):
        x = _PLOT_WIDTH * number * step_us / max_us
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD}" y2="{bottom}"/>'
        for y in (_HEAD - 6, bottom + 16):
            yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{number * step_us:g}</text>'


def _row(name: str, parts: Mapping[str, Sequence[float]], top: int, height: int, max_us: float) -> Iterator[str]:
    result = ", ".join(f"{PARTS[part][0]} {median(us):.1f} ({us[0]:.1f}..{us[-1]:.1f})" for part, us in parts.items())
    baseline = top + height / 2 + 4
    yield f"<g><title>{escape(name)}: {result}</title>"
    yield f'<text x="-10" y="{baseline:g}" text-anchor="end">{escape(name)}</text>'
    y = top + _GAP * 0.75
    for part, us in parts.items():
        least, middle, most = (_x(one, max_us) for one in (us[0], median(us), us[-1]))
        yield f'<rect class="{part}" y="{y:g}" width="{middle:.1f}" height="{_BAR - 1}"/>'
        if len(us) > 1:
            at = y + (_BAR - 1) / 2
            ends = "".join(f"M{x:.1f} {at - 3:g}v6" for x in (least, most))
            yield f'<path class="spread" d="M{least:.1f} {at:g}H{most:.1f}{ends}"/>'
        y += _BAR
    values = " + ".join(f"{'→ ' if us[-1] > max_us else ''}{median(us):.1f}" for us in parts.values())
    yield f'<text x="{_PLOT_WIDTH + 12}" y="{baseline:g}">{values}</text></g>'


def _echo(us: float, max_us: float, bottom: int) -> Iterator[str]:
    x = _x(us, max_us)
    yield f'<line class="echo" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD}" y2="{bottom}"/>'
    yield f'<text x="{x:.1f}" y="{_HEAD - 20}" text-anchor="middle">bare echo: {us:.1f}</text>'


def _x(us: float, max_us: float) -> float:
    """Return the position of a value; larger values are clipped to the scale."""
    return _PLOT_WIDTH * min(us, max_us) / max_us


def _scale(rows: Mapping[Scenario, Mapping[str, Sequence[float]]]) -> tuple[float, float]:
    """Return the grid step and the end of the scale, in round numbers, which fit all scenarios with decisions.

    An echo on another transport may take five times as long, and is clipped.
    """
    deciding = [parts for scenario, parts in rows.items() if scenario.decides] or rows.values()
    max_us = max(us[-1] for parts in deciding for us in parts.values())
    step_us = next((step for step in _STEPS_US if max_us <= step * _MAX_TICKS), _STEPS_US[-1])
    return step_us, step_us * ceil(max_us / step_us)
