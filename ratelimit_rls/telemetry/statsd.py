"""Exporter to statsd or DogStatsD, under the names of envoyproxy/ratelimit.

    counters     name:5|c           by how much they grew since they were last sent; unchanged ones are omitted
    gauges       name:7|g           always
    times        name:3.75|ms|@0.2  one line for each bucket of durations that grew: five calls of about 3.75 ms

A time is the middle of its bucket, so counts are exact and the distribution is as fine as the buckets are.

Unsent values are not queued: they are the difference between a counter and what was reported. While the server is down
the difference grows, and it is sent when the server is back. Lost are bytes that were in the network when a connection
broke, and every datagram that was not received.

Each worker sends its own counters and times, which the server adds.
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
from ratelimit_rls.telemetry.instruments import DURATIONS_S, InstrumentKind
from ratelimit_rls.telemetry.series import Collected, Distribution, kind_of, timers
from ratelimit_rls.telemetry.statsd_transport import StatsdTransport, TcpTransport, UdpTransport

Names = Callable[[], Awaitable[Iterable[tuple[str, int]]]]

CLOSE_S = 2.0

_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f:|]")
_NOT_IN_TAGS = re.compile(r"[\x00-\x1f\x7f|,#]")
_GROUP = re.compile(r"\$([0-9]+)")

_BOUNDS_MS = tuple(bound * 1000 for bound in (0.0, *DURATIONS_S))
_MIDDLES_MS = tuple((low + high) / 2 for low, high in pairwise(_BOUNDS_MS))


class StatsdLine(NamedTuple):
    text: bytes  # with a line feed
    name: str  # of the metric
    bucket: int  # of a duration; -1 for a number
    reported: int  # the total that is reported once this line is sent


class StatsdFormat:
    """Formatting of names and tags for plain statsd: tags are part of the name."""

    def __init__(self, extra_tags: Mapping[str, str]) -> None:
        tags = sorted((key, re.sub(r"[.:|]", "_", text)) for key, text in extra_tags.items() if key and text)
        self._suffix = _NOT_IN_NAMES.sub("_", "".join(f".__{key}={text}" for key, text in tags))

    def name_and_tags(self, name: str) -> tuple[str, str]:
        """Return the name, and the tags as they are appended to a line."""
        return _NOT_IN_NAMES.sub("_", name) + self._suffix, ""


class DogStatsdFormat(StatsdFormat):
    """Formatting for DogStatsD, which supports tags. The first mogrifier that matches a name renames and tags it."""

    def __init__(self, extra_tags: Mapping[str, str], mogrifiers: Iterable[Mogrifier] = ()) -> None:
        self._extra = [f"{key}:{text}" for key, text in sorted(extra_tags.items()) if key and text]
        self._mogrifiers = tuple(mogrifiers)

    def name_and_tags(self, name: str) -> tuple[str, str]:
        tags = list(self._extra)
        for mogrifier in self._mogrifiers:
            if found := mogrifier.pattern.search(name):
                groups = [found[0], *(text or "" for text in found.groups())]
                name = _expand(mogrifier.name, groups)
                tags += [f"{key}:{_expand(text, groups)}" for key, text in mogrifier.tags]
                break
        written = ",".join(_NOT_IN_TAGS.sub("_", tag) for tag in tags)
        return _NOT_IN_NAMES.sub("_", name), f"|#{written}" if written else ""


def _expand(template: str, groups: list[str]) -> str:
    """Replace $1 by the first group, and so on; a number without a group is left unchanged."""
    return _GROUP.sub(lambda found: groups[int(found[1])] if int(found[1]) < len(groups) else found[0], template)


class DeltaTracker:
    """Tracks what was reported, and yields lines for what has changed since."""

    def __init__(self, style: StatsdFormat) -> None:
        self._style = style
        self._counts: dict[str, int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def lines(
        self, names: Iterable[tuple[str, int]], times: Iterable[tuple[str, Distribution]], *, with_gauges: bool = True
    ) -> Iterator[StatsdLine]:
        reported = self._counts
        for name, value in names:
            if kind_of(name) is InstrumentKind.GAUGE:
                if with_gauges:
                    yield self.gauge(name, value)
            elif (grown := value - reported.get(name, 0)) > 0:
                yield self._line(name, f"{grown}|c", reported=value)
        for name, distribution in times:
            yield from self._times(name, distribution)

    def gauge(self, name: str, value: int) -> StatsdLine:
        return self._line(name, f"{value}|g", reported=0)

    def _times(self, name: str, now: Distribution) -> Iterator[StatsdLine]:
        before = self._buckets.setdefault(name, [0] * len(now.counts))
        grown = [count - reported for count, reported in zip(now.counts, before, strict=True)]
        grown_ms = (now.sum_s - self._sums_s.get(name, 0.0)) * 1000
        self._sums_s[name] = now.sum_s
        below_ms = sum(count * middle for count, middle in zip(grown, _MIDDLES_MS, strict=False))
        for bucket, count in enumerate(grown):
            if count > 0:
                # The last bucket has no middle: use what the others leave of the sum.
                is_last = bucket == len(_MIDDLES_MS)
                value_ms = max(_BOUNDS_MS[-1], (grown_ms - below_ms) / count) if is_last else _MIDDLES_MS[bucket]
                yield self._line(name, f"{value_ms:.6g}|ms{_sample_rate(count)}", bucket, now.counts[bucket])

    def _line(self, name: str, value: str, bucket: int = -1, reported: int = 0) -> StatsdLine:
        written, tags = self._style.name_and_tags(name)
        return StatsdLine(f"{written}:{value}{tags}\n".encode(errors="replace"), name, bucket, reported)

    def mark_sent(self, lines: Iterable[StatsdLine]) -> None:
        """Mark lines as reported. They are sent or lost, and not sent again in either case."""
        for line in lines:
            if line.bucket >= 0:
                self._buckets[line.name][line.bucket] = line.reported
            elif line.reported:
                self._counts[line.name] = line.reported


def _sample_rate(count: int) -> str:
    """Return a rate that gives the count when a server divides one by it, even if the server rounds down."""
    if count == 1:
        return ""
    rate = 1 / count
    while int(1 / rate) < count:
        rate = math.nextafter(rate, 0)
    return f"|@{rate!r}"


class StatsdSink:
    def __init__(
        self,
        transport: StatsdTransport,
        style: StatsdFormat,
        names: Names,
        times: Callable[[], Collected],
        *,
        interval_s: float,
        gauges: Names | None = None,
    ) -> None:
        """`names` are this process's values by statsd name; of `times` only response times are used.

        `gauges` is for one of several workers: the values of all workers together, of which only gauges are sent.
        Without it each would send its own under the same name, and the server would keep the last.
        """
        self._transport = transport
        self._deltas = DeltaTracker(style)
        self._names = names
        self._times = times
        self._gauges = gauges
        self._interval_s = interval_s
        self._is_failing = False
        self.dropped_lines = 0

    async def run(self) -> None:
        """Send periodically until cancelled; then close() sends the rest."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.flush()

    async def close(self) -> None:
        """Send the rest, and wait at most CLOSE_S for it."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        except TimeoutError:
            pass
        self._transport.close()

    async def flush(self) -> None:
        """Send now. Never raises: metrics must not affect calls."""
        try:
            await self._transport.connect()
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a name that cannot be resolved
            self._fail(error)
            return
        lines = self._deltas.lines(await self._names(), timers(self._times()), with_gauges=self._gauges is None)
        try:
            for chunk in _chunks(lines, self._transport.chunk_bytes):
                await self._send(chunk)
            if self._gauges is not None:
                of_all = [
                    (name, value) for name, value in await self._gauges() if kind_of(name) is InstrumentKind.GAUGE
                ]
                for chunk in _chunks((self._deltas.gauge(*one) for one in of_all), self._transport.chunk_bytes):
                    await self._send(chunk)
        except (OSError, TimeoutError) as error:
            self._fail(error)
        else:
            self._is_failing = False

    async def _send(self, chunk: list[StatsdLine]) -> None:
        self._deltas.mark_sent(chunk)
        try:
            await self._transport.send(b"".join(line.text for line in chunk))
        except BaseException:
            self.dropped_lines += len(chunk)
            raise

    def _fail(self, error: Exception) -> None:
        """Log the error once, until sending has succeeded again."""
        if not self._is_failing:
            self._is_failing = True
            message = str(error) or type(error).__name__
            structlog.get_logger().warning("statsd_send_failed", error=message, dropped_lines=self.dropped_lines)


def _chunks(lines: Iterable[StatsdLine], max_bytes: int) -> Iterator[list[StatsdLine]]:
    """Group lines into chunks of at most that size; a longer line is a chunk of its own."""
    chunk: list[StatsdLine] = []
    size = 0
    for line in lines:
        if chunk and size + len(line.text) > max_bytes:
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
    """Return None unless the settings enable statsd or DogStatsD."""
    sink = settings.stats_sink
    if sink not in ("statsd", "dogstatsd"):
        return None
    is_dog = sink == "dogstatsd"
    address = settings.statsd_host, settings.statsd_port
    return StatsdSink(
        UdpTransport(*address) if is_dog or settings.statsd_protocol == "udp" else TcpTransport(*address),
        DogStatsdFormat(settings.extra_tags, settings.dog_statsd_mogrifiers)
        if is_dog
        else StatsdFormat(settings.extra_tags),
        names,
        times,
        interval_s=settings.stats_flush_interval.total_seconds(),
        gauges=gauges if settings.rls_workers > 1 else None,
    )
