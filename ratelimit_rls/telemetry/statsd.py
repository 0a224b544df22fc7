"""Metrics sent to statsd or DogStatsD, under the reference's names.

    counters     name:5|c           by how much they grew since they were last sent; not those that did not
    gauges       name:7|g           always
    times        name:3.75|ms|@0.2  one line for each bucket of durations that grew: five calls of about 3.75 ms

A time is the middle of its bucket, so their number is right and their distribution as fine as the buckets are.

What was not sent yet is not kept in a queue: it is the difference between what a counter says and what was told of it.
While the server is away that difference grows, and it is sent when the server is back. Lost is what was handed to the
network when a connection broke, and every datagram that nobody took.

Each worker sends its own counters and times, which the server adds up.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import structlog

from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.mogrifiers import Mogrifier
from ratelimit_rls.telemetry.collected import Collected, Distribution
from ratelimit_rls.telemetry.instruments import DURATIONS_S, Kind
from ratelimit_rls.telemetry.statsd_names import kind_of, timers
from ratelimit_rls.telemetry.statsd_wire import TcpWire, UdpWire, Wire

Names = Callable[[], Awaitable[Iterable[tuple[str, int]]]]

CLOSE_S = 2.0

_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f:|]")
_NOT_IN_TAGS = re.compile(r"[\x00-\x1f\x7f|,#]")
_GROUP = re.compile(r"\$([0-9]+)")

_BOUNDS_MS = tuple(bound * 1000 for bound in (0.0, *DURATIONS_S))
_MIDDLES_MS = tuple((low + high) / 2 for low, high in pairwise(_BOUNDS_MS))


class Line(NamedTuple):
    text: bytes  # with a line feed
    name: str  # of what is told
    bucket: int  # of a time; -1: of a number
    told: int  # what has been told of it, once this is sent


class Style:
    """How names and tags are written for plain statsd: tags are parts of the name."""

    def __init__(self, extra_tags: Mapping[str, str]) -> None:
        tags = sorted((key, re.sub(r"[.:|]", "_", text)) for key, text in extra_tags.items() if key and text)
        self._suffix = _NOT_IN_NAMES.sub("_", "".join(f".__{key}={text}" for key, text in tags))

    def name_and_tags(self, name: str) -> tuple[str, str]:
        """Tags as they stand at the end of a line."""
        return _NOT_IN_NAMES.sub("_", name) + self._suffix, ""


class DogStyle(Style):
    """For DogStatsD, which has real tags. The first mogrifier that meets a name renames and tags it."""

    def __init__(self, extra_tags: Mapping[str, str], mogrifiers: Iterable[Mogrifier] = ()) -> None:
        self._extra = [f"{key}:{text}" for key, text in sorted(extra_tags.items()) if key and text]
        self._mogrifiers = tuple(mogrifiers)

    def name_and_tags(self, name: str) -> tuple[str, str]:
        tags = list(self._extra)
        for mogrifier in self._mogrifiers:
            if found := mogrifier.pattern.search(name):
                groups = [found[0], *(text or "" for text in found.groups())]
                name = _filled(mogrifier.name, groups)
                tags += [f"{key}:{_filled(text, groups)}" for key, text in mogrifier.tags]
                break
        written = ",".join(_NOT_IN_TAGS.sub("_", tag) for tag in tags)
        return _NOT_IN_NAMES.sub("_", name), f"|#{written}" if written else ""


def _filled(template: str, groups: list[str]) -> str:
    """$1 is the first group; a number without a group stays as it is."""
    return _GROUP.sub(lambda found: groups[int(found[1])] if int(found[1]) < len(groups) else found[0], template)


class Untold:
    """What has grown since it was told, as lines, and what has been told."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._counts: dict[str, int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def lines(
        self, names: Iterable[tuple[str, int]], times: Iterable[tuple[str, Distribution]], *, with_gauges: bool = True
    ) -> Iterator[Line]:
        told = self._counts
        for name, value in names:
            if kind_of(name) is Kind.GAUGE:
                if with_gauges:
                    yield self.gauge(name, value)
            elif (grown := value - told.get(name, 0)) > 0:
                yield self._line(name, f"{grown}|c", told=value)
        for name, distribution in times:
            yield from self._times(name, distribution)

    def gauge(self, name: str, value: int) -> Line:
        return self._line(name, f"{value}|g", told=0)

    def _times(self, name: str, now: Distribution) -> Iterator[Line]:
        before = self._buckets.setdefault(name, [0] * len(now.counts))
        grown = [count - told for count, told in zip(now.counts, before, strict=True)]
        grown_ms = (now.sum_s - self._sums_s.get(name, 0.0)) * 1000
        self._sums_s[name] = now.sum_s
        below_ms = sum(count * middle for count, middle in zip(grown, _MIDDLES_MS, strict=False))
        for bucket, count in enumerate(grown):
            if count > 0:
                # Above the last bound is no middle: whatever the others leave of the sum.
                is_last = bucket == len(_MIDDLES_MS)
                value_ms = max(_BOUNDS_MS[-1], (grown_ms - below_ms) / count) if is_last else _MIDDLES_MS[bucket]
                yield self._line(name, f"{value_ms:.6g}|ms{_sample_rate(count)}", bucket, now.counts[bucket])

    def _line(self, name: str, value: str, bucket: int = -1, told: int = 0) -> Line:
        written, tags = self._style.name_and_tags(name)
        return Line(f"{written}:{value}{tags}\n".encode(errors="replace"), name, bucket, told)

    def tell(self, lines: Iterable[Line]) -> None:
        """They are sent, or lost: not to be sent again, in any case."""
        for line in lines:
            if line.bucket >= 0:
                self._buckets[line.name][line.bucket] = line.told
            elif line.told:
                self._counts[line.name] = line.told


