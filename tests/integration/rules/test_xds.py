"""The ADS client against a real server: requests, ACK and NACK, reconnection and TLS."""

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

from ratelimit_rls.common.backoff import Backoff
from ratelimit_rls.protos.messages import DiscoveryRequest, RateLimitConfig
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.reloader import RulesReloader
from ratelimit_rls.rules.sources.xds import client, tls
from ratelimit_rls.rules.sources.xds import stream as ads_stream
from ratelimit_rls.rules.sources.xds.client import TYPE_URL, AdsNode, AdsRulesSource
from ratelimit_rls.rules.sources.xds.stream import AdsServer as Target
from ratelimit_rls.rules.sources.xds.tls import AdsTlsFiles
from ratelimit_rls.telemetry.collector import collect, series
from ratelimit_rls.telemetry.instruments import XDS_CONNECTED
from ratelimit_rls.telemetry.metrics import Metrics
from tests.integration.transport.conftest import eventually
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.xds_server import AdsServer, config, resource

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
class FollowingReloader:
    """A reloader that follows a management server, as in the service."""

    target: Target
    pause_s: float = 0.01
    longest_s: float = 0.0
    max_initial_delay_s: float = NEVER_S
    rules: ActiveRules = field(default_factory=ActiveRules)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        pauses = Backoff(self.pause_s, max(self.pause_s, self.longest_s), min_s=0.1)
        node = AdsNode("envoy-ratelimit", {"zone": "b"})
        source = AdsRulesSource(self.target, node, self.rules, pauses, self.max_initial_delay_s)
        self.loader = RulesReloader(source, self.rules, self.metrics, explain=source.explain)
        self.metrics.export_series(source.measured)

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
async def following(target: Target, **more: Any) -> AsyncIterator[FollowingReloader]:
    one = FollowingReloader(target, **more)
    watching = asyncio.create_task(one.loader.watch())
    try:
        yield one
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def response_to(server: AdsServer, nonce: str) -> Any:
    return await asyncio.to_thread(server.answer_to, nonce)


async def test_initial_request_has_node_and_empty_version(server: AdsServer) -> None:
    headers = (("authorization", "hush"), ("x-trace-bin", b"\x01"))
    async with following(Target(server.address, headers=headers)):
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


async def test_ack_follows_activation_and_replaces_all_rules(server: AdsServer) -> None:
    async with following(Target(server.address)) as one:
        nonce = server.send("1", GOOD, config("{name: b, domain: other}"))
        ack = await response_to(server, nonce)
        assert (ack.version_info, ack.error_detail, ack.type_url) == ("1", None, TYPE_URL)
        assert one.domains == {"good", "other"}

        ack = await response_to(server, server.send("2", BETTER))
        assert ack.version_info == "2"
        assert one.domains == {"better"}

        ack = await response_to(server, server.send("3"))
        assert (ack.version_info, ack.error_detail) == ("3", None)
        assert one.rules.current is not None
        assert one.domains == set()
        assert one.loads == (3, 0)


async def test_unchanged_rules_are_acked_without_reloading(server: AdsServer) -> None:
    async with following(Target(server.address)) as one:
        await response_to(server, server.send("1", GOOD, config("{name: b, domain: other}")))

        ack = await response_to(server, server.send("2", config("{name: b, domain: other}"), GOOD))

        assert (ack.version_info, ack.error_detail) == ("2", None)
        assert one.loads == (1, 0)


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ([BAD], "a:2:51: error: invalid rate limit unit 'UNKNOWN'"),
        ([GOOD, config("{name: b, domain: good}")], "b:1:12: error: duplicate domain 'good' in config file"),
        ([GOOD, resource(b"\xff\xff")], "resources[1]:1:1: error: the bytes are not a ratelimit.config"),
        (
            [resource(b"", "type.googleapis.com/envoy.config.cluster.v3.Cluster")],
            "type 'type.googleapis.com/e",
        ),
        ([NOT_A_NUMBER], "resources[0]:1:1: error: error parsing metadata"),
        ([config("{domain: ''}", name="two\nlines")], r"two\nlines:1:12: error: config file cannot have empty domain"),
    ],
)
async def test_invalid_response_is_nacked_and_active_rules_stay(
    server: AdsServer, resources: list[Any], reason: str
) -> None:
    async with following(Target(server.address)) as one:
        await response_to(server, server.send("1", GOOD))

        answer = await response_to(server, server.send("2", *resources))

        assert answer.error_detail is not None
        assert reason in answer.error_detail.message
        assert answer.error_detail.code == 3
        assert answer.version_info == "1"
        assert one.domains == {"good"}
        assert one.loads == (1, 1)
        assert reason in str(one.rules.last_error)

        ack = await response_to(server, server.send("3", BETTER))
        assert (ack.version_info, ack.error_detail) == ("3", None)
        assert one.domains == {"better"}
        assert one.rules.last_error is None


