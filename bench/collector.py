"""Takes what a service tells of itself: `python -m bench.collector METRICS_URL`, on the port that its first line names.

Traces come by OTLP over HTTP, metrics are scraped. It keeps nothing but how much of both there was, which a GET says.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

SCRAPE_EVERY_S = 1.0
"""A measurement lasts a second and has about one scrape in it. Where Prometheus asks every 15 s, they cost less."""


@dataclass(slots=True)
class Taken:
    calls: int = 0  # that were traced: spans of a server
    scrapes: int = 0


def taken(url: str) -> Taken:
    """What a collector has so far."""
    with urlopen(url) as answer:
        return Taken(**json.load(answer))


def scrape(url: str) -> bool:
    """Whether there were metrics: a service that is about to start or to end has none."""
    with suppress(OSError, HTTPException), urlopen(url) as answer:
        return bool(answer.read())
    return False


def traced_calls(export: bytes) -> int:
    """Of an ExportTraceServiceRequest: a call has a span of its own, beside those of what was done for it."""
    # Only the collector's own process needs to know what a span is.
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    scopes = (
        scope for whole in ExportTraceServiceRequest.FromString(export).resource_spans for scope in whole.scope_spans
    )
    return sum(span.kind == Span.SPAN_KIND_SERVER for scope in scopes for span in scope.spans)


def server(so_far: Taken) -> ThreadingHTTPServer:
    """Not serving yet; on a free port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            so_far.calls += traced_calls(self.rfile.read(int(self.headers["content-length"])))
            self._answer(b"")  # of protobuf, the message in which nothing is said: all was taken

        def do_GET(self) -> None:
            self._answer(json.dumps(asdict(so_far)).encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def main() -> None:
    so_far = Taken()
    listening = server(so_far)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    print(listening.server_address[1], flush=True)
    while True:
        so_far.scrapes += scrape(sys.argv[1])
        time.sleep(SCRAPE_EVERY_S)


if __name__ == "__main__":
    main()
