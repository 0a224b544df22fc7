"""A management server for tests: real ADS over gRPC, which sends what it is told and keeps what it is asked.

It runs in threads, so that tests of one event loop and tests of processes use the same. The messages on the stream are
envoy-data-plane's, read by someone else's eyes; only RateLimitConfig, which that package does not have, is ours.
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

from ratelimit_rls.transport.grpc.messages import RateLimitConfig
from tests.process import free_port

with warnings.catch_warnings():
    # The package declares its validators in a way pydantic wants changed.
    warnings.simplefilter("ignore")
    from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryRequest, DiscoveryResponse
    from envoy_data_plane.google.protobuf import Any as AnyMessage

TYPE_URL = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig"
ADS = "envoy.service.discovery.v3.AggregatedDiscoveryService"
PATIENCE_S = 30.0


def config(text: str, **fields: Any) -> AnyMessage:
    """A RateLimitConfig from YAML with the proto's own field names, as a resource."""
    message = json_format.ParseDict({**yaml.safe_load(text), **fields}, RateLimitConfig())
    return resource(message.SerializeToString())


def resource(value: bytes, type_url: str = TYPE_URL) -> AnyMessage:
    return AnyMessage(type_url=type_url, value=value)


@dataclass(eq=False)
class Stream:
    """One client's stream: what it asked for, in order, and what it is to be sent."""

    metadata: Mapping[str, str | bytes]
    requests: list[DiscoveryRequest] = field(default_factory=list)
    outbox: queue.Queue[DiscoveryResponse | grpc.StatusCode | None] = field(default_factory=queue.Queue)


class AdsServer:
    """Answers every stream with what was sent last, unless the client says that it has that version.

    `certificates` are key, chain and the CA of clients, each as bytes. A restart keeps the port.
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
        """As a process that ends: every stream is cut, nobody listens."""
        self.end_streams(grpc.StatusCode.UNAVAILABLE)
        self._server.stop(0).wait()
        self._pool.shutdown()

    def send(self, version: str, *resources: AnyMessage, type_url: str = TYPE_URL) -> str:
        """To every stream there is, and to those that come; the nonce."""
        with self._news:
            self._sent += 1
            nonce = f"nonce-{self._sent}"
            self._latest = DiscoveryResponse(
                version_info=version, resources=list(resources), type_url=type_url, nonce=nonce
            )
            for stream in self.streams:
                if stream.requests:  # or it is told when it asks
                    stream.outbox.put(self._latest)
        return nonce

    def end_streams(self, code: grpc.StatusCode | None = None) -> None:
        """With a status, or in good order."""
        with self._news:
            for stream in self.streams:
                stream.outbox.put(code)

    @property
    def requests(self) -> list[DiscoveryRequest]:
        """Of all streams, in the order of the streams."""
        return [request for stream in list(self.streams) for request in list(stream.requests)]

    def wait_for(self, met: Callable[[DiscoveryRequest], bool], what: str = "") -> DiscoveryRequest:
        """The first request that meets it, whether it came already or is yet to come."""
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while True:
                for request in self.requests:
                    if met(request):
                        return request
                if not self._news.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no such request {what} among {self.requests}")

    def wait_for_streams(self, number: int) -> Stream:
        """The newest, once that many were opened and have asked for something."""
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while len(self.streams) < number or not self.streams[number - 1].requests:
                assert self._news.wait(deadline - time.monotonic()), f"{len(self.streams)} streams, not {number}"
            return self.streams[number - 1]

    def answer_to(self, nonce: str) -> DiscoveryRequest:
        """The ACK or NACK of one response."""
        return self.wait_for(lambda request: request.response_nonce == nonce, f"about {nonce}")

    def _serve(
        self, requests: Iterator[DiscoveryRequest], context: grpc.ServicerContext
    ) -> Iterator[DiscoveryResponse]:
        stream = Stream(dict(context.invocation_metadata()))
        with self._news:
            self.streams.append(stream)
        threading.Thread(target=self._listen, args=(stream, requests), daemon=True).start()
        while True:
            told = stream.outbox.get()
            if told is None:
                return
            if isinstance(told, grpc.StatusCode):
                context.abort(told, "as the test wants it")
            yield told

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
        except Exception:  # the client left, or the server ends
            pass
        with self._news:
            if stream in self.streams:
                stream.outbox.put(None)
            self._news.notify_all()
