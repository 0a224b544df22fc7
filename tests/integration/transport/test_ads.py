"""The ADS client against a real server: what it is told, what it takes over, and how it bears the loss of either."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from ratelimit_rls.rules.loader import RulesLoader
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.telemetry.collect import collect, series
from ratelimit_rls.telemetry.instruments import XDS_CONNECTED
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc import ads, ads_stream, ads_tls
from ratelimit_rls.transport.grpc.ads import TYPE_URL, AdsNode, AdsRules
from ratelimit_rls.transport.grpc.ads_pauses import Pauses
from ratelimit_rls.transport.grpc.ads_stream import AdsServer as Where
from ratelimit_rls.transport.grpc.ads_tls import AdsTlsFiles
from ratelimit_rls.transport.grpc.messages import DiscoveryRequest, RateLimitConfig
from tests.ads_server import AdsServer, config, resource
from tests.certificates import Authority
from tests.integration.transport.conftest import eventually
from tests.process import free_port

GOOD = config("{name: a, domain: good, descriptors: [{key: k, rate_limit: {unit: DAY, requests_per_unit: 1}}]}")
BETTER = config("{name: a, domain: better, descriptors: [{key: k, rate_limit: {unit: WEEK, requests_per_unit: 2}}]}")
BAD = config("{name: a, domain: bad, descriptors: [{key: k, value: v, rate_limit: {requests_per_unit: 3}}]}")

_ODD = RateLimitConfig(domain="d")
_ODD.descriptors.add(key="k").metadata.update({"n": float("nan")})
NOT_A_NUMBER = resource(_ODD.SerializeToString())

NEVER_S = 1000.0


@pytest.fixture
def server() -> Iterator[AdsServer]:
    with AdsServer() as server:
        yield server


@dataclass
class Following:
    """A loader that follows a management server, as a process has it."""

    where: Where
    pause_s: float = 0.01
    longest_s: float = 0.0
    eager_s: float = NEVER_S
    rules: Rules = field(default_factory=Rules)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        pauses = Pauses(self.pause_s, max(self.pause_s, self.longest_s), jitter=False)
        node = AdsNode("envoy-ratelimit", {"zone": "b"})
        source = AdsRules(self.where, node, self.rules, pauses, self.eager_s)
        self.loader = RulesLoader(source, self.rules, self.metrics, explain=source.explain)
        self.metrics.measure(source.measured)

    @property
    def domains(self) -> set[str]:
        return set(self.rules.current.tree.domains) if self.rules.current else set()

    @property
    def connected(self) -> object:
        return collect(self.metrics)[series(XDS_CONNECTED)]

    @property
    def loads(self) -> tuple[int, int]:
        return self.metrics.service.config_load_success, self.metrics.service.config_load_error


@contextlib.asynccontextmanager
async def following(where: Where, **more: Any) -> AsyncIterator[Following]:
    one = Following(where, **more)
    watching = asyncio.create_task(one.loader.watch())
    try:
        yield one
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def told(server: AdsServer, nonce: str) -> Any:
    return await asyncio.to_thread(server.answer_to, nonce)


async def test_it_says_who_it_is_and_asks_for_everything(server: AdsServer) -> None:
    headers = (("authorization", "hush"), ("x-trace-bin", b"\x01"))
    async with following(Where(server.address, headers=headers)):
        stream = await asyncio.to_thread(server.wait_for_streams, 1)

        (request,) = stream.requests
        assert request.type_url == TYPE_URL
        assert (request.version_info, request.response_nonce, request.resource_names) == ("", "", [])
        assert request.error_detail is None
        assert request.node is not None
        assert request.node.id == "envoy-ratelimit"
        assert request.node.metadata is not None
        assert request.node.metadata.to_dict() == {"zone": "b"}
        assert stream.metadata["authorization"] == "hush"
        assert stream.metadata["x-trace-bin"] == b"\x01"


async def test_a_response_is_in_force_when_it_is_acknowledged_and_replaces_all(server: AdsServer) -> None:
    async with following(Where(server.address)) as one:
        nonce = server.send("1", GOOD, config("{name: b, domain: other}"))
        ack = await told(server, nonce)
        assert (ack.version_info, ack.error_detail, ack.type_url) == ("1", None, TYPE_URL)
        assert one.domains == {"good", "other"}

        ack = await told(server, server.send("2", BETTER))
        assert ack.version_info == "2"
        assert one.domains == {"better"}

        ack = await told(server, server.send("3"))
        assert (ack.version_info, ack.error_detail) == ("3", None)
        assert one.rules.current is not None
        assert one.domains == set()
        assert one.loads == (3, 0)


async def test_the_same_rules_under_another_version_are_acknowledged_and_not_loaded_again(server: AdsServer) -> None:
    async with following(Where(server.address)) as one:
        await told(server, server.send("1", GOOD, config("{name: b, domain: other}")))

        ack = await told(server, server.send("2", config("{name: b, domain: other}"), GOOD))

        assert (ack.version_info, ack.error_detail) == ("2", None)
        assert one.loads == (1, 0)


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ([BAD], "a:2:51: error: invalid rate limit unit 'UNKNOWN'"),
        ([GOOD, config("{name: b, domain: good}")], "b:1:12: error: duplicate domain 'good' in config file"),
        ([GOOD, resource(b"\xff\xff")], "resources[1]:1:1: error: its bytes are not a ratelimit.config"),
        (
            [resource(b"", "type.googleapis.com/envoy.config.cluster.v3.Cluster")],
            "it is of type 'type.googleapis.com/e",
        ),
        ([NOT_A_NUMBER], "resources[0]:1:1: error: error parsing metadata"),
        ([config("{domain: ''}", name="two\nlines")], r"two\nlines:1:12: error: config file cannot have empty domain"),
    ],
)
async def test_what_cannot_be_used_is_refused_and_the_last_good_rules_stay(
    server: AdsServer, resources: list[Any], why: str
) -> None:
    async with following(Where(server.address)) as one:
        await told(server, server.send("1", GOOD))

        answer = await told(server, server.send("2", *resources))

        assert answer.error_detail is not None
        assert why in answer.error_detail.message
        assert answer.error_detail.code == 3
        assert answer.version_info == "1"
        assert one.domains == {"good"}
        assert one.loads == (1, 1)
        assert why in str(one.rules.last_error)

        ack = await told(server, server.send("3", BETTER))
        assert (ack.version_info, ack.error_detail) == ("3", None)
        assert one.domains == {"better"}
        assert one.rules.last_error is None


async def test_a_refusal_names_the_descriptor(server: AdsServer) -> None:
    async with following(Where(server.address)):
        nack = await told(server, server.send("1", BAD))
        assert nack.error_detail is not None
        assert nack.error_detail.message.endswith("(in bad.k_v)")
        assert nack.version_info == ""


async def test_a_long_refusal_is_cut(server: AdsServer) -> None:
    many = [config(f"{{name: n{at}, domain: d{at}, descriptors: [{{rate_limit: {{}}}}]}}") for at in range(40)]
    async with following(Where(server.address)):
        nack = await told(server, server.send("1", *many))
        assert nack.error_detail is not None
        assert len(nack.error_detail.message) == ads.LONGEST_REFUSAL + 1


async def test_a_response_of_another_type_is_refused(server: AdsServer) -> None:
    async with following(Where(server.address)) as one:
        nack = await told(server, server.send("1", type_url="type.googleapis.com/envoy.config.listener.v3.Listener"))
        assert nack.error_detail is not None
        assert "Listener'; type.googleapis.com/ratelimit" in nack.error_detail.message
        assert one.rules.current is None


@pytest.mark.parametrize("code", [None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_new_stream_says_what_is_in_force_not_what_was_refused(
    server: AdsServer, code: grpc.StatusCode | None
) -> None:
    async with following(Where(server.address)) as one:
        await told(server, server.send("1", GOOD))
        await told(server, server.send("2", BAD))

        with capture_logs() as logs:
            server.end_streams(code)
            stream = await asyncio.to_thread(server.wait_for_streams, 2)

        assert (stream.requests[0].version_info, stream.requests[0].response_nonce) == ("1", "")
        assert one.domains == {"good"}
        (lost,) = (line for line in logs if line["log_level"] == "warning" and "no connection" in line["event"])
        assert lost["error"] == (f"{code.name}: as the test wants it" if code else "the server ended the stream")


async def test_a_server_that_counts_its_versions_anew_is_asked_once_more(
    server: AdsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ads, "SILENCE_S", 0.01)
    async with following(Where(server.address)) as one:
        await told(server, server.send("1", GOOD))
        server.stop()
        server.send("1", BETTER)
        server.start()

        await eventually(lambda: one.domains == {"better"})

        second = server.streams[1].requests
        assert [(request.version_info, request.response_nonce) for request in second[:2]] == [("1", ""), ("", "")]


async def test_whether_there_is_a_stream_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ads, "SILENCE_S", 0.01)
    with AdsServer() as server:
        where = Where(server.address)
        async with following(where, pause_s=NEVER_S) as one:
            assert one.connected == 0
            await eventually(lambda: one.connected == 1)
            await asyncio.to_thread(server.stop)
            await eventually(lambda: one.connected == 0)


async def test_a_server_that_sends_at_once_is_connected_at_once(server: AdsServer) -> None:
    server.send("1", GOOD)
    with capture_logs() as logs:
        async with following(Where(server.address)) as one:
            await eventually(lambda: one.domains == {"good"})
            assert one.connected == 1
            await told(server, server.send("2", BETTER))
    assert [line["event"] for line in logs].count("connected to xDS") == 1


async def test_a_server_with_nothing_to_send_is_connected_and_asked_once(
    server: AdsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ads, "SILENCE_S", 0.01)
    async with following(Where(server.address)) as one:
        await eventually(lambda: one.connected == 1)
        await told(server, server.send("1", GOOD))
    assert [request.version_info for request in server.streams[0].requests] == ["", "1"]


async def test_somebody_else_who_speaks_http2_is_no_connection() -> None:
    stranger = grpc.server(ThreadPoolExecutor(1))
    port = stranger.add_insecure_port("127.0.0.1:0")
    stranger.start()
    try:
        with capture_logs() as logs:
            async with following(Where(f"127.0.0.1:{port}")) as one:
                await eventually(lambda: sum("no connection" in line["event"] for line in logs) > 1)
                assert one.connected == 0
        assert not any("connected" in line["event"] for line in logs)
    finally:
        stranger.stop(0).wait()


async def test_two_streams_never_share_a_connection() -> None:
    accepted: list[asyncio.StreamWriter] = []
    listening = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    where = Where(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    channels = [where.channel(), where.channel()]
    try:
        for channel in channels:
            channel.get_state(try_to_connect=True)
        await eventually(lambda: len(accepted) == 2)
        assert len({writer.get_extra_info("peername") for writer in accepted}) == 2
    finally:
        for writer in accepted:
            writer.transport.abort()
        listening.close()
        for channel in channels:
            await channel.close()


async def test_a_server_that_comes_late_is_found() -> None:
    server = AdsServer()
    with capture_logs() as logs:
        async with following(Where(server.address)) as one:
            await eventually(lambda: any("Connection refused" in line.get("error", "") for line in logs))
            assert one.rules.current is None
            assert not any("connected" in line["event"] for line in logs)
            with server:
                server.send("1", GOOD)
                await eventually(lambda: one.domains == {"good"})


async def test_pauses_are_short_until_the_first_rules_have_come(server: AdsServer) -> None:
    async with following(Where(server.address), pause_s=NEVER_S, eager_s=0.01) as one:
        for number in (1, 2):
            await asyncio.to_thread(server.wait_for_streams, number)
            server.end_streams()
        await asyncio.to_thread(server.wait_for_streams, 3)
        await told(server, server.send("1", GOOD))
        with capture_logs() as logs:
            server.end_streams()
            await eventually(lambda: bool(logs))
        assert logs[0]["next_attempt_s"] == NEVER_S
        assert one.domains == {"good"}


@pytest.mark.slow
async def test_pauses_grow_until_a_stream_delivers_something(server: AdsServer) -> None:
    with capture_logs() as logs:
        async with following(Where(server.address), pause_s=0.1, longest_s=NEVER_S):
            for number in (1, 2):
                await asyncio.to_thread(server.wait_for_streams, number)
                server.end_streams()
            await asyncio.to_thread(server.wait_for_streams, 3)
            await told(server, server.send("1", GOOD))
            server.end_streams()
            await asyncio.to_thread(server.wait_for_streams, 4)
    assert [line["next_attempt_s"] for line in logs if "next_attempt_s" in line] == [0.1, 0.2, 0.1]


async def test_a_response_that_is_too_large_is_not_taken(server: AdsServer) -> None:
    large = config("{name: a, domain: d}", descriptors=[{"key": "k" * 10_000}])
    with capture_logs() as logs:
        async with following(Where(server.address, most_bytes=5000)) as one:
            server.send("1", large)
            await eventually(lambda: any("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES" in line.get("error", "") for line in logs))
            assert one.rules.current is None


async def test_sighup_is_harmless(server: AdsServer) -> None:
    async with following(Where(server.address)) as one:
        await asyncio.to_thread(server.wait_for_streams, 1)
        assert not await one.loader.reload()
        assert (one.loads, one.rules.last_error, one.loader.has_tried.is_set()) == ((0, 0), None, False)

        await told(server, server.send("1", GOOD))
        assert await one.loader.reload()
        assert one.loads == (1, 0)
        assert one.loader.has_tried.is_set()


async def test_secrets_are_not_in_the_logs(server: AdsServer) -> None:
    where = Where(server.address, headers=(("authorization", "as the test"),))
    with capture_logs() as logs:
        async with following(where):
            await asyncio.to_thread(server.wait_for_streams, 1)
            server.end_streams(grpc.StatusCode.PERMISSION_DENIED)
            await asyncio.to_thread(server.wait_for_streams, 2)
    assert "PERMISSION_DENIED: *** wants it" in str(logs)
    assert "as the test" not in f"{logs} {where} {where!r}"


@pytest.mark.parametrize(
    ("header", "said", "logged"),
    [
        ("Bearer s3cr3t-token", "invalid token 's3cr3t-token'", "invalid token '***'"),
        ("Bearer s3cr3t-token", "no: BEARER S3CR3T-TOKEN", "no: ***"),
        ('Token token="abcd:efgh"', "it was abcd, it was efgh", "it was ***, it was ***"),
        ("Basic YQ==", "no such YQ==", "no such ***"),
        ("a+b(c", "no a+b(c", "no ***"),
        ("an of", "one of an of us", "one of *** us"),
        (b"h\xffush", "hush", "hush"),
        ("", "nothing", "nothing"),
    ],
)
def test_what_a_server_repeats_of_a_secret_is_left_out(header: str | bytes, said: str, logged: str) -> None:
    assert Where("x:1", headers=(("authorization", header),)).without_secrets(said) == logged


@pytest.mark.slow
async def test_a_server_that_falls_silent_is_noticed(server: AdsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ads_stream, "PONG_WITHIN_S", 0.3)
    async with relay(server.port) as (port, freeze), following(Where(f"127.0.0.1:{port}", ping_every_s=1)) as one:
        await told(server, server.send("1", GOOD))
        freeze()
        with capture_logs() as logs:
            await eventually(lambda: any("no connection" in line["event"] for line in logs))
        assert one.domains == {"good"}


@contextlib.asynccontextmanager
async def relay(to: int) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """A port that passes everything on until it is frozen: then nothing more, and nobody is told."""
    flowing = asyncio.Event()
    flowing.set()
    tasks: set[asyncio.Task[None]] = set()
    ends: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await flowing.wait()
            writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)
        ends.extend((writer, back))
        tasks.update(map(asyncio.ensure_future, (pass_on(reader, back), pass_on(there, writer))))

    listening = await asyncio.start_server(accept, "127.0.0.1", free_port())
    try:
        yield listening.sockets[0].getsockname()[1], flowing.clear
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            end.transport.abort()


SERVER, CLIENT = "xds.test", "rls.test"


@dataclass
class Pki:
    """The files of a mounted secret, and the server's own."""

    directory: Path
    authority: Authority

    @classmethod
    def new(cls, directory: Path) -> Pki:
        pki = cls(directory, Authority(directory / "first"))
        pki.write()
        return pki

    @property
    def files(self) -> AdsTlsFiles:
        return AdsTlsFiles(*(str(self.directory / name) for name in ("ca.crt", "tls.crt", "tls.key")))

    @property
    def of_server(self) -> tuple[bytes, bytes, bytes]:
        chain, key = self.authority.issue(SERVER)
        return key.read_bytes(), chain.read_bytes(), self.authority.ca_path.read_bytes()

    def write(self) -> None:
        """New certificates of the authority there is."""
        chain, key = self.authority.issue(CLIENT)
        for name, source in (("ca.crt", self.authority.ca_path), ("tls.crt", chain), ("tls.key", key)):
            (self.directory / f"{name}.new").write_bytes(source.read_bytes())
            (self.directory / f"{name}.new").rename(self.directory / name)

    def rotate(self) -> None:
        """Everything, the authority included."""
        self.authority = Authority(self.directory / "second", "another CA")
        self.write()


