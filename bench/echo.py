"""Bare echo: a transport that responds to every call with the same bytes, the minimum cost of any service on it.

`python -m bench.echo native|grpcio [CERTIFICATE KEY]` serves on a free loopback port and prints it on the first line.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from pathlib import Path

import uvloop

from bench.wire import METHOD

# Response of the service to two descriptors: OK, and for each its code, limit, remaining hits and reset time.
_STATUS = bytes.fromhex("08011208088094ebdc03100318ff93ebdc03220308880e")
RESPONSE = b"\x08\x01" + 2 * (bytes([0x12, len(_STATUS)]) + _STATUS)
BATCH_CALLS = 256


def start_native(target: str) -> int:
    """Serve with pygrpc-native, in batches with call details, one I/O thread and one dispatcher; return the port."""
    from pygrpc_native import EVENT_CALL, NativeGrpcFront

    front = NativeGrpcFront(target, [(METHOD, False)], io_threads=1, call_details=True)
    front.start()

    def dispatch() -> None:
        while (events := front.recv_batch_details(BATCH_CALLS)) is not None:
            for event in events:
                if event[0] == EVENT_CALL:
                    front.respond(event[1], RESPONSE)

    threading.Thread(target=dispatch, daemon=True).start()
    return int(front.bound_port)


async def start_grpcio(target: str) -> tuple[object, int]:
    """Serve with grpc.aio and a handler without parsing; return the server, to be kept, and its port."""
    import grpc

    async def answer(request: bytes, context: object) -> bytes:
        return RESPONSE

    service, method = METHOD[1:].split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answer)})]
    )
    port = server.add_insecure_port(target)
    await server.start()
    return server, port


async def serve(transport: str, certificate: str | None, key: str | None) -> None:
    """Serve until the process is stopped; with a certificate, behind the service's own TLS listener."""
    with tempfile.TemporaryDirectory(prefix="echo-") as directory:
        behind = Path(directory) / "grpc.sock"
        target = f"unix:{behind}" if certificate else "127.0.0.1:0"
        kept: list[object] = []
        if transport == "native":
            port = start_native(target)
        else:
            server, port = await start_grpcio(target)
            kept.append(server)
        if certificate and key:
            from bench.pipe import Pipe
            from ratelimit_rls.telemetry.abuse import AbuseLog
            from ratelimit_rls.tls.certificates import TlsFiles
            from ratelimit_rls.transport.sockets import listening_socket
            from ratelimit_rls.transport.tls_listener import TlsListener

            listener = TlsListener(TlsFiles(certificate, key), AbuseLog())
            listening = listening_socket("127.0.0.1:0")
            port = listening.getsockname()[1]
            listener.start(listening, Pipe(behind).new_end)
            kept.append(listener)
        print(port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    transport, certificate, key = [*sys.argv[1:], None, None][:3]
    assert transport is not None
    uvloop.run(serve(transport, certificate, key))
