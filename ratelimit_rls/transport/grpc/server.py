"""The gRPC port: one of two transports, with TLS before it if asked for.

TLS is terminated by us on both, so that reload, client certificates and names behave alike. The native transport is
handed the decrypted connection; grpcio cannot take one, so its bytes are piped to a Unix socket of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ratelimit_rls.telemetry.collected import Series
from ratelimit_rls.telemetry.instruments import CALLS_IN_FLIGHT
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import Traces
from ratelimit_rls.transport.grpc.certificates import TlsFiles
from ratelimit_rls.transport.grpc.door import Door
from ratelimit_rls.transport.grpc.observed import Observer
from ratelimit_rls.transport.grpc.runtime import runtime_dir
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.listen import check_target

if TYPE_CHECKING:
    from ratelimit_rls.transport.grpc.services import Ordinary


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    target: str  # "host:port" or "unix:/path"
    socket_mode: int | None = None  # of a Unix socket; None: by the umask
    transport: Literal["native", "grpcio"] = "native"
    tls: TlsFiles | None = None
    runtime_dir: str = ""
    request_id_metadata: str = ""  # key of a call's metadata that has its id; "": it has none
    reuse_port: bool = False
    max_concurrent_streams: int = 1024
    # None: connections live as long as they like.
    max_connection_age_s: float | None = None
    max_connection_age_grace_s: float | None = None


class Transport(Protocol):
    """Speaks gRPC."""

    @property
    def in_flight(self) -> int:
        """Calls that have no answer yet, held ones included."""
        ...

    async def start(self, target: str) -> int: ...
    async def drain(self, timeout_s: float) -> None: ...
    async def close(self) -> None: ...


class GrpcServer:
    """start ─► (serving) ─► drain ─► close."""

    def __init__(
        self,
        options: GrpcOptions,
        doors: Mapping[str, Door],
        room: WaitingRoom,
        health: Health,
        metrics: Metrics,
        traces: Traces | None = None,
        others: Sequence[Ordinary] = (),
    ) -> None:
        """`doors` are those of the hot methods, by full name; `room` is where they have their answers held. `others`
        are served the ordinary way."""
        self._observers = {method: Observer(method, metrics, traces) for method in doors}
        self.options = options
        self._doors = doors
        self._room = room
        self._health = health
        self._others = others
        self._directory: Path | None = None
        self._transport: Transport | None = None
        self.port = 0  # once started; 0 on a Unix socket

    @property
    def in_flight(self) -> int:
        return self._transport.in_flight if self._transport else 0

    def measured(self) -> Iterator[tuple[Series, int]]:
        yield Series(CALLS_IN_FLIGHT.name, ()), self.in_flight

    async def start(self) -> None:
        """Raises SettingsError if the address, a certificate or the runtime directory cannot be used."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        options = self.options
        check_target(options.target)
        if options.tls or options.transport == "native":
            self._directory = runtime_dir(options.runtime_dir)
        self._transport = self._new_transport()
        port = await self._transport.start(options.target)
        is_socket = options.target.startswith("unix:")
        if is_socket and options.socket_mode is not None:
            os.chmod(options.target.removeprefix("unix:"), options.socket_mode)
        self.port = 0 if is_socket else port

    def _new_transport(self) -> Transport:
        # Each is imported when chosen.
        options = self.options
        if options.transport == "native":
            from ratelimit_rls.transport.grpc.native import NativeServer

            assert self._directory is not None
            return NativeServer(
                self._doors,
                self._room,
                self._health,
                self._observers,
                others=self._others,
                directory=self._directory,
                request_id_metadata=options.request_id_metadata,
                tls=options.tls,
                reuse_port=options.reuse_port,
                max_concurrent_streams=options.max_concurrent_streams,
                max_connection_age_s=options.max_connection_age_s,
                max_connection_age_grace_s=options.max_connection_age_grace_s,
            )
        from ratelimit_rls.transport.grpc.grpcio import GrpcioServer
        from ratelimit_rls.transport.grpc.piped import PipedServer

        plain = GrpcioServer(
            self._doors,
            self._room,
            self._health,
            self._observers,
            others=self._others,
            request_id_metadata=options.request_id_metadata,
            reuse_port=options.reuse_port and not options.tls,
            max_concurrent_streams=options.max_concurrent_streams,
            max_connection_age_s=options.max_connection_age_s,
            max_connection_age_grace_s=options.max_connection_age_grace_s,
        )
        if options.tls is None:
            return plain
        assert self._directory is not None
        return PipedServer(plain, options.tls, self._directory, reuse_port=options.reuse_port)

    async def drain(self, timeout_s: float) -> None:
        """Wait until nothing is in flight, at most so long."""
        if self._transport:
            await self._transport.drain(timeout_s)

    async def close(self) -> None:
        if self._transport:
            await self._transport.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
