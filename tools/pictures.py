"""Draws the diagrams of docs/algorithms.md: `python -m tools.pictures`.

The rules are those of the page, decided by the real Lua script on a virtual clock. Every algorithm gets the same
traffic on the same scale, so that the diagrams are comparable; a test fails if one of them is outdated.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ratelimit_rls.core.model import Code, Decision, Descriptor, Entry, Request
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.simulation.clock import DEFAULT_START_US, VirtualClock
from ratelimit_rls.simulation.runner import make_limiter
from ratelimit_rls.store.embedded import EmbeddedStore

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "algorithms.md"

_SECTION = re.compile(r"^## (?P<title>.+?)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_RULES = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
_PICTURE = re.compile(r"!\[.*?\]\(pictures/(\w+)\.svg\)")
_ROW = re.compile(r"^\| (\d\d:\d\d:\d\d(?:\.\d+)?) \| (\d+) \| (\d+) \| (\d+) \| (.+?) \|$", re.MULTILINE)

S_US = 1_000_000
MINUTE_US = 60 * S_US


class Row(NamedTuple):
    """Row of a worked example: simultaneous requests, how many are admitted, and the response to the last one."""

    at_us: int  # after midnight
    requests: int
    admitted: int
    remaining: int
    response: str


class Section(NamedTuple):
    """Section of the page with an example rule."""

    title: str
    rules: str
    rows: tuple[Row, ...]
    pictures: tuple[str, ...]

    @property
    def tree(self) -> Tree:
        return compile_documents({"algorithms.md": self.rules.encode()}).tree

    @property
    def request(self) -> Request:
        """Request that matches the rules, of a single client."""
        (root,) = self.tree.domains.values()
        (key,) = root.by_key
        return Request(root.key, (Descriptor((Entry(key, "a"),)),))


def sections() -> list[Section]:
    found = []
    for section in _SECTION.finditer(PAGE.read_text(encoding="utf-8")):
        text = section["text"]
        if rules := _RULES.search(text):
            rows = tuple(
                Row(_moment(at), int(requests), int(admitted), int(remaining), response)
                for at, requests, admitted, remaining, response in _ROW.findall(text)
            )
            found.append(Section(section["title"], rules[1], rows, tuple(_PICTURE.findall(text))))
    return found


def _moment(text: str) -> int:
    hours, minutes, seconds = text.split(":")
    return (int(hours) * 3600 + int(minutes) * 60) * S_US + round(float(seconds) * S_US)


class Hit(NamedTuple):
    at_us: int
    admitted: bool
    wait_us: int


async def play(section: Section, decided_at_us: Sequence[int]) -> list[Hit]:
    clock = VirtualClock()
    limiter = make_limiter(section.tree, EmbeddedStore(clock=clock))
    call = limiter.prepare(section.request)
    hits = []
    for at_us in decided_at_us:
        clock.advance_to(DEFAULT_START_US + at_us)
        (decision,) = await limiter.check([call])
        assert isinstance(decision, Decision)
        hits.append(Hit(at_us, decision.code is Code.OK, decision.wait_us))
    return hits


# Two bursts across the end of a minute, then a client that keeps exceeding its limit.
RUSHES_US = [50 * S_US] * 10 + [65 * S_US] * 10 + [at * S_US for at in range(80, 196, 4)]
QUEUE_US = [0] * 8 + [at * 1000 for at in range(150, 1201, 70)]

WIDTH, LEFT, RIGHT = 720, 60, 20
PLOT = WIDTH - LEFT - RIGHT
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.title { font-size: 14px; font-weight: 600 }
.note { fill: #666 }
.page { fill: #fcfcfb; stroke: #d4d4d0 }
.grid { stroke: #e2e2de }
.tick { stroke: #bbb }
.limit { stroke: #8a6d1f; stroke-dasharray: 5 4 }
.admitted { fill: #4c8fbd }
.denied { fill: none; stroke: #c8503c; stroke-width: 1.6 }
.curve { fill: none; stroke: #2d6a94; stroke-width: 2 }
.beyond { fill: #c8503c; opacity: 0.25 }
.way { stroke: #4c8fbd; opacity: 0.6 }
"""
DOT = 3.2
STACK = 8.6  # distance between stacked dots


def pictures() -> dict[Path, str]:
    """Return the path and the content of every diagram of the page."""
    drawn = {}
    for section in sections():
        for name in section.pictures:
            draw = _queue if name == "throttle" else _rushes
            drawn[DOCS / "pictures" / f"{name}.svg"] = "\n".join(draw(section, name)) + "\n"
    return drawn


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(hit: Hit, x: float, y: float) -> str:
    return f'<circle class="{"admitted" if hit.admitted else "denied"}" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _sheet(height: int, title: str, hits: Sequence[Hit]) -> Iterator[str]:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
    yield f"<style>{STYLE}</style>"
    yield f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    yield _text(LEFT, 26, title, kind="title")
    admitted = sum(hit.admitted for hit in hits)
    counts = ((True, f"{admitted} admitted"), (False, f"{len(hits) - admitted} denied"))
    for column, (passed, words) in enumerate(counts):
        x = LEFT + 4 + 120 * column
        yield _dot(Hit(0, passed, 0), x, 42)
        yield _text(x + 9, 46, words, kind="note")