async def test_nack_names_the_descriptor(server: AdsServer) -> None:
    async with following(Target(server.address)):
        nack = await response_to(server, server.send("1", BAD))
        assert nack.error_detail is not None
        assert nack.error_detail.message.endswith("(in bad.k_v)")
        assert nack.version_info == ""


async def test_long_nack_is_truncated(server: AdsServer) -> None:
    many = [config(f"{{name: n{at}, domain: d{at}, descriptors: [{{rate_limit: {{}}}}]}}") for at in range(40)]
    async with following(Target(server.address)):
        nack = await response_to(server, server.send("1", *many))
        assert nack.error_detail is not None
        assert len(nack.error_detail.message) == client.MAX_NACK_LENGTH + 1


async def test_response_of_another_type_is_nacked(server: AdsServer) -> None:
    async with following(Target(server.address)) as one:
        nack = await response_to(
            server, server.send("1", type_url="type.googleapis.com/envoy.config.listener.v3.Listener")
        )
        assert nack.error_detail is not None
        assert "Listener'; expected type.googleapis.com/ratelimit" in nack.error_detail.message
        assert one.rules.current is None


@pytest.mark.parametrize("code", [None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_new_stream_sends_the_accepted_version(server: AdsServer, code: grpc.StatusCode | None) -> None:
    async with following(Target(server.address)) as one:
        await response_to(server, server.send("1", GOOD))
        await response_to(server, server.send("2", BAD))

        with capture_logs() as logs:
            server.end_streams(code)
            stream = await asyncio.to_thread(server.wait_for_streams, 2)

        assert (stream.requests[0].version_info, stream.requests[0].response_nonce) == ("1", "")
        assert one.domains == {"good"}
        (lost,) = (line for line in logs if line["log_level"] == "warning" and "xds_connection_lost" in line["event"])
        assert lost["error"] == (f"{code.name}: as the test wants it" if code else "the server ended the stream")


async def test_rules_are_requested_again_if_versions_restart(
    server: AdsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESPONSE_TIMEOUT_S", 0.01)
    async with following(Target(server.address)) as one:
        await response_to(server, server.send("1", GOOD))
        server.stop()
        server.send("1", BETTER)
        server.start()

        await eventually(lambda: one.domains == {"better"})

        second = server.streams[1].requests
        assert [(request.version_info, request.response_nonce) for request in second[:2]] == [("1", ""), ("", "")]


async def test_connected_metric_follows_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESPONSE_TIMEOUT_S", 0.01)
    with AdsServer() as server:
        target = Target(server.address)
        async with following(target, pause_s=NEVER_S) as one:
            assert one.connected == 0
            await eventually(lambda: one.connected == 1)
            await asyncio.to_thread(server.stop)
            await eventually(lambda: one.connected == 0)


async def test_first_response_counts_as_connected(server: AdsServer) -> None:
    server.send("1", GOOD)
    with capture_logs() as logs:
        async with following(Target(server.address)) as one:
            await eventually(lambda: one.domains == {"good"})
            assert one.connected == 1
            await response_to(server, server.send("2", BETTER))
    assert [line["event"] for line in logs].count("xds_connected") == 1


async def test_silent_server_counts_as_connected_after_the_timeout(
    server: AdsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESPONSE_TIMEOUT_S", 0.01)
    async with following(Target(server.address)) as one:
        await eventually(lambda: one.connected == 1)
        await response_to(server, server.send("1", GOOD))
    assert [request.version_info for request in server.streams[0].requests] == ["", "1"]


async def test_other_http2_server_is_not_connected() -> None:
    stranger = grpc.server(ThreadPoolExecutor(1))
    port = stranger.add_insecure_port("127.0.0.1:0")
    stranger.start()
    try:
        with capture_logs() as logs:
            async with following(Target(f"127.0.0.1:{port}")) as one:
                await eventually(lambda: sum("xds_connection_lost" in line["event"] for line in logs) > 1)
                assert one.connected == 0
        assert not any("connected" in line["event"] for line in logs)
    finally:
        stranger.stop(0).wait()


async def test_streams_never_share_a_connection() -> None:
    accepted: list[asyncio.StreamWriter] = []
    listening = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    target = Target(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    channels = [target.channel(), target.channel()]
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


async def test_late_server_is_found() -> None:
    server = AdsServer()
    with capture_logs() as logs:
        async with following(Target(server.address)) as one:
            await eventually(lambda: any("Connection refused" in line.get("error", "") for line in logs))
            assert one.rules.current is None
            assert not any("connected" in line["event"] for line in logs)
            with server:
                server.send("1", GOOD)
                await eventually(lambda: one.domains == {"good"})


async def test_backoff_is_short_until_the_first_rules(server: AdsServer) -> None:
    async with following(Target(server.address), pause_s=NEVER_S, max_initial_delay_s=0.01) as one:
        for number in (1, 2):
            await asyncio.to_thread(server.wait_for_streams, number)
            server.end_streams()
        await asyncio.to_thread(server.wait_for_streams, 3)
        await response_to(server, server.send("1", GOOD))
        with capture_logs() as logs:
            server.end_streams()
            await eventually(lambda: bool(logs))
        assert logs[0]["next_attempt_s"] == NEVER_S
        assert one.domains == {"good"}


@pytest.mark.slow
async def test_backoff_grows_until_a_stream_delivers(server: AdsServer) -> None:
    with capture_logs() as logs:
        async with following(Target(server.address), pause_s=0.1, longest_s=NEVER_S):
            for number in (1, 2):
                await asyncio.to_thread(server.wait_for_streams, number)
                server.end_streams()
            await asyncio.to_thread(server.wait_for_streams, 3)
            await response_to(server, server.send("1", GOOD))
            server.end_streams()
            await asyncio.to_thread(server.wait_for_streams, 4)
    assert [line["next_attempt_s"] for line in logs if "next_attempt_s" in line] == [0.1, 0.2, 0.1]


async def test_oversized_response_ends_the_stream(server: AdsServer) -> None:
    large = config("{name: a, domain: d}", descriptors=[{"key": "k" * 10_000}])
    with capture_logs() as logs:
        async with following(Target(server.address, max_bytes=5000)) as one:
            server.send("1", large)
            await eventually(lambda: any("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES" in line.get("error", "") for line in logs))
            assert one.rules.current is None


async def test_reload_without_new_response_has_no_effect(server: AdsServer) -> None:
    async with following(Target(server.address)) as one:
        await asyncio.to_thread(server.wait_for_streams, 1)
        assert not await one.loader.reload()
        assert (one.loads, one.rules.last_error, one.loader.first_attempt_done.is_set()) == ((0, 0), None, False)

        await response_to(server, server.send("1", GOOD))
        assert await one.loader.reload()
        assert one.loads == (1, 0)
        assert one.loader.first_attempt_done.is_set()


async def test_secret_headers_are_not_logged(server: AdsServer) -> None:
    target = Target(server.address, headers=(("authorization", "as the test"),))
    with capture_logs() as logs:
        async with following(target):
            await asyncio.to_thread(server.wait_for_streams, 1)
            server.end_streams(grpc.StatusCode.PERMISSION_DENIED)
            await asyncio.to_thread(server.wait_for_streams, 2)
    assert "PERMISSION_DENIED: *** wants it" in str(logs)
    assert "as the test" not in f"{logs} {target} {target!r}"


@pytest.mark.parametrize(
    ("header", "text", "logged"),
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
def test_redact_removes_repeated_secrets(header: str | bytes, text: str, logged: str) -> None:
    assert Target("x:1", headers=(("authorization", header),)).redact(text) == logged


@pytest.mark.slow
async def test_keepalive_detects_a_frozen_server(server: AdsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ads_stream, "KEEPALIVE_TIMEOUT_S", 0.3)
    async with relay(server.port) as (port, freeze), following(Target(f"127.0.0.1:{port}", keepalive_s=1)) as one:
        await response_to(server, server.send("1", GOOD))
        freeze()
        with capture_logs() as logs:
            await eventually(lambda: any("xds_connection_lost" in line["event"] for line in logs))
        assert one.domains == {"good"}


@contextlib.asynccontextmanager
async def relay(to: int) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """Forward a port until it is frozen: then nothing is forwarded, and no connection is closed."""
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
    """TLS files of a mounted secret, and those of the server."""

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
        """Write new certificates of the same authority."""
        chain, key = self.authority.issue(CLIENT)
        for name, source in (("ca.crt", self.authority.ca_path), ("tls.crt", chain), ("tls.key", key)):
            (self.directory / f"{name}.new").write_bytes(source.read_bytes())
            (self.directory / f"{name}.new").rename(self.directory / name)

    def rotate(self) -> None:
        """Write new certificates and a new authority."""
        self.authority = Authority(self.directory / "second", "another CA")
        self.write()


@pytest.fixture
def pki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pki:
    monkeypatch.setattr(tls, "POLL_INTERVAL_S", 0.02)
    return Pki.new(tmp_path)


async def test_mutual_tls_with_a_server_name(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server:
        server.send("1", GOOD)
        async with following(Target(server.address, pki.files, SERVER)) as one:
            await eventually(lambda: one.domains == {"good"})
            assert (one.connected, one.loads) == (1, (1, 0))


async def test_server_with_another_name_is_not_trusted(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server, capture_logs() as logs:
        server.send("1", GOOD)
        async with following(Target(server.address, pki.files)) as one:
            await eventually(lambda: any("xds_connection_lost" in line["event"] for line in logs))
            assert one.rules.current is None
            assert not any("connected" in line["event"] for line in logs)


async def test_changed_certificates_reconnect_and_bad_ones_are_logged(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server:
        async with following(Target(server.address, pki.files, SERVER), pause_s=NEVER_S) as one:
            await response_to(server, server.send("1", GOOD))
            pki.write()
            stream = await asyncio.to_thread(server.wait_for_streams, 2)
            assert stream.requests[0].version_info == "1"

            with capture_logs() as logs:
                (pki.directory / "tls.crt").write_text("nonsense")
                await eventually(lambda: bool(logs))
            assert "CONFIG_GRPC_XDS_CLIENT_TLS_CERT=" in logs[0]["error"]
            ack = await response_to(server, server.send("2", BETTER))
            assert ack.version_info == "2"
            assert one.domains == {"better"}
            assert len(server.streams) == 2


async def test_response_before_a_file_change_is_not_lost(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server:
        server.send("1", GOOD)
        target = Target(server.address, pki.files, SERVER)
        async with ads_stream.open_stream(target, target.file_states()) as stream:
            await stream.send(DiscoveryRequest(type_url=TYPE_URL))
            assert await stream.wait_for_response()
            pki.write()
            changing = stream._changing
            assert changing is not None
            await asyncio.wait([changing])

            assert (await stream.receive()).version_info == "1"
            with pytest.raises(ads_stream.FilesChanged):
                await stream.receive()


class CountingTlsFiles(AdsTlsFiles):
    """TLS files that count the checks for changes."""

    checks = 0

    def state(self) -> tls.FileStates:
        CountingTlsFiles.checks += 1
        return super().state()


async def test_bad_files_are_logged_once_and_good_ones_used(pki: Pki) -> None:
    files = CountingTlsFiles(pki.files.ca, pki.files.certificate, pki.files.key)
    seen = files.state()
    changing = asyncio.create_task(files.until_changed(seen))
    with capture_logs() as logs:
        (pki.directory / "tls.crt").write_text("nonsense")
        await eventually(lambda: bool(logs))
        enough = CountingTlsFiles.checks + 3
        await eventually(lambda: CountingTlsFiles.checks >= enough)
    assert len(logs) == 1
    pki.write()
    await asyncio.wait_for(changing, 10)


async def test_replaced_authority_reconnects_without_delay(pki: Pki) -> None:
    with AdsServer(pki.of_server) as server:
        async with following(Target(server.address, pki.files, SERVER), pause_s=NEVER_S) as one:
            await response_to(server, server.send("1", GOOD))
            server.stop()
            pki.rotate()
            server.certificates = pki.of_server
            server.start()
            await response_to(server, server.send("2", BETTER))
            assert one.domains == {"better"}


async def test_missing_tls_files_are_retried(pki: Pki) -> None:
    (pki.directory / "tls.key").rename(pki.directory / "later")
    with AdsServer(pki.of_server) as server, capture_logs() as logs:
        server.send("1", GOOD)
        async with following(Target(server.address, pki.files, SERVER), pause_s=NEVER_S) as one:
            await eventually(lambda: any("tls.key: No such file" in line.get("error", "") for line in logs))
            assert (one.connected, one.loads) == (0, (0, 0))
            (pki.directory / "later").rename(pki.directory / "tls.key")
            await eventually(lambda: one.domains == {"good"})
            assert (one.connected, one.loads) == (1, (1, 0))
