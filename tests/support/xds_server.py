"""xDS management server for tests: real ADS over gRPC; it records all requests.

It runs in threads, so that tests of one event loop and tests of processes can use it. The messages are those of
envoy-data-plane, an independent implementation; only RateLimitConfig, which that package lacks, is ours.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import yaml
from google.protobuf import json_format

from ratelimit_rls.protos.messages import RateLimitConfig
from tests.support.ports import free_port

with warnings.catch_warnings():
    # The package declares its validators in a deprecated way.
    warnings.simplefilter("ignore")
    from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryRequest, DiscoveryResponse
    from envoy_data_plane.google.protobuf import Any as AnyMessage

TYPE_URL = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig"
ADS = "envoy.service.discovery.v3.AggregatedDiscoveryService"
PATIENCE_S = 30.0


def config(text: str, **fields: Any) -> AnyMessage:
    """Return a RateLimitConfig resource from YAML with the field names of the proto."""
    message = json_format.ParseDict({**yaml.safe_load(text), **fields}, RateLimitConfig())
    return resource(message.SerializeToString())


def resource(value: bytes, type_url: str = TYPE_URL) -> AnyMessage:
    return AnyMessage(type_url=type_url, value=value)


@dataclass(eq=False)
class Stream:
    """Stream of one client: its requests in order, and the responses to send."""

    metadata: Mapping[str, str | bytes]
    requests: list[DiscoveryRequest] = field(default_factory=list)
    outbox: queue.Queue[DiscoveryResponse | grpc.StatusCode | None] = field(default_factory=queue.Queue)


class AdsServer:
    """Sends the latest resources on every stream, unless the client already has that version.

    `certificates` are key, chain and client CA, each as bytes. A restart keeps the port.
    """

    def __init__(self, certificates: tuple[bytes, bytes, bytes] | None = None) -> None:
        self.port = free_port()
        self.certificates = certificates
        self.streams: list[Stream] = []
        self._latest: DiscoveryResponse | None = None
        self._news = threading.Condition()
        self._sent = 0
        self._server: Any = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        handler = grpc.stream_stream_rpc_method_handler(self._serve, DiscoveryRequest.parse, bytes)
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(ADS, {"StreamAggregatedResources": handler})]
        )
        if self.certificates is None:
            assert self._server.add_insecure_port(self.address)
        else:
            key, chain, ca = self.certificates
            credentials = grpc.ssl_server_credentials([(key, chain)], ca, require_client_auth=True)
            assert self._server.add_secure_port(self.address, credentials)
        self._server.start()

    def stop(self) -> None:
        """Stop like a process that exits: close every stream and the port."""
        self.end_streams(grpc.StatusCode.UNAVAILABLE)
        self._server.stop(0).wait()
        self._pool.shutdown()

    def send(self, version: str, *resources: AnyMessage, type_url: str = TYPE_URL) -> str:
        """Send resources on all current and future streams; returns the nonce."""
        with self._news:
            self._sent += 1
            nonce = f"nonce-{self._sent}"
            self._latest = DiscoveryResponse(
                version_info=version, resources=list(resources), type_url=type_url, nonce=nonce
            )
            for stream in self.streams:
                if stream.requests:  # else it is sent on its first request
                    stream.outbox.put(self._latest)
        return nonce

    def end_streams(self, code: grpc.StatusCode | None = None) -> None:
        """End all streams, with an error status or OK."""
        with self._news:
            for stream in self.streams:
                stream.outbox.put(code)

    @property
    def requests(self) -> list[DiscoveryRequest]:
        """Return the requests of all streams, in the order of the streams."""
        return [request for stream in list(self.streams) for request in list(stream.requests)]

    def wait_for(self, matches: Callable[[DiscoveryRequest], bool], what: str = "") -> DiscoveryRequest:
        """Return the first request that satisfies a condition; waits for it."""
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while True:
                for request in self.requests:
                    if matches(request):
                        return request
                if not self._news.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no such request {what} among {self.requests}")

    def wait_for_streams(self, number: int) -> Stream:
        """Return the latest stream once `number` streams were opened and have sent a request."""
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while len(self.streams) < number or not self.streams[number - 1].requests:
                assert self._news.wait(deadline - time.monotonic()), f"{len(self.streams)} streams, not {number}"
            return self.streams[number - 1]

    def answer_to(self, nonce: str) -> DiscoveryRequest:
        """Return the ACK or NACK of a response."""
        return self.wait_for(lambda request: request.response_nonce == nonce, f"about {nonce}")

    def _serve(
        self, requests: Iterator[DiscoveryRequest], context: grpc.ServicerContext
    ) -> Iterator[DiscoveryResponse]:
        stream = Stream(dict(context.invocation_metadata()))
        with self._news:
            self.streams.append(stream)
        threading.Thread(target=self._listen, args=(stream, requests), daemon=True).start()
        while True:
            result = stream.outbox.get()
            if result is None:
                return
            if isinstance(result, grpc.StatusCode):
                context.abort(result, "as the test wants it")
            yield result

    def _listen(self, stream: Stream, requests: Iterator[DiscoveryRequest]) -> None:
        try:
            for request in requests:
                with self._news:
                    is_new = not request.response_nonce
                    latest = self._latest
                    stream.requests.append(request)
                    if is_new and latest is not None and latest.version_info != request.version_info:
                        stream.outbox.put(latest)
                    self._news.notify_all()
        except Exception:  # the client disconnected, or the server stops
            pass
        with self._news:
            if stream in self.streams:
                stream.outbox.put(None)
            self._news.notify_all()