def _rushes(section: Section, name: str) -> Iterator[str]:
    """Draw the hits above, and below the number admitted within the previous minute."""
    hits = asyncio.run(play(section, RUSHES_US))
    first, last, most = 30 * S_US, 200 * S_US, 20
    (limit,) = section.tree.rules()[0].limits
    allowed = limit.requests_per_unit

    def x(us: float) -> float:
        return LEFT + PLOT * (us - first) / (last - first)

    def y(count: float) -> float:
        return 264 - 96 * count / most

    burst = f", burst {limit.burst}" if limit.burst not in (0, allowed) else ""
    yield from _sheet(300, f"{name}: {allowed} a minute{burst}", hits)
    for at_us in range(first, last, 30 * S_US):
        yield _line("grid" if at_us % MINUTE_US else "tick", x(at_us), 56, x(at_us), y(0))
        yield _text(x(at_us), 284, f"{at_us // MINUTE_US}:{at_us // S_US % 60:02}", "middle")
    yield _text(LEFT - 8, 150, "hits", "end", "note")
    stacked = Counter[int]()
    for hit in hits:
        yield _dot(hit, x(hit.at_us), 145.4 - STACK * stacked[hit.at_us])
        stacked[hit.at_us] += 1
    for value in (0, most):
        yield _line("grid", LEFT, y(value), LEFT + PLOT, y(value))
        yield _text(LEFT - 8, y(value) + 4, str(value), "end")
    steps = list(_last_minute([hit.at_us for hit in hits if hit.admitted], first, last))
    curve = " ".join(f"{x(at_us):.1f},{y(count):.1f}" for at_us, count in steps)
    beyond = " ".join(f"{x(at_us):.1f},{y(max(count, allowed)):.1f}" for at_us, count in steps)
    yield f'<polygon class="beyond" points="{beyond} {x(last):.1f},{y(allowed):.1f}"/>'
    yield f'<polyline class="curve" points="{curve}"/>'
    yield _line("limit", LEFT, y(allowed), LEFT + PLOT, y(allowed))
    yield _text(LEFT - 8, y(allowed) + 4, "limit", "end")
    yield _text(LEFT + PLOT, y(most) + 15, "admitted in the last minute", "end", "note")
    yield "</svg>"


def _last_minute(admitted: Sequence[int], first_us: int, last_us: int) -> Iterator[tuple[int, int]]:
    """Yield the points of a step curve: up at a hit, down when the hit is a minute old."""
    changes = Counter(admitted)
    changes.subtract(at_us + MINUTE_US for at_us in admitted)
    count = 0
    yield first_us, count
    for at_us, change in sorted(changes.items()):
        if at_us < last_us:
            yield at_us, count
            count += change
            yield at_us, count
    yield last_us, count


def _queue(section: Section, name: str) -> Iterator[str]:
    """Draw when calls arrive, and below when they are answered."""
    hits = asyncio.run(play(section, QUEUE_US))
    last, come, leave = 1_700_000, 92, 196
    (rule,) = section.tree.rules()
    rate, longest_ms = rule.limits[0].requests_per_unit, rule.max_delay_us // 1000

    def x(us: float) -> float:
        return LEFT + 12 + (PLOT - 12) * us / last

    yield from _sheet(240, f"{name}: {rate} a second, delayed by at most {longest_ms} ms", hits)
    for at_us in range(0, last + 1, 100_000):
        has_label = at_us % 500_000 == 0
        yield _line("tick" if has_label else "grid", x(at_us), 56, x(at_us), 206)
        if has_label:
            yield _text(x(at_us), 224, f"{at_us / S_US:g} s", "middle")
    yield _text(LEFT - 8, come + 4, "come", "end", "note")
    yield _text(LEFT - 8, leave + 4, "leave", "end", "note")
    stacked = Counter[int]()
    for hit in hits:
        if hit.admitted:
            left_us = hit.at_us + hit.wait_us
            yield _line("way", x(hit.at_us), come, x(left_us), leave)
            yield _dot(hit, x(hit.at_us), come)
            yield _dot(hit, x(left_us), leave)
        else:
            stacked[hit.at_us] += 1
            yield _dot(hit, x(hit.at_us), come - STACK * stacked[hit.at_us])
    yield "</svg>"


def main() -> None:
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
