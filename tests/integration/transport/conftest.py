"""A whole service in this process on both transports: real sockets, real HTTP/2, the embedded store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
import uvloop
from grpc import aio

from ratelimit_rls.core.model import Answer, Purpose
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import StoreError
from ratelimit_rls.failure import Fallback
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import Traces
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc import native
from ratelimit_rls.transport.grpc.door import Door
from ratelimit_rls.transport.grpc.messages import (
    KUADRANT_CHECK,
    KUADRANT_REPORT,
    SHOULD_RATE_LIMIT,
    RateLimitRequest,
    RateLimitResponse,
)
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.server import GrpcOptions, GrpcServer
from ratelimit_rls.transport.grpc.services import Ordinary
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.transport.health import Health

RULES = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 2, name: per-user}
  - key: tenant
    rate_limit: {unit: minute, requests_per_unit: 1000}
    metadata: {plan: free, caps: {burst: 5}}
  - key: staff
    rate_limit: {unlimited: true}
"""

MOST_HELD, MARGIN_S = 20, 0.003


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


class HoldingStore(EmbeddedStore):
    """The embedded store behind a gate that a test can shut, and a fault that it can set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: StoreError | Exception | None = None
        self.batches: list[int] = []

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        self.batches.append(len(batch))
        await self.gate.wait()
        if isinstance(self.fault, StoreError):
            return [self.fault] * len(batch)
        if self.fault is not None:
            raise self.fault
        return await super().spend(batch)


@dataclass
class Service:
    """Everything behind the doors, and the gRPC port."""

    rules: Rules
    store: HoldingStore
    metrics: Metrics
    health: Health
    room: WaitingRoom
    door: RlsDoor
    doors: Mapping[str, Door]
    options: GrpcOptions
    servers: list[GrpcServer] = field(default_factory=list)
    traces: Traces | None = None
    others: Sequence[Ordinary] = ()

    async def listen(self, *, announce: bool = True, **changes: object) -> str:
        """Open a gRPC port (or what `changes` say) and return its address for a client."""
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        server = GrpcServer(options, self.doors, self.room, self.health, self.metrics, self.traces, self.others)
        await server.start()
        self.servers.append(server)
        if announce:
            self.health.listening()
        return f"127.0.0.1:{server.port}" if server.port else server.options.target

    def load(self, document: bytes) -> None:
        compiled = compile_documents({"rules.yaml": document})
        self.rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))


def new_service(options: GrpcOptions, answers: AnswerOptions) -> Service:
    rules, store, metrics = Rules(), HoldingStore(), Metrics()
    fallback = Fallback(metrics)
    fallback.get_ready()
    limiter = RateLimiter(rules, store, metrics, Policy(), fallback)
    room = WaitingRoom(MOST_HELD, MARGIN_S)
    metrics.watch(room.gauges)
    door = RlsDoor(limiter, metrics, answers, room=room)
    doors: dict[str, Door] = {
        SHOULD_RATE_LIMIT: door,
        KUADRANT_CHECK: RlsDoor(limiter, metrics, answers, room=room, purpose=Purpose.LOOK),
        KUADRANT_REPORT: RlsDoor(limiter, metrics, answers, room=room, purpose=Purpose.REPORT),
    }
    service = Service(rules, store, metrics, Health(), room, door, doors, options)
    service.load(RULES)
    return service


@pytest.fixture(params=["native", pytest.param("grpcio", marks=pytest.mark.slow)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def answers() -> AnswerOptions:
    """What answers tell; a test that wants more says so with @pytest.mark.parametrize."""
    return AnswerOptions()


@pytest.fixture
async def service(
    transport: str, answers: AnswerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    options = GrpcOptions("127.0.0.1:0", transport=transport, runtime_dir=str(tmp_path))  # type: ignore[arg-type]
    service = new_service(options, answers)
    yield service
    service.store.gate.set()
    monkeypatch.setattr(native, "SETTLE_S", 0)  # whoever wanted an answer has it
    for server in service.servers:
        await server.close()
    await service.room.close()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[Client]:
    async with aio.insecure_channel(await service.listen()) as channel:
        yield Client(channel)


class Client:
    """Speaks to a gRPC port with our own messages, or with raw bytes."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.raw = channel.unary_unary(SHOULD_RATE_LIMIT)

    async def ask(self, *descriptors: dict[str, str], domain: str = "edge", hits: int = 0) -> RateLimitResponse:
        return RateLimitResponse.FromString(await self.raw(message(*descriptors, domain=domain, hits=hits), timeout=10))

    async def failure(self, message: bytes) -> tuple[grpc.StatusCode, str]:
        """The status and words with which the message is refused."""
        with pytest.raises(aio.AioRpcError) as refusal:
            await self.raw(message, timeout=10)
        return refusal.value.code(), refusal.value.details() or ""


def message(*descriptors: dict[str, str], domain: str = "edge", hits: int = 0) -> bytes:
    request = RateLimitRequest(domain=domain, hits_addend=hits)
    for descriptor in descriptors:
        entries = request.descriptors.add().entries
        for key, value in descriptor.items():
            entries.add(key=key, value=value)
    return bytes(request.SerializeToString())


async def eventually(happened: Callable[[], bool]) -> None:
    """Give other tasks and threads the time they need, and no more."""
    async with asyncio.timeout(10):
        while not happened():
            await asyncio.sleep(0.005)
