"""One ADS stream to a management server, from connecting to its end: sends requests, receives responses.

Each stream has its own connection, made with the current TLS files. It ends with one exception, whichever side ended
it, with the reason in one line.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from ratelimit_rls.errors import SettingsError, one_line
from ratelimit_rls.protos.messages import STREAM_RESOURCES, DiscoveryRequest, DiscoveryResponse
from ratelimit_rls.rules.sources.xds.tls import AdsTlsFiles, FileStates

DEFAULT_MAX_MESSAGE_BYTES = 4 << 20
"""gRPC's default."""

KEEPALIVE_TIMEOUT_S = 20.0
"""After this time without an answer to a ping the server counts as lost."""

MAX_REASON_LENGTH = 500

MIN_SECRET = 4
"""Characters of a word of a header's value that is redacted. Shorter words occur in every sentence."""

_WORD = re.compile(r"""[^\s"',:;=]+""")


@dataclass(frozen=True, slots=True)
class AdsServer:
    """Address and credentials of a management server."""

    target: str
    tls: AdsTlsFiles | None = None
    name: str = ""  # expected in its certificate; "": the host of the target
    headers: tuple[tuple[str, str | bytes], ...] = field(default=(), repr=False)
    max_bytes: int = DEFAULT_MAX_MESSAGE_BYTES  # per response
    keepalive_s: float = 310.0

    def channel(self) -> aio.Channel:
        """Return a new channel. Raise SettingsError if the TLS files cannot be used."""
        options: list[tuple[str, Any]] = [
            ("grpc.use_local_subchannel_pool", 1),  # otherwise gRPC might reuse the connection that is to be replaced
            ("grpc.max_receive_message_length", self.max_bytes),
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
            ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),  # gRPC waits for the longer of the two
            ("grpc.http2.max_pings_without_data", 0),  # nothing is sent while nothing changes
            ("grpc.enable_retries", 0),
        ]
        if self.tls is None:
            return aio.insecure_channel(self.target, options)
        if self.name:
            options.append(("grpc.ssl_target_name_override", self.name))
        return aio.secure_channel(self.target, self.tls.credentials(), options)

    def file_states(self) -> FileStates:
        return self.tls.state() if self.tls else ()

    def redact(self, text: str) -> str:
        """Return a server's error message fit for a log: on one line, with the header values we sent redacted.

        A server may repeat part of a header's value, since `Bearer` and the token are two words, and in another case.
        """
        values = [value.decode(errors="replace") if isinstance(value, bytes) else value for _, value in self.headers]
        words = [
            word for value in values for word in (*value.split(), *_WORD.findall(value)) if len(word) >= MIN_SECRET
        ]
        secrets = sorted(filter(None, {*values, *words}), key=len, reverse=True)
        if secrets:
            text = re.sub("|".join(map(re.escape, secrets)), "***", text, flags=re.IGNORECASE)
        return one_line(text)[:MAX_REASON_LENGTH]


class StreamEnded(Exception):
    """The server, the network or an invalid message ended the stream, or it could not be opened."""


class FilesChanged(Exception):
    """The TLS files have changed: the stream must be replaced by one that uses the new ones."""


class AdsStream:
    def __init__(self, server: AdsServer, channel: aio.Channel, seen: FileStates) -> None:
        self._server = server
        stream: aio.StreamStreamMultiCallable[Any, bytes] = channel.stream_stream(
            STREAM_RESOURCES, request_serializer=DiscoveryRequest.SerializeToString
        )
        self._call: Any = stream(metadata=server.headers)
        self._reading: asyncio.Task[Any] | None = None
        self._changing = asyncio.create_task(server.tls.until_changed(seen)) if server.tls else None

    async def send(self, request: Any) -> None:
        """Send a request; the first call returns once connected. Raise StreamEnded if there is no connection."""
        try:
            await self._call.write(request)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise await self._end() from error

    async def wait_for_response(self, within_s: float | None = None) -> bool:
        """Wait until a response, or the end of the stream, has arrived; None: without a timeout. Raise FilesChanged.

        Return False after the timeout.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
        waited_for = {self._reading, self._changing} if self._changing else {self._reading}
        await asyncio.wait(waited_for, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if self._changing is not None and self._changing.done() and not self._reading.done():
            raise FilesChanged
        return self._reading.done()

    async def receive(self) -> Any:
        """Return the next response. Raise StreamEnded or FilesChanged."""
        await self.wait_for_response()
        reading, self._reading = self._reading, None
        assert reading is not None
        try:
            content = reading.result()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise await self._end() from error
        if content is aio.EOF:
            raise await self._end()
        try:
            return DiscoveryResponse.FromString(content)
        except DecodeError as error:
            raise StreamEnded("a response is not a DiscoveryResponse") from error

    async def _end(self) -> StreamEnded:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return StreamEnded("the server ended the stream")
        reason = f"{code.name}: {self._server.redact(details or '')}"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            reason += "; XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES is the limit for responses"
        return StreamEnded(reason)

    async def close(self) -> None:
        tasks = [task for task in (self._reading, self._changing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._call.cancel()


@asynccontextmanager
async def open_stream(server: AdsServer, seen: FileStates) -> AsyncIterator[AdsStream]:
    """Open a stream. Raise StreamEnded if its TLS files cannot be used.

    The server may still turn out to be unreachable. `seen` are the states of the files from before they are read here,
    so that no change in between is missed.
    """
    try:
        channel = server.channel()
    except SettingsError as error:
        raise StreamEnded(str(error)) from error
    try:
        stream = AdsStream(server, channel, seen)
        try:
            yield stream
        finally:
            await stream.close()
    finally:
        await channel.close()
