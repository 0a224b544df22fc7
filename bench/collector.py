"""Telemetry collector: `python -m bench.collector METRICS_URL` prints its port on the first line.

It receives traces by OTLP over HTTP and scrapes metrics. It keeps only the numbers of both, which a GET returns.
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
"""Scrape interval.

A measurement of a second contains about one scrape; Prometheus usually scrapes every 15 s, which costs less.
"""


@dataclass(slots=True)
class Received:
    calls: int = 0  # traced calls: server spans
    scrapes: int = 0


def fetch_received(url: str) -> Received:
    """Return the numbers of a collector."""
    with urlopen(url) as answer:
        return Received(**json.load(answer))


def scrape(url: str) -> bool:
    """Return True if metrics were returned: a starting or stopping service has none."""
    with suppress(OSError, HTTPException), urlopen(url) as answer:
        return bool(answer.read())
    return False


def traced_calls(export: bytes) -> int:
    """Return the number of server spans in an ExportTraceServiceRequest; a call also has internal spans."""
    # Imported here: only the collector process needs it.
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    scopes = (
        scope for whole in ExportTraceServiceRequest.FromString(export).resource_spans for scope in whole.scope_spans
    )
    return sum(span.kind == Span.SPAN_KIND_SERVER for scope in scopes for span in scope.spans)


def server(so_far: Received) -> ThreadingHTTPServer:
    """Return a server on a free loopback port, not serving yet."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            so_far.calls += traced_calls(self.rfile.read(int(self.headers["content-length"])))
            self._answer(b"")  # empty protobuf message: everything was accepted

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
    so_far = Received()
    listening = server(so_far)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    print(listening.server_address[1], flush=True)
    while True:
        so_far.scrapes += scrape(sys.argv[1])
        time.sleep(SCRAPE_EVERY_S)


if __name__ == "__main__":
    main()
