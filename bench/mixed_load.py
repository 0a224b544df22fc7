"""Open-loop load of all kinds of calls with all outcomes, for the fault soak.

The rate is independent of responses, so that a slow service does not get fewer calls. Every call has a deadline, as
with Envoy.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import grpc
import uvloop
from grpc import aio

from ratelimit_rls.core.model import Code, OnStoreFailure
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitRequest, RateLimitResponse

DOMAIN = "soak"
REQUEST_ID = "x-request-id"
WINDOW_S = 2
CONNECTIONS = 4
LAG_EVERY_S = 0.01

Outcome = int | grpc.StatusCode
"""Overall code of the response, or gRPC status without one."""


@dataclass(frozen=True, slots=True)
class LoadKind:
    """Calls that match one rule."""

    name: str  # key of the descriptor
    policy: OnStoreFailure
    limit: int  # per WINDOW_S, if `audited`
    per_second: float
    deadline_s: float
    rest: str  # remaining YAML of the rule
    values: int = 1
    audited: bool = False  # admitted calls are verified per window
    retried: bool = False  # has a request id and is retried
    gives_back: bool = False  # its hits are refunded soon

    def rule(self) -> str:
        window = f"unit: second, unit_multiplier: {WINDOW_S}, requests_per_unit: {self.limit}"
        rest = self.rest.replace("WINDOW", window)
        return f"  - {{key: {self.name}, on_store_failure: {self.policy.value}, {rest}}}\n"


PLENTY = 100_000_000

KINDS = (
    LoadKind("share", OnStoreFailure.LOCAL, 16, 60, 0.1, "rate_limit: {WINDOW}", values=5, audited=True),
    LoadKind("tenant", OnStoreFailure.LOCAL, 80, 60, 0.05, "hot: {lease: 200ms}, rate_limit: {WINDOW}", audited=True),
    LoadKind("page", OnStoreFailure.ALLOW, 16, 20, 0.1, "rate_limit: {WINDOW}", values=2),
    LoadKind(
        "login",
        OnStoreFailure.DENY,
        20,
        20,
        0.03,
        "penalty: {within: 1m, after: 2, multipliers: [1, 2]}, rate_limit: {WINDOW}",
        values=2,
    ),
    LoadKind("order", OnStoreFailure.ERROR, PLENTY, 30, 0.5, "rate_limit: {WINDOW}", values=20, retried=True),
    LoadKind(
        "bytes",
        OnStoreFailure.ERROR,
        1000,
        10,
        0.5,
        "rate_limit: {WINDOW, algorithm: token_bucket}",
        values=3,
        gives_back=True,
    ),
    LoadKind(
        "backend",
        OnStoreFailure.LOCAL,
        100,
        25,
        0.2,
        "action: throttle, max_delay: 60ms, rate_limit: {WINDOW}",
    ),
)


def rules(version: int = 0) -> str:
    """Return the rules; all versions are equivalent for these calls."""
    spare = f"  - {{key: spare, rate_limit: {{unit: minute, requests_per_unit: {version + 1}}}}}\n"
    return f"domain: {DOMAIN}\ncharge: admitted\ndescriptors:\n{''.join(kind.rule() for kind in KINDS)}{spare}"


class CallRecord(NamedTuple):
    """One call."""

    kind: LoadKind
    value: int
    begun_s: float  # wall clock, as used by Redis
    took_s: float
    outcome: Outcome
    remaining: int = 0
    request_id: str = ""
    details: str = ""

    @property
    def ended_s(self) -> float:
        return self.begun_s + self.took_s

    @property
    def over_deadline_s(self) -> float:
        return max(0.0, self.took_s - self.kind.deadline_s)


class MixedLoad:
    """Runs in a thread from `with` to `stop`. Afterwards `calls` contains every call that was started."""

    def __init__(self, address: str, seed: int) -> None:
        self.calls: list[CallRecord] = []
        self.lags_s: list[float] = []  # sampled lag of this event loop
        self.begun = 0
        self._address = address
        self._drawn = random.Random(seed)
        self._over = threading.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._methods: list[aio.UnaryUnaryMultiCallable[bytes, bytes]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop sending, and wait for calls in flight."""
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._load())
        except BaseException as failure:
            self._failure = failure

    async def _load(self) -> None:
        # Without a local subchannel pool, all channels of the process would share a connection.
        own_pool = (("grpc.use_local_subchannel_pool", 1),)
        channels = [aio.insecure_channel(self._address, options=own_pool) for _ in range(CONNECTIONS)]
        self._methods = [channel.unary_unary(SHOULD_RATE_LIMIT) for channel in channels]
        await asyncio.gather(self._look_at_the_clock(), *(self._keep_asking(kind) for kind in KINDS))
        while self._running:
            await asyncio.wait(self._running)
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _keep_asking(self, kind: LoadKind) -> None:
        next_s = time.monotonic() + self._drawn.random() / kind.per_second
        call = self._caller(kind)
        while not self._over.is_set():
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s = max(next_s + 1 / kind.per_second, time.monotonic() - 1.0)
            task = asyncio.ensure_future(call(kind, self._drawn.randrange(kind.values)))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    def _caller(self, kind: LoadKind) -> Callable[[LoadKind, int], Awaitable[None]]:
        if kind.retried:
            return self._ask_again
        return self._give_back if kind.gives_back else self._ask_once

    async def _ask_once(self, kind: LoadKind, value: int) -> None:
        await self._ask(kind, value)

    async def _ask_again(self, kind: LoadKind, value: int) -> None:
        """Repeat a call with the same request id: at once, a little later, or much later."""
        request_id = f"{self._drawn.getrandbits(64):016x}"
        first = self._ask(kind, value, request_id=request_id)
        pause_s = self._drawn.choice([0.0, 0.05, 1.0])
        if not pause_s:
            await asyncio.gather(first, self._ask(kind, value, request_id=request_id))
            return
        await first
        await asyncio.sleep(pause_s)
        await self._ask(kind, value, request_id=request_id)

    async def _give_back(self, kind: LoadKind, value: int) -> None:
        hits = self._drawn.randint(1, 9)
        if await self._ask(kind, value, hits=hits) == Code.OK:
            await asyncio.sleep(0.1)
            await self._ask(kind, value, hits=-hits)

    async def _ask(self, kind: LoadKind, value: int, *, hits: int = 0, request_id: str = "") -> Outcome:
        metadata = ((REQUEST_ID, request_id),) if request_id else ()
        method = self._drawn.choice(self._methods)
        self.begun += 1
        begun_s, begun_tick = time.time(), time.monotonic()
        remaining, details = 0, ""
        outcome: Outcome
        try:
            answer = await method(message({kind.name: str(value)}, hits), timeout=kind.deadline_s, metadata=metadata)
            response = RateLimitResponse.FromString(answer)
            outcome, remaining = response.overall_code, response.statuses[0].limit_remaining
        except aio.AioRpcError as error:
            outcome, details = error.code(), error.details() or ""
        took_s = time.monotonic() - begun_tick
        self.calls.append(CallRecord(kind, value, begun_s, took_s, outcome, remaining, request_id, details))
        return outcome

    async def _look_at_the_clock(self) -> None:
        while not self._over.is_set():
            before_s = time.monotonic()
            await asyncio.sleep(LAG_EVERY_S)
            self.lags_s.append(time.monotonic() - before_s - LAG_EVERY_S)


def message(entries: Mapping[str, str], hits: int = 0) -> bytes:
    """Return a request; negative hits are refunds."""
    request: Any = RateLimitRequest(domain=DOMAIN)
    descriptor = request.descriptors.add()
    for key, value in entries.items():
        descriptor.entries.add(key=key, value=value)
    if hits:
        descriptor.hits_addend.value = abs(hits)
        descriptor.is_negative_hits = hits < 0
    return bytes(request.SerializeToString())
