"""Native gRPC server: speaks HTTP/2 in the event loop that decides calls, and hands them over in batches.

    connections ─► calls of one event loop iteration ─► pipeline ─► connections    methods that have a pipeline
                   (of more than one with a batch window)
    connections ─► health check ─► connections                                     grpc.health.v1.Health/Check
    connections ─► Unix socket ─► grpc.aio                                         all other methods

There is no thread, task, future or wake-up per call, because these would dominate the cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import Context, copy_context
from itertools import chain
from math import inf
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any

import structlog
from grpc import aio

from ratelimit_rls.h2.call_headers import CallHeaders, CallHeadersParser
from ratelimit_rls.h2.config import Config
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline.batch import DelayedResponse, Response
from ratelimit_rls.pipeline.drain import wait_until_zero
from ratelimit_rls.pipeline.message_bounds import MAX_MESSAGE_BYTES
from ratelimit_rls.pipeline.pipeline import Pipeline
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.call_budget import BUDGET_SPENT, CallBudget
from ratelimit_rls.transport.grpc.backlog import (
    BACKLOG_ITERATION_WEIGHT,
    MAX_ITERATION_WEIGHT,
    MAX_READ_AHEAD,
    Backlog,
    fits_iteration,
)
from ratelimit_rls.transport.grpc.batch_window import BatchWindow
from ratelimit_rls.transport.grpc.call_proxy import SERVER_OPTIONS, CallProxy, ProxiedCall
from ratelimit_rls.transport.grpc.health_check import HEALTH_CHECK, MAX_CHECK_BYTES, HealthCheck
from ratelimit_rls.transport.grpc.open_connections import OpenConnections
from ratelimit_rls.transport.grpc.options import GrpcOptions
from ratelimit_rls.transport.grpc.protocol import GrpcProtocol, GrpcQueuedCall
from ratelimit_rls.transport.grpc.slow_lane import SlowLane
from ratelimit_rls.transport.grpc.standard_services import MAX_MESSAGES, StandardService, StandardServices
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.sockets import LISTEN_BACKLOG, listening_socket
from ratelimit_rls.transport.tls_listener import TlsListener

CLOSE_GRACE_S = 0.1
"""Time for clients to react to GOAWAY, and then to receive the last responses."""

CHECK_INTERVAL_S = 1.0
"""Interval at which the connections are checked for timeouts and for their number of streams."""

_BACKLOG_FULL = RpcError(
    StatusCode.RESOURCE_EXHAUSTED, "too many calls are queued; try again later", Abuse.BACKLOG_FULL
)
_UNIMPLEMENTED = RpcError(StatusCode.UNIMPLEMENTED, "Method not found!")  # the text of grpc.aio

_log = structlog.get_logger()

_CallKey = tuple[GrpcProtocol, int]
"""Identifies a delayed call: its connection and stream id."""


class _Batch:
    """Calls of one method that arrived in one event loop iteration.

    It runs its pipeline without a task, which would cost one more iteration before anything is sent to the store. So
    what a pipeline awaits must be futures of the loop or `asyncio.sleep`; `asyncio.timeout` needs a task.
    """

    __slots__ = (
        "_all_answered",
        "_answered",
        "_connections",
        "_context",
        "_pipeline_run",
        "_server",
        "_stream_ids",
        "deadlines_s",
        "messages",
        "metadata",
        "received_s",
        "request_ids",
    )

    def __init__(
        self, server: Http2Server, calls: Sequence[GrpcQueuedCall], *, has_request_ids: bool, wants_metadata: bool
    ) -> None:
        self._server = server
        self._answered: set[int] = set()  # indexes of calls that have their response
        self._all_answered = False
        self._connections, self._stream_ids, self.messages, at_s, all_headers = zip(*calls, strict=True)
        self.deadlines_s = [at + headers.deadline_in_s for at, headers in zip(at_s, all_headers, strict=True)]
        self.received_s: float = min(at_s)  # arrival of the first call
        self.request_ids = [headers.request_id for headers in all_headers] if has_request_ids else None
        self.metadata = [headers.metadata for headers in all_headers] if wants_metadata else ()

    def begin(self, pipeline_run: Coroutine[Any, Any, None], context: Context | None) -> None:
        """Run the pipeline until it awaits something, and continue when that is done. Never raises.

        `context` is the one in which it runs; None: that of the caller, which it must not change.
        """
        self._pipeline_run = pipeline_run
        self._context = context
        if context is None:
            self._step()
        else:
            context.run(self._step)

    def _step(self, _: object = None) -> None:
        try:
            awaited = self._pipeline_run.send(None)
        except StopIteration:
            return
        except Exception:  # other batches of this iteration must not be affected
            _log.exception("batch_failed")
            return
        # The event loop enters the context before each further step.
        if awaited is None:  # asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(self._step, context=self._context)
        else:
            # A task does the same: the flag distinguishes a future that is awaited from one yielded by mistake.
            awaited._asyncio_future_blocking = False
            awaited.add_done_callback(self._step, context=self._context)

    def respond(self, number: int, response: Response) -> None:
        self._answered.add(number)
        self._server.on_answered(1)
        self._respond(self._connections[number], self._stream_ids[number], response)

    def respond_all(self, responses: Sequence[Response]) -> None:
        self._all_answered = True
        server = self._server
        server.on_answered(len(responses))
        unflushed: list[GrpcProtocol] = []
        server.unflushed = unflushed
        try:
            for connection, stream_id, response in zip(self._connections, self._stream_ids, responses, strict=True):
                if isinstance(response, bytes):
                    try:
                        connection.respond(stream_id, response)
                    except Exception:
                        self._on_failure(connection)
                else:
                    self._respond(connection, stream_id, response)
        finally:
            server.unflushed = None
        for connection in unflushed:
            connection.flush()

    def respond_rest(self, error: RpcError) -> Sequence[int]:
        if self._all_answered:
            return ()
        rest = [number for number in range(len(self.messages)) if number not in self._answered]
        for number in rest:
            self.respond(number, error)
        return rest

    def _respond(self, connection: GrpcProtocol, stream_id: int, response: Response) -> None:
        try:
            if isinstance(response, bytes):
                connection.respond(stream_id, response)
            elif isinstance(response, RpcError):
                connection.fail(stream_id, response)
            else:
                self._server.delay(connection, stream_id, response)
        except Exception:
            self._on_failure(connection)

    @staticmethod
    def _on_failure(connection: GrpcProtocol) -> None:
        """Close a connection on which a response could not be sent. Other calls of the batch are not affected."""
        _log.exception("response_failed")
        connection.abort()


class _Method:
    """A method with its pipeline, and the calls that arrived in this event loop iteration."""

    __slots__ = ("pipeline", "queue", "wants_metadata")

    def __init__(self, pipeline: Pipeline[Any]) -> None:
        self.pipeline = pipeline
        self.queue: list[GrpcQueuedCall] = []
        self.wants_metadata = pipeline.wants_metadata


class Http2Server:
    """gRPC server on our own HTTP/2 connections."""

    def __init__(
        self,
        options: GrpcOptions,
        pipelines: Mapping[str, Pipeline[Any]],
        throttle_queue: ThrottleQueue,
        health: Health,
        *,
        abuse: AbuseLog,
        directory: Path,
        services: Sequence[StandardService] = (),
    ) -> None:
        """Create a server that is not listening yet. Raises SettingsError if the TLS files cannot be used."""
        self._options = options
        self._call_budget = options.call_budget or CallBudget(0, 0)
        self._check_timer: asyncio.TimerHandle | None = None
        self.slow_lane: SlowLane  # once started
        self.bulk_lane: SlowLane  # once started
        self.abuse = abuse
        age_s, grace_s = options.max_connection_age_s, options.max_connection_age_grace_s
        self.max_age_s = inf if age_s is None else age_s
        self.max_age_grace_s = inf if grace_s is None else grace_s
        self._methods = {method: _Method(pipeline) for method, pipeline in pipelines.items()}
        self._health_check = HealthCheck(health)
        self._health_checks: list[GrpcQueuedCall] = []
        header_parser = CallHeadersParser(
            {path: one.queue for path, one in self._methods.items()} | {HEALTH_CHECK: self._health_checks},
            options.request_id_metadata,
            {path: one.max_message_bytes for path, one in pipelines.items()} | {HEALTH_CHECK: MAX_CHECK_BYTES},
        )
        self.config = Config(header_parser, options.max_concurrent_streams, MAX_MESSAGE_BYTES, options.limits.timeouts)
        self._has_request_ids = bool(options.request_id_metadata)
        self._throttle_queue = throttle_queue
        self._tls = TlsListener(options.tls, abuse) if options.tls is not None else None
        self._listening: asyncio.Server | None = None
        self._unix_path = ""
        self._services = StandardServices(health, services)
        self._aio_server = aio.server(options=SERVER_OPTIONS)
        self._aio_target = f"unix:{directory / 'aio.sock'}"
        self._proxy = CallProxy(self._aio_target)
        self._connections = OpenConnections(options.limits, self.config, abuse)
        self._is_dispatch_scheduled = False
        # None: calls are decided in the iteration of the event loop in which they arrive.
        self._window: BatchWindow | None = None
        if options.batch_window_s > 0:
            self._window = BatchWindow(options.batch_window_s, throttle_queue.margin_s, self.on_calls_queued)
        self._backlog: Backlog[_Method] = Backlog()
        self.in_progress = 0  # calls that are being decided
        self.unflushed: list[GrpcProtocol] | None = None
        self._delayed = 0

    @property
    def in_flight(self) -> int:
        return self.in_progress + self._delayed + self._backlog.count

    async def start(self) -> int:
        """Listen on the target of the options. Return the port; the kernel chooses one for port 0."""
        target = self._options.target
        listening = listening_socket(target, reuse_port=self._options.reuse_port)
        port = 0 if target.startswith("unix:") else int(listening.getsockname()[1])
        self._unix_path = target.removeprefix("unix:") if target.startswith("unix:") else ""
        await self._services.attach(self._aio_server)
        self._aio_server.add_insecure_port(self._aio_target)
        await self._aio_server.start()
        loop = asyncio.get_running_loop()
        self.slow_lane = SlowLane(loop.call_soon)
        self.bulk_lane = SlowLane(loop.call_soon, lambda: self._backlog.count > MAX_READ_AHEAD)
        self._check_timer = loop.call_later(CHECK_INTERVAL_S, self._check_connections)
        if self._tls is not None:
            self._tls.start(listening, lambda: GrpcProtocol(self))
        else:
            self._listening = await loop.create_server(
                lambda: GrpcProtocol(self), sock=listening, backlog=LISTEN_BACKLOG
            )
        return port

    async def drain(self, timeout_s: float) -> None:
        """Wait until no call is in flight, for at most `timeout_s`. New calls are still served."""
        await wait_until_zero(lambda: self.in_flight, timeout_s)

    async def close(self) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        if self._window is not None:
            self._window.close()
        if self._listening is not None:
            self._listening.close()
        if self._tls is not None:
            await self._tls.close()
        if self._unix_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._unix_path)
        for connection in self._connections:
            connection.drain()
        await wait_until_zero(lambda: len(self._connections), CLOSE_GRACE_S)
        for connection in list(self._connections):
            connection.close()
        await self._proxy.close()
        await self._services.close()
        await self._aio_server.stop(None)
        await wait_until_zero(lambda: len(self._connections), CLOSE_GRACE_S)
        for connection in list(self._connections):
            connection.abort()

    # ── called by connections ──

    def admit(self, connection: GrpcProtocol) -> Abuse | None:
        return self._connections.admit(connection)

    def on_connection_lost(self, connection: GrpcProtocol) -> None:
        self._connections.remove(connection)

    def on_buffered(self, more_bytes: int) -> None:
        self._connections.on_buffered(more_bytes)

    def proxy(self, connection: GrpcProtocol, stream_id: int, headers: CallHeaders) -> ProxiedCall | RpcError:
        max_messages = MAX_MESSAGES.get(headers.path)
        if max_messages is None:
            return _UNIMPLEMENTED
        return self._proxy.call(connection, stream_id, headers, max_messages)

    def on_calls_queued(self) -> None:
        """Dispatch queued calls at the end of this event loop iteration, together with others that arrive until
        then."""
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def on_cancelled(self, connection: GrpcProtocol, stream_id: int) -> bool:
        """Release the slot of a delayed call. Other calls need no action: they may be counted already, and the
        connection drops the response of a cancelled call."""
        was_delayed = self._throttle_queue.leave((connection, stream_id))
        if was_delayed:
            self._delayed -= 1
        return not was_delayed

    # ── called by batches ──

    def on_answered(self, calls: int) -> None:
        """Count calls that were decided. If no others are being decided, those that wait for a batch go on."""
        self.in_progress -= calls
        if self._window is not None and self._window.is_open and not self.in_progress:
            self.on_calls_queued()

    def delay(self, connection: GrpcProtocol, stream_id: int, response: DelayedResponse) -> None:
        """Hold the response of a throttled call until its slot comes."""
        if connection.is_waiting(stream_id):
            self._delayed += 1
            self._throttle_queue.hold((connection, stream_id), response, self._respond_delayed)
        else:
            connection.discard()
            self._throttle_queue.decline(response)

    # ── dispatching ──

    def _dispatch(self) -> None:
        self._is_dispatch_scheduled = False
        if self._health_checks:
            self._respond_to_health_checks()
        if self._window is not None:
            if self._wait_for_more(self._window):
                return
            self._window.close()
        if self._call_budget.is_limited:
            for method in self._methods.values():
                self._reject_over_budget(method.queue)
        called = [method for method in self._methods.values() if method.queue]
        messages = [call[2] for method in called for call in method.queue]
        if self._backlog.count or not fits_iteration(messages, MAX_ITERATION_WEIGHT):
            self._dispatch_from_backlog()
            return
        for method in called:
            calls = method.queue.copy()
            method.queue.clear()
            self._start_pipeline(method, calls)

    def _wait_for_more(self, window: BatchWindow) -> bool:
        """Return True if the queued calls wait for others: only while the process is busy, but not too busy."""
        if not self.in_progress or self._backlog.count:
            return False
        queues = [method.queue for method in self._methods.values() if method.queue]
        return bool(queues) and window.holds(sorted(chain(*queues), key=itemgetter(3)))

    def _respond_to_health_checks(self) -> None:
        for connection, stream_id, message, _, _ in self._health_checks:
            response = self._health_check.respond(message)
            if isinstance(response, bytes):
                connection.respond(stream_id, response)
            else:
                connection.fail(stream_id, response)
        self._health_checks.clear()

    def _dispatch_from_backlog(self) -> None:
        now_s = monotonic()
        for method in self._methods.values():
            for connection, stream_id, *_ in self._backlog.add(method, method.queue):
                connection.reject(stream_id, _BACKLOG_FULL, now_s)
            method.queue.clear()
        for method, calls in self._backlog.take(BACKLOG_ITERATION_WEIGHT).items():
            self._start_pipeline(method, calls)
        if self._backlog.count:
            self.on_calls_queued()

    def _start_pipeline(self, method: _Method, calls: Sequence[GrpcQueuedCall]) -> None:
        """Run the pipeline of a method on a batch of calls."""
        batch = _Batch(self, calls, has_request_ids=self._has_request_ids, wants_metadata=method.wants_metadata)
        self.in_progress += len(calls)
        # Spans are current in a context, so each traced batch has its own.
        batch.begin(method.pipeline.run(batch), copy_context() if method.wants_metadata else None)

    def _reject_over_budget(self, queue: list[GrpcQueuedCall]) -> None:
        admitted: list[GrpcQueuedCall] = []
        for call in queue:
            connection, stream_id = call[0], call[1]
            abuse = self._call_budget.spend(connection.peer)
            if abuse is None:
                admitted.append(call)
            else:
                connection.fail(stream_id, RpcError(StatusCode.RESOURCE_EXHAUSTED, BUDGET_SPENT, abuse))
        queue[:] = admitted

    def _check_connections(self) -> None:
        self._check_timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_connections)
        self._connections.check()

    def _respond_delayed(self, key: _CallKey, response: bytes) -> None:
        self._delayed -= 1
        connection, stream_id = key
        connection.respond(stream_id, response)
