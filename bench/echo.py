"""Bare echo: a transport that answers every call with the same bytes, which is the least any service on it can cost.

`python -m bench.echo native|grpcio [CERTIFICATE KEY]` serves on a free loopback port, which its first line names.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from pathlib import Path

import uvloop

from bench.wire import METHOD

# What the service says to two descriptors: OK overall, and for each its code, limit, what remains and when it resets.
_STATUS = bytes.fromhex("08011208088094ebdc03100318ff93ebdc03220308880e")
ANSWER = b"\x08\x01" + 2 * (bytes([0x12, len(_STATUS)]) + _STATUS)
BATCH_CALLS = 256


def start_native(target: str) -> int:
    """Serve on the front itself, in batches with call details, one I/O thread and one dispatcher; the port."""
    from pygrpc_native import EVENT_CALL, NativeGrpcFront

    front = NativeGrpcFront(target, [(METHOD, False)], io_threads=1, call_details=True)
    front.start()

    def dispatch() -> None:
        while (events := front.recv_batch_details(BATCH_CALLS)) is not None:
            for event in events:
                if event[0] == EVENT_CALL:
                    front.respond(event[1], ANSWER)

    threading.Thread(target=dispatch, daemon=True).start()
    return int(front.bound_port)


async def start_grpcio(target: str) -> tuple[object, int]:
    """Serve on grpc.aio with a handler that neither parses nor serialises; the server, to be kept, and its port."""
    import grpc

    async def answer(request: bytes, context: object) -> bytes:
        return ANSWER

    service, method = METHOD[1:].split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answer)})]
    )
    port = server.add_insecure_port(target)
    await server.start()
    return server, port


async def serve(transport: str, certificate: str | None, key: str | None) -> None:
    """Serve until the process is ended; with a certificate, behind the service's own TLS listener."""
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
            from ratelimit_rls.transport.grpc.certificates import TlsFiles
            from ratelimit_rls.transport.grpc.pipe import Pipe
            from ratelimit_rls.transport.grpc.tls import TlsListener
            from ratelimit_rls.transport.listen import listening_socket

            listener, listening = TlsListener(TlsFiles(certificate, key)), listening_socket("127.0.0.1:0")
            port = listening.getsockname()[1]
            listener.start(listening, Pipe(behind).new_end)
            kept.append(listener)
        print(port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    transport, certificate, key = [*sys.argv[1:], None, None][:3]
    assert transport is not None
    uvloop.run(serve(transport, certificate, key))
