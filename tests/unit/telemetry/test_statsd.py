"""What statsd and DogStatsD are told, on real sockets, and what becomes of it when they are not there."""

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
from ratelimit_rls.telemetry import statsd, statsd_wire
from ratelimit_rls.telemetry.collected import Collected, Distribution, Durations, Series
from ratelimit_rls.telemetry.instruments import DURATIONS_S, REFERENCE_TIMES
from ratelimit_rls.telemetry.statsd import DogStyle, StatsdSink, Style, new_statsd_sink
from ratelimit_rls.telemetry.statsd_wire import TcpWire, UdpWire

HITS = "ratelimit.service.rate_limit.d.k.total_hits"
HELD = "ratelimit.throttle.held"


class Measured:
    """Numbers that a test changes, in place of those of a process."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.durations = Durations()

    async def names(self) -> Iterable[tuple[str, int]]:
        return sorted(self.numbers.items())

    def times(self) -> Collected:
        return {Series(REFERENCE_TIMES.name, ("ShouldRateLimit",)): self.durations.value}


class TcpListener:
    """Every line that came, whichever connection it came on."""

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


def lines(measured: Measured, style: Style | None = None) -> Callable[[], list[str]]:
    """What would be sent now."""
    untold = statsd.Untold(style or Style({}))

    def now() -> list[str]:
        found = list(untold.lines(sorted(measured.numbers.items()), statsd.timers(measured.times())))
        untold.tell(found)
        return [line.text.decode().removesuffix("\n") for line in found]

    return now


def test_counters_are_told_by_how_much_they_grew_and_gauges_as_they_are(measured: Measured) -> None:
    now = lines(measured)
    measured.numbers = {HITS: 5, HELD: 2, "ratelimit.denials.answered": 0}
    assert now() == [f"{HITS}:5|c", f"{HELD}:2|g"]
    assert now() == [f"{HELD}:2|g"]
    measured.numbers = {HITS: 12, HELD: 0, "ratelimit.denials.answered": 1}
    assert now() == ["ratelimit.denials.answered:1|c", f"{HITS}:7|c", f"{HELD}:0|g"]


def test_times_are_told_by_the_bucket(measured: Measured) -> None:
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
    assert float(value[1]) * rate == pytest.approx(8000, rel=0.01)  # of which no bound says how much it is
    assert now() == []
    measured.durations.observe(0.0009)
    assert now() == [f"{name}:0.75|ms"]


def test_a_server_that_rounds_down_counts_as_many_as_there_were() -> None:
    for count in (*range(2, 1000), 12_345, 999_983, 10_000_019):
        rate = float(statsd._sample_rate(count).removeprefix("|@"))
        assert int(1 / rate) == count


def test_every_duration_is_nearer_to_what_is_told_than_its_bucket_is_wide() -> None:
    for low, high, middle in zip((0, *DURATIONS_S), DURATIONS_S, statsd._MIDDLES_MS, strict=False):
        assert low * 1000 < middle < high * 1000


def test_extra_tags_are_in_the_names_of_statsd(measured: Measured) -> None:
    measured.numbers = {HITS: 1}
    style = Style({"zone": "a.b:c|d", "commit": "1", "empty": ""})
    assert lines(measured, style)() == [f"{HITS}.__commit=1.__zone=a_b_c_d:1|c"]


def test_extra_tags_are_tags_of_dogstatsd(measured: Measured) -> None:
    measured.numbers = {HITS: 1, HELD: 3}
    measured.durations.observe(0.004, 4)
    assert lines(measured, DogStyle({"zone": "a", "commit": "1", "empty": ""}))() == [
        f"{HITS}:1|c|#commit:1,zone:a",
        f"{HELD}:3|g|#commit:1,zone:a",
        "ratelimit_server.ShouldRateLimit.response_time:3.75|ms|@0.25|#commit:1,zone:a",
    ]


def test_the_first_mogrifier_that_meets_a_name_renames_and_tags_it(measured: Measured) -> None:
    style = DogStyle(
        {"zone": "a"},
        [
            Mogrifier(
                re2.compile(r"^ratelimit\.service\.rate_limit\.([^.]+)\.(.+)\.([^.]+)$"), "rl.$3.$9", (("d", "$1"),)
            ),
            Mogrifier(re2.compile(r"hits|held"), "other.$0", (("k", "v"),)),
        ],
    )
    measured.numbers = {HITS: 1, HELD: 2, "ratelimit.service.config_load_error": 1}
    assert lines(measured, style)() == [
        "ratelimit.service.config_load_error:1|c|#zone:a",
        "rl.total_hits.$9:1|c|#zone:a,d:d",
        "other.held:2|g|#zone:a,k:v",
    ]


@pytest.mark.parametrize(
    "style", [Style({}), DogStyle({"a": "b"}, [Mogrifier(re2.compile("(?s)d.(.*)"), "$1", (("t", "$1"),))])]
)
def test_what_a_client_sent_stays_inside_its_line(measured: Measured, style: Style) -> None:
    measured.numbers = {"ratelimit.service.rate_limit.d.k\nevil:9|c\r|#x:y,z.total_hits": 1}
    (line,) = lines(measured, style)()
    assert re.fullmatch(r"[^\n\r:|]+:1\|c(\|#a:b,t:[^\n\r|,#]+)?", line)


async def test_a_server_on_tcp_is_told_again_and_again_on_one_connection(
    listener: TcpListener, measured: Measured
) -> None:
    sink = StatsdSink(TcpWire("127.0.0.1", listener.port), Style({}), measured.names, measured.times, interval_s=0.001)
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


async def test_what_happens_while_the_server_is_away_is_told_when_it_is_back(
    listener: TcpListener, measured: Measured
) -> None:
    wire = TcpWire("127.0.0.1", listener.port)
    sink = StatsdSink(wire, Style({}), measured.names, measured.times, interval_s=60)
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
    assert [entry["event"] for entry in logs] == ["statsd cannot be reached"]
    await listener.start()
    await sink.flush()
    assert await listener.take(1) == [f"{HITS}:30|c"]
    await sink.close()
    assert sink.dropped_lines == 0


@pytest.mark.slow
async def test_a_server_that_does_not_read_is_not_waited_for(
    listener: TcpListener, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statsd_wire, "WRITE_S", 0.01)
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        wire = TcpWire("127.0.0.1", silent.getsockname()[1])
        sink = StatsdSink(wire, Style({}), measured.names, measured.times, interval_s=60)
        measured.numbers = {f"ratelimit.service.rate_limit.d.{'k' * 3000}{n}.total_hits": 1 for n in range(4000)}
        await sink.flush()
    assert 0 < sink.dropped_lines < 100  # one chunk; what came after it was not even tried
    monkeypatch.undo()
    wire._address = ("127.0.0.1", listener.port)
    await sink.flush()
    assert len(await listener.take(1000)) == 1000
    await sink.close()


@pytest.mark.parametrize("wire", [TcpWire, UdpWire])
async def test_a_host_that_cannot_be_looked_up_is_said_once(
    measured: Measured, wire: type[TcpWire] | type[UdpWire]
) -> None:
    sink = StatsdSink(wire("a..b", 8125), Style({}), measured.names, measured.times, interval_s=60)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            await sink.flush()
    assert [line["event"] for line in logs] == ["statsd cannot be reached"]


async def test_datagrams_hold_whole_lines_and_as_many_as_fit(measured: Measured) -> None:
    with udp_listener() as listening:
        wire = UdpWire("localhost", listening.getsockname()[1])
        sink = StatsdSink(wire, Style({}), measured.names, measured.times, interval_s=60)
        measured.numbers = {f"ratelimit.service.rate_limit.d.key{n:03}.total_hits": n + 1 for n in range(100)}
        await sink.flush()
        datagrams = []
        while sum(datagram.count(b"\n") for datagram in datagrams) < 100:
            datagrams.append(listening.recv(65_536))
        assert all(datagram.endswith(b"\n") for datagram in datagrams)
        assert max(map(len, datagrams)) <= statsd_wire.DATAGRAM_BYTES
        assert len(datagrams) == 1 + sum(map(len, datagrams)) // (statsd_wire.DATAGRAM_BYTES - 60)
        measured.numbers[HITS] = 1
        await sink.close()
        assert listening.recv(65_536) == f"{HITS}:1|c\n".encode()


async def test_nobody_at_the_other_end_of_a_datagram_is_no_error(measured: Measured) -> None:
    with udp_listener() as listening:
        port = listening.getsockname()[1]
    sink = StatsdSink(UdpWire("127.0.0.1", port), Style({}), measured.names, measured.times, interval_s=60)
    measured.numbers = {f"ratelimit.service.rate_limit.d.key{n}.total_hits": 1 for n in range(200)}
    for _ in range(3):
        await sink.flush()
    await sink.close()


async def test_a_host_that_is_not_there_is_no_error(measured: Measured) -> None:
    sink = StatsdSink(UdpWire("no-such-host.invalid", 8125), Style({}), measured.names, measured.times, interval_s=60)
    await sink.flush()
    await sink.close()


async def test_of_several_workers_each_tells_the_gauges_of_all(listener: TcpListener, measured: Measured) -> None:
    async def of_all() -> Iterable[tuple[str, int]]:
        return [(HITS, 100), (HELD, 7)]

    wire = TcpWire("127.0.0.1", listener.port)
    sink = StatsdSink(wire, Style({}), measured.names, measured.times, interval_s=60, gauges=of_all)
    measured.numbers = {HITS: 5, HELD: 2}
    await sink.flush()
    assert await listener.take(2) == [f"{HITS}:5|c", f"{HELD}:7|g"]
    await sink.close()


def test_settings_say_which(measured: Measured) -> None:
    def sink(**settings: object) -> StatsdSink | None:
        return new_statsd_sink(Settings(**settings), measured.names, measured.times)  # type: ignore[arg-type]

    assert sink() is None
    assert sink(use_prometheus=True) is None
    tcp, udp, dog = sink(use_statsd=True), sink(use_statsd=True, statsd_protocol="udp"), sink(use_dog_statsd=True)
    assert [type(one._wire) for one in (tcp, udp, dog) if one] == [TcpWire, UdpWire, UdpWire]
    assert [type(one._untold._style) for one in (tcp, udp, dog) if one] == [Style, Style, DogStyle]
    assert tcp is not None
    assert tcp._interval_s == 10


def test_distributions_have_a_middle_for_every_bound() -> None:
    assert len(statsd._MIDDLES_MS) == len(DURATIONS_S) == len(Distribution(tuple(range(14)), 0.0).counts) - 1