def _sample_rate(count: int) -> str:
    """As a server divides one by it, and some of them round down."""
    if count == 1:
        return ""
    rate = 1 / count
    while int(1 / rate) < count:
        rate = math.nextafter(rate, 0)
    return f"|@{rate!r}"


class StatsdSink:
    def __init__(
        self,
        wire: Wire,
        style: Style,
        names: Names,
        times: Callable[[], Collected],
        *,
        interval_s: float,
        gauges: Names | None = None,
    ) -> None:
        """`names` are this process's numbers, by statsd name; of `times`, only the reference's response times are read.

        `gauges` is for one of several workers: what all of them together have, of which the gauges alone are sent.
        Without it each would send its own under the same name, and the server would believe the last.
        """
        self._wire = wire
        self._untold = Untold(style)
        self._names = names
        self._times = times
        self._gauges = gauges
        self._interval_s = interval_s
        self._is_failing = False
        self.dropped_lines = 0

    async def run(self) -> None:
        """Until it is cancelled; then close() sends the rest."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.flush()

    async def close(self) -> None:
        """Sends what there is left to send, and waits for that only so long."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        except TimeoutError:
            pass
        self._wire.close()

    async def flush(self) -> None:
        """Never raises: metrics are not worth a call."""
        try:
            await self._wire.connect()
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a name that cannot be looked up
            self._fail(error)
            return
        lines = self._untold.lines(await self._names(), timers(self._times()), with_gauges=self._gauges is None)
        try:
            for chunk in _chunks(lines, self._wire.chunk_bytes):
                await self._send(chunk)
            if self._gauges is not None:
                of_all = [(name, value) for name, value in await self._gauges() if kind_of(name) is Kind.GAUGE]
                for chunk in _chunks((self._untold.gauge(*one) for one in of_all), self._wire.chunk_bytes):
                    await self._send(chunk)
        except (OSError, TimeoutError) as error:
            self._fail(error)
        else:
            self._is_failing = False

    async def _send(self, chunk: list[Line]) -> None:
        self._untold.tell(chunk)
        try:
            await self._wire.send(b"".join(line.text for line in chunk))
        except BaseException:
            self.dropped_lines += len(chunk)
            raise

    def _fail(self, error: Exception) -> None:
        """Said once, until it has worked again."""
        if not self._is_failing:
            self._is_failing = True
            why = str(error) or type(error).__name__
            structlog.get_logger().warning("statsd cannot be reached", error=why, dropped_lines=self.dropped_lines)


def _chunks(lines: Iterable[Line], most_bytes: int) -> Iterator[list[Line]]:
    """Whole lines, together not longer than that; a line that is longer on its own is on its own."""
    chunk: list[Line] = []
    size = 0
    for line in lines:
        if chunk and size + len(line.text) > most_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(line)
        size += len(line.text)
    if chunk:
        yield chunk


def new_statsd_sink(
    settings: Settings,
    names: Names,
    times: Callable[[], Collected],
    gauges: Names | None = None,
) -> StatsdSink | None:
    """None unless settings ask for statsd or DogStatsD."""
    sink = settings.stats_sink
    if sink not in ("statsd", "dogstatsd"):
        return None
    is_dog = sink == "dogstatsd"
    address = settings.statsd_host, settings.statsd_port
    return StatsdSink(
        UdpWire(*address) if is_dog or settings.statsd_protocol == "udp" else TcpWire(*address),
        DogStyle(settings.extra_tags, settings.dog_statsd_mogrifiers) if is_dog else Style(settings.extra_tags),
        names,
        times,
        interval_s=settings.stats_flush_interval.total_seconds(),
        gauges=gauges if settings.rls_workers > 1 else None,
    )
