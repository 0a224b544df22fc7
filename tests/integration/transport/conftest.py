"""A complete service in this process on both transports: real sockets, real HTTP/2, the embedded store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from grpc import aio

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.model import Purpose, StoreResult
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import StoreError
from ratelimit_rls.pipeline.codec import Codec
from ratelimit_rls.pipeline.deadlines import Deadlines
from ratelimit_rls.pipeline.fallback import Fallback
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.pipeline import Pipeline
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.protos.messages import (
    KUADRANT_CHECK,
    KUADRANT_REPORT,
    SHOULD_RATE_LIMIT,
    RateLimitRequest,
    RateLimitResponse,
)
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.abuse import AbuseLog
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import Traces
from ratelimit_rls.transport.grpc import http2_server
from ratelimit_rls.transport.grpc.options import GrpcOptions
from ratelimit_rls.transport.grpc.server import GrpcServer
from ratelimit_rls.transport.grpc.standard_services import StandardService
from ratelimit_rls.transport.health import Health
from tests.support.pipelines import new_pipeline

RULES = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 2, name: per-user}
  - key: tenant
    rate_limit: {unit: year, requests_per_unit: 1000}
    metadata: {plan: free, caps: {burst: 5}}
  - key: staff
    rate_limit: {unlimited: true}
"""

MAX_DELAYED, MARGIN_S = 20, 0.003


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


class HoldingStore(EmbeddedStore):
    """Embedded store that a test can pause, or make fail."""

    is_synchronous = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: StoreError | Exception | None = None
        self.batches: list[int] = []

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        self.batches.append(len(batch))
        await self.gate.wait()
        if isinstance(self.fault, StoreError):
            return [self.fault] * len(batch)
        if self.fault is not None:
            raise self.fault
        return await super().spend(batch)


@dataclass
class Service:
    """The service behind the gRPC port."""

    rules: ActiveRules
    store: HoldingStore
    metrics: Metrics
    health: Health
    throttle_queue: ThrottleQueue
    limiter: RateLimiter
    codecs: Mapping[str, Codec[Any]]
    options: GrpcOptions
    servers: list[GrpcServer] = field(default_factory=list)
    traces: Traces | None = None
    services: Sequence[StandardService] = ()
    abuse: AbuseLog = field(default_factory=AbuseLog)
    deadlines: Deadlines = field(default_factory=Deadlines)

    async def listen(self, *, announce: bool = True, **changes: object) -> str:
        """Open a gRPC port with the options in `changes`, and return its address."""
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        server = GrpcServer(
            options,
            {method: self.pipeline(method) for method in self.codecs},
            self.throttle_queue,
            self.health,
            self.abuse,
            self.services,
        )
        await server.start()
        self.servers.append(server)
        if announce:
            self.health.listening()
        return f"127.0.0.1:{server.port}" if server.port else server.options.target

    def json_pipeline(self) -> Pipeline[Any]:
        return new_pipeline(self.codecs[SHOULD_RATE_LIMIT], self.metrics, self.throttle_queue)

    def pipeline(self, method: str) -> Pipeline[Any]:
        return new_pipeline(
            self.codecs[method],
            self.metrics,
            self.throttle_queue,
            method=method,
            deadlines=self.deadlines,
            traces=self.traces,
        )

    def load(self, document: bytes) -> None:
        compiled = compile_documents({"rules.yaml": document})
        self.rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))


def new_service(options: GrpcOptions, answers: ResponseOptions) -> Service:
    rules, store, metrics = ActiveRules(), HoldingStore(), Metrics()
    fallback = Fallback(metrics)
    fallback.warm_up()
    limiter = RateLimiter(rules, store, metrics, Policy(), fallback)
    queue = ThrottleQueue(MAX_DELAYED, MARGIN_S)
    metrics.export_values(queue.gauges)
    codecs = {
        SHOULD_RATE_LIMIT: RlsCodec(limiter, answers),
        KUADRANT_CHECK: RlsCodec(limiter, answers, purpose=Purpose.LOOK),
        KUADRANT_REPORT: RlsCodec(limiter, answers, purpose=Purpose.REPORT),
    }
    service = Service(rules, store, metrics, Health(), queue, limiter, codecs, options)
    service.load(RULES)
    return service


@pytest.fixture
def answers() -> ResponseOptions:
    """Response options; a test overrides them with @pytest.mark.parametrize."""
    return ResponseOptions()


@pytest.fixture
async def service(
    answers: ResponseOptions, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    options = GrpcOptions("127.0.0.1:0", runtime_dir=str(short_path))
    service = new_service(options, answers)
    yield service
    service.store.gate.set()
    monkeypatch.setattr(http2_server, "CLOSE_GRACE_S", 0)  # all responses were received
    for server in service.servers:
        await server.close()
    await service.throttle_queue.close()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    async with aio.insecure_channel(await service.listen()) as channel:
        yield Client(channel)


class Client:
    """gRPC client that sends our messages, or raw bytes."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.raw: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)

    async def ask(self, *descriptors: dict[str, str], domain: str = "edge", hits: int = 0) -> RateLimitResponse:
        return RateLimitResponse.FromString(await self.raw(message(*descriptors, domain=domain, hits=hits), timeout=10))

    async def failure(self, message: bytes) -> tuple[grpc.StatusCode, str]:
        """Return the status and details of a rejected message."""
        with pytest.raises(aio.AioRpcError) as raised:
            await self.raw(message, timeout=10)
        return raised.value.code(), raised.value.details() or ""


def message(*descriptors: dict[str, str], domain: str = "edge", hits: int = 0) -> bytes:
    request = RateLimitRequest(domain=domain, hits_addend=hits)
    for descriptor in descriptors:
        entries = request.descriptors.add().entries
        for key, value in descriptor.items():
            entries.add(key=key, value=value)
    return bytes(request.SerializeToString())


async def eventually(happened: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(10):
        while not happened():
            await asyncio.sleep(0.005)
