"""The gRPC port of a process: its HTTP/2 server, runtime directory and Unix socket permissions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratelimit_rls.pipeline.pipeline import Pipeline
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.telemetry.abuse import AbuseLog
from ratelimit_rls.telemetry.instruments import CALLS_IN_FLIGHT
from ratelimit_rls.telemetry.series import Series
from ratelimit_rls.transport.grpc.http2_server import Http2Server
from ratelimit_rls.transport.grpc.options import GrpcOptions
from ratelimit_rls.transport.grpc.runtime_dir import runtime_dir
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.sockets import check_target

if TYPE_CHECKING:
    from ratelimit_rls.transport.grpc.standard_services import StandardService


class GrpcServer:
    """The gRPC server of a process. Life cycle: start ─► (serving) ─► drain ─► close."""

    def __init__(
        self,
        options: GrpcOptions,
        pipelines: Mapping[str, Pipeline[Any]],
        throttle_queue: ThrottleQueue,
        health: Health,
        abuse: AbuseLog,
        services: Sequence[StandardService] = (),
    ) -> None:
        """Create a server that is not listening yet.

        `pipelines` maps full method names to the pipelines of the hot methods; `throttle_queue` holds their delayed
        responses. grpc.aio serves `services`.
        """
        self.options = options
        self._pipelines = pipelines
        self._throttle_queue = throttle_queue
        self._health = health
        self._abuse = abuse
        self._services = services
        self._directory: Path | None = None
        self._http2: Http2Server | None = None
        self.port = 0  # once started; 0 on a Unix socket

    @property
    def in_flight(self) -> int:
        """Number of calls without a response, including delayed ones."""
        return self._http2.in_flight if self._http2 else 0

    def measured(self) -> Iterator[tuple[Series, int]]:
        yield Series(CALLS_IN_FLIGHT.name, ()), self.in_flight

    async def start(self) -> None:
        """Start listening. Raises SettingsError if the address, a certificate or the runtime directory cannot be
        used."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        options = self.options
        check_target(options.target)
        self._directory = runtime_dir(options.runtime_dir)
        self._http2 = Http2Server(
            options,
            self._pipelines,
            self._throttle_queue,
            self._health,
            abuse=self._abuse,
            services=self._services,
            directory=self._directory,
        )
        port = await self._http2.start()
        is_socket = options.target.startswith("unix:")
        if is_socket and options.socket_mode is not None:
            os.chmod(options.target.removeprefix("unix:"), options.socket_mode)
        self.port = 0 if is_socket else port

    async def drain(self, timeout_s: float) -> None:
        """Wait until no call is in flight, for at most `timeout_s`."""
        if self._http2:
            await self._http2.drain(timeout_s)

    async def close(self) -> None:
        if self._http2:
            await self._http2.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