@pytest.fixture
def pki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pki:
    monkeypatch.setattr(ads_tls, "LOOK_EVERY_S", 0.02)
    return Pki.new(tmp_path)


async def test_mutual_tls_with_a_name_of_our_choice(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server:
        server.send("1", GOOD)
        async with following(Where(server.address, pki.files, SERVER)) as one:
            await eventually(lambda: one.domains == {"good"})
            assert (one.connected, one.loads) == (1, (1, 0))


async def test_a_server_by_another_name_is_not_trusted(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server, capture_logs() as logs:
        server.send("1", GOOD)
        async with following(Where(server.address, pki.files)) as one:
            await eventually(lambda: any("no connection" in line["event"] for line in logs))
            assert one.rules.current is None
            assert not any("connected" in line["event"] for line in logs)


async def test_changed_certificates_lead_to_a_new_connection_and_bad_ones_to_a_line(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server:
        async with following(Where(server.address, pki.files, SERVER), pause_s=NEVER_S) as one:
            await told(server, server.send("1", GOOD))
            pki.write()
            stream = await asyncio.to_thread(server.wait_for_streams, 2)
            assert stream.requests[0].version_info == "1"

            with capture_logs() as logs:
                (pki.directory / "tls.crt").write_text("nonsense")
                await eventually(lambda: bool(logs))
            assert "CONFIG_GRPC_XDS_CLIENT_TLS_CERT=" in logs[0]["error"]
            ack = await told(server, server.send("2", BETTER))
            assert ack.version_info == "2"
            assert one.domains == {"better"}
            assert len(server.streams) == 2


async def test_a_response_that_came_before_the_files_changed_is_not_lost(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server:
        server.send("1", GOOD)
        where = Where(server.address, pki.files, SERVER)
        async with ads_stream.open_stream(where, where.file_states()) as stream:
            await stream.send(DiscoveryRequest(type_url=TYPE_URL))
            assert await stream.is_answered()
            pki.write()
            changing = stream._changing
            assert changing is not None
            await asyncio.wait([changing])

            assert (await stream.receive()).version_info == "1"
            with pytest.raises(ads_stream.FilesChanged):
                await stream.receive()


class LookedAt(AdsTlsFiles):
    """Counts the looks."""

    looks = 0

    def state(self) -> ads_tls.FileStates:
        LookedAt.looks += 1
        return super().state()


async def test_bad_files_are_told_of_once_and_good_ones_after_them_are_taken(pki: Pki) -> None:
    files = LookedAt(pki.files.ca, pki.files.certificate, pki.files.key)
    seen = files.state()
    changing = asyncio.create_task(files.until_changed(seen))
    with capture_logs() as logs:
        (pki.directory / "tls.crt").write_text("nonsense")
        await eventually(lambda: bool(logs))
        enough = LookedAt.looks + 3
        await eventually(lambda: LookedAt.looks >= enough)
    assert len(logs) == 1
    pki.write()
    await asyncio.wait_for(changing, 10)


async def test_an_authority_that_is_replaced_on_both_sides_is_followed_without_waiting(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server:
        async with following(Where(server.address, pki.files, SERVER), pause_s=NEVER_S) as one:
            await told(server, server.send("1", GOOD))
            server.stop()
            pki.rotate()
            server.certificates = pki.of_server
            server.start()
            await told(server, server.send("2", BETTER))
            assert one.domains == {"better"}


async def test_files_that_come_later_are_waited_for(pki: Pki) -> None:
    (pki.directory / "tls.key").rename(pki.directory / "later")
    with AdsServer(pki.of_server) as server, capture_logs() as logs:
        server.send("1", GOOD)
        async with following(Where(server.address, pki.files, SERVER), pause_s=NEVER_S) as one:
            await eventually(lambda: any("tls.key: No such file" in line.get("error", "") for line in logs))
            assert (one.connected, one.loads) == (0, (0, 0))
            (pki.directory / "later").rename(pki.directory / "tls.key")
            await eventually(lambda: one.domains == {"good"})
            assert (one.connected, one.loads) == (1, (1, 0))
