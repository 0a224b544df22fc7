"""The statsd and DogStatsD exporter on real sockets, and failures of the server."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import re2
import structlog

from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.mogrifiers import Mogrifier
from ratelimit_rls.telemetry import statsd, statsd_transport
from ratelimit_rls.telemetry.instruments import DURATIONS_S, REFERENCE_TIMES
from ratelimit_rls.telemetry.series import Collected, Distribution, Durations, Series
from ratelimit_rls.telemetry.statsd import DogStatsdFormat, StatsdFormat, StatsdSink, new_statsd_sink
from ratelimit_rls.telemetry.statsd_transport import TcpTransport, UdpTransport

HITS = "ratelimit.service.rate_limit.d.k.total_hits"
QUEUE_LENGTH = "ratelimit.throttle.queue_length"


class Measured:
    """Metrics that a test controls."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.durations = Durations()

    async def names(self) -> Iterable[tuple[str, int]]:
        return sorted(self.numbers.items())

    def times(self) -> Collected:
        return {Series(REFERENCE_TIMES.name, ("ShouldRateLimit",)): self.durations.value}


class TcpListener:
    """A server that collects the lines of all connections."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        while line := await reader.readline():
            self.lines.put_nowait(line.decode().removesuffix("\n"))
        writer.close()

    async def stop(self) -> None:
        self._server.close()
        for writer in self.writers:
            writer.close()
        await asyncio.sleep(0)

    async def take(self, count: int) -> list[str]:
        async with asyncio.timeout(5):
            return [await self.lines.get() for _ in range(count)]


@pytest.fixture
async def listener() -> AsyncIterator[TcpListener]:
    listener = TcpListener()
    await listener.start()
    yield listener
    await listener.stop()


@pytest.fixture
def measured() -> Measured:
    return Measured()


@contextmanager
def udp_listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(5)
        yield listening


def lines(measured: Measured, style: StatsdFormat | None = None) -> Callable[[], list[str]]:
    """Return what would be sent now."""
    untold = statsd.DeltaTracker(style or StatsdFormat({}))

    def now() -> list[str]:
        found = list(untold.lines(sorted(measured.numbers.items()), statsd.timers(measured.times())))  # type: ignore[attr-defined]
        untold.mark_sent(found)
        return [line.text.decode().removesuffix("\n") for line in found]

    return now


def test_counters_are_sent_as_deltas_and_gauges_as_values(measured: Measured) -> None:
    now = lines(measured)
    measured.numbers = {HITS: 5, QUEUE_LENGTH: 2, "ratelimit.denial_cache.hits": 0}
    assert now() == [f"{HITS}:5|c", f"{QUEUE_LENGTH}:2|g"]
    assert now() == [f"{QUEUE_LENGTH}:2|g"]
    measured.numbers = {HITS: 12, QUEUE_LENGTH: 0, "ratelimit.denial_cache.hits": 1}
    assert now() == ["ratelimit.denial_cache.hits:1|c", f"{HITS}:7|c", f"{QUEUE_LENGTH}:0|g"]


def test_durations_are_sent_by_bucket(measured: Measured) -> None:
    now = lines(measured)
    measured.durations.observe(0.0009)
    for _ in range(3):
        measured.durations.observe(0.004)
    measured.durations.observe(3.0)
    measured.durations.observe(5.0)
    name = "ratelimit_server.ShouldRateLimit.response_time"
    one, three, two = now()
    assert one == f"{name}:0.75|ms"
    assert three == f"{name}:3.75|ms|@0.3333333333333333"
    value, rate = re.fullmatch(rf"{re.escape(name)}:([0-9.]+)\|ms\|@0.5", two), 2
    assert value is not None
    assert float(value[1]) * rate == pytest.approx(8000, rel=0.01)  # above the last bound
    assert now() == []
    measured.durations.observe(0.0009)
    assert now() == [f"{name}:0.75|ms"]


def test_sample_rates_are_exact_for_servers_that_round_down() -> None:
    for count in (*range(2, 1000), 12_345, 999_983, 10_000_019):
        rate = float(statsd._sample_rate(count).removeprefix("|@"))
        assert int(1 / rate) == count


def test_sent_durations_are_within_a_bucket_width() -> None:
    for low, high, middle in zip((0, *DURATIONS_S), DURATIONS_S, statsd._MIDDLES_MS, strict=False):
        assert low * 1000 < middle < high * 1000


def test_statsd_names_contain_extra_tags(measured: Measured) -> None:
    measured.numbers = {HITS: 1}
    style = StatsdFormat({"zone": "a.b:c|d", "commit": "1", "empty": ""})
    assert lines(measured, style)() == [f"{HITS}.__commit=1.__zone=a_b_c_d:1|c"]


def test_dogstatsd_lines_have_extra_tags(measured: Measured) -> None:
    measured.numbers = {HITS: 1, QUEUE_LENGTH: 3}
    measured.durations.observe(0.004, 4)
    assert lines(measured, DogStatsdFormat({"zone": "a", "commit": "1", "empty": ""}))() == [
        f"{HITS}:1|c|#commit:1,zone:a",
        f"{QUEUE_LENGTH}:3|g|#commit:1,zone:a",
        "ratelimit_server.ShouldRateLimit.response_time:3.75|ms|@0.25|#commit:1,zone:a",
    ]


def test_the_first_matching_mogrifier_renames_and_tags(measured: Measured) -> None:
    style = DogStatsdFormat(
        {"zone": "a"},
        [
            Mogrifier(
                re2.compile(r"^ratelimit\.service\.rate_limit\.([^.]+)\.(.+)\.([^.]+)$"), "rl.$3.$9", (("d", "$1"),)
            ),
            Mogrifier(re2.compile(r"hits|queue_length"), "other.$0", (("k", "v"),)),
        ],
    )
    measured.numbers = {HITS: 1, QUEUE_LENGTH: 2, "ratelimit.service.config_load_error": 1}
    assert lines(measured, style)() == [
        "ratelimit.service.config_load_error:1|c|#zone:a",
        "rl.total_hits.$9:1|c|#zone:a,d:d",
        "other.queue_length:2|g|#zone:a,k:v",
    ]


@pytest.mark.parametrize(
    "style",
    [StatsdFormat({}), DogStatsdFormat({"a": "b"}, [Mogrifier(re2.compile("(?s)d.(.*)"), "$1", (("t", "$1"),))])],
)
def test_client_data_cannot_break_out_of_a_line(measured: Measured, style: StatsdFormat) -> None:
    measured.numbers = {"ratelimit.service.rate_limit.d.k\nevil:9|c\r|#x:y,z.total_hits": 1}
    (line,) = lines(measured, style)()
    assert re.fullmatch(r"[^\n\r:|]+:1\|c(\|#a:b,t:[^\n\r|,#]+)?", line)


async def test_tcp_flushes_share_one_connection(listener: TcpListener, measured: Measured) -> None:
    sink = StatsdSink(
        TcpTransport("127.0.0.1", listener.port), StatsdFormat({}), measured.names, measured.times, interval_s=0.001
    )
    running = asyncio.create_task(sink.run())
    measured.numbers = {HITS: 5}
    assert await listener.take(1) == [f"{HITS}:5|c"]
    measured.numbers = {HITS: 6}
    assert await listener.take(1) == [f"{HITS}:1|c"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    measured.numbers = {HITS: 8}
    await sink.close()
    assert await listener.take(1) == [f"{HITS}:2|c"]
    assert listener.connections == 1
    assert sink.dropped_lines == 0


async def test_deltas_are_sent_when_the_server_is_back(listener: TcpListener, measured: Measured) -> None:
    wire = TcpTransport("127.0.0.1", listener.port)
    sink = StatsdSink(wire, StatsdFormat({}), measured.names, measured.times, interval_s=60)
    measured.numbers = {HITS: 1}
    await sink.flush()
    assert await listener.take(1) == [f"{HITS}:1|c"]
    await listener.stop()
    assert wire._streams is not None
    async with asyncio.timeout(5):
        while not wire._streams[0].at_eof():
            await asyncio.sleep(0)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            measured.numbers[HITS] += 10
            await sink.flush()
    assert [entry["event"] for entry in logs] == ["statsd_send_failed"]
    await listener.start()
    await sink.flush()
    assert await listener.take(1) == [f"{HITS}:30|c"]
    await sink.close()
    assert sink.dropped_lines == 0


@pytest.mark.slow
async def test_a_server_that_does_not_read_does_not_block(
    listener: TcpListener, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statsd_transport, "WRITE_S", 0.01)
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        wire = TcpTransport("127.0.0.1", silent.getsockname()[1])
        sink = StatsdSink(wire, StatsdFormat({}), measured.names, measured.times, interval_s=60)
        measured.numbers = {f"ratelimit.service.rate_limit.d.{'k' * 3000}{n}.total_hits": 1 for n in range(4000)}
        await sink.flush()
    assert 0 < sink.dropped_lines < 100  # one chunk; later ones were not attempted
    monkeypatch.undo()
    wire._address = ("127.0.0.1", listener.port)
    await sink.flush()
    assert len(await listener.take(1000)) == 1000
    await sink.close()


@pytest.mark.parametrize("wire", [TcpTransport, UdpTransport])
async def test_an_unresolvable_host_is_logged_once(
    measured: Measured, wire: type[TcpTransport] | type[UdpTransport]
) -> None:
    sink = StatsdSink(wire("a..b", 8125), StatsdFormat({}), measured.names, measured.times, interval_s=60)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            await sink.flush()
    assert [line["event"] for line in logs] == ["statsd_send_failed"]


async def test_datagrams_contain_as_many_whole_lines_as_fit(measured: Measured) -> None:
    with udp_listener() as listening:
        wire = UdpTransport("localhost", listening.getsockname()[1])
        sink = StatsdSink(wire, StatsdFormat({}), measured.names, measured.times, interval_s=60)
        measured.numbers = {f"ratelimit.service.rate_limit.d.key{n:03}.total_hits": n + 1 for n in range(100)}
        await sink.flush()
        datagrams: list[bytes] = []
        while sum(datagram.count(b"\n") for datagram in datagrams) < 100:
            datagrams.append(listening.recv(65_536))
        assert all(datagram.endswith(b"\n") for datagram in datagrams)
        assert max(map(len, datagrams)) <= statsd_transport.DATAGRAM_BYTES
        assert len(datagrams) == 1 + sum(map(len, datagrams)) // (statsd_transport.DATAGRAM_BYTES - 60)
        measured.numbers[HITS] = 1
        await sink.close()
        assert listening.recv(65_536) == f"{HITS}:1|c\n".encode()


async def test_an_unreachable_udp_server_is_not_an_error(measured: Measured) -> None:
    with udp_listener() as listening:
        port = listening.getsockname()[1]
    sink = StatsdSink(UdpTransport("127.0.0.1", port), StatsdFormat({}), measured.names, measured.times, interval_s=60)
    measured.numbers = {f"ratelimit.service.rate_limit.d.key{n}.total_hits": 1 for n in range(200)}
    for _ in range(3):
        await sink.flush()
    await sink.close()


async def test_an_unreachable_host_is_not_an_error(measured: Measured) -> None:
    sink = StatsdSink(
        UdpTransport("no-such-host.invalid", 8125), StatsdFormat({}), measured.names, measured.times, interval_s=60
    )
    await sink.flush()
    await sink.close()


async def test_each_worker_sends_the_gauges_of_all_workers(listener: TcpListener, measured: Measured) -> None:
    async def of_all() -> Iterable[tuple[str, int]]:
        return [(HITS, 100), (QUEUE_LENGTH, 7)]

    wire = TcpTransport("127.0.0.1", listener.port)
    sink = StatsdSink(wire, StatsdFormat({}), measured.names, measured.times, interval_s=60, gauges=of_all)
    measured.numbers = {HITS: 5, QUEUE_LENGTH: 2}
    await sink.flush()
    assert await listener.take(2) == [f"{HITS}:5|c", f"{QUEUE_LENGTH}:7|g"]
    await sink.close()


def test_the_sink_depends_on_the_settings(measured: Measured) -> None:
    def sink(**settings: object) -> StatsdSink | None:
        return new_statsd_sink(Settings(**settings), measured.names, measured.times)  # type: ignore[arg-type]

    assert sink() is None
    assert sink(use_prometheus=True) is None
    tcp, udp, dog = sink(use_statsd=True), sink(use_statsd=True, statsd_protocol="udp"), sink(use_dog_statsd=True)
    assert [type(one._transport) for one in (tcp, udp, dog) if one] == [TcpTransport, UdpTransport, UdpTransport]
    assert [type(one._deltas._style) for one in (tcp, udp, dog) if one] == [StatsdFormat, StatsdFormat, DogStatsdFormat]
    assert tcp is not None
    assert tcp._interval_s == 10


def test_every_bucket_has_a_middle() -> None:
    assert len(statsd._MIDDLES_MS) == len(DURATIONS_S) == len(Distribution(tuple(range(14)), 0.0).counts) - 1
