"""One stream to a management server, from the connection to its end: requests go out, responses come in as bytes.

Each stream has a connection of its own, made with the files as they are then. It ends by one exception, whoever ended
it, which says why in one line.
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
from ratelimit_rls.transport.grpc.ads_tls import AdsTlsFiles, FileStates
from ratelimit_rls.transport.grpc.messages import STREAM_RESOURCES, DiscoveryRequest, DiscoveryResponse

USUAL_MESSAGE_BYTES = 4 << 20
"""gRPC's own bound."""

PONG_WITHIN_S = 20.0
"""Or the server is taken for gone."""

LONGEST_REASON = 500

SHORTEST_SECRET = 4
"""Of the words of a header's value. Shorter ones are in every sentence."""

_WORD = re.compile(r"""[^\s"',:;=]+""")


@dataclass(frozen=True, slots=True)
class AdsServer:
    """Where a management server is, and how to be let in."""

    target: str
    tls: AdsTlsFiles | None = None
    name: str = ""  # to expect in its certificate; empty: the host's
    headers: tuple[tuple[str, str | bytes], ...] = field(default=(), repr=False)
    most_bytes: int = USUAL_MESSAGE_BYTES  # of one response
    ping_every_s: float = 310.0

    def channel(self) -> aio.Channel:
        """Raises SettingsError if the files cannot be used."""
        options: list[tuple[str, Any]] = [
            ("grpc.use_local_subchannel_pool", 1),  # or it might be given the connection it is meant to replace
            ("grpc.max_receive_message_length", self.most_bytes),
            ("grpc.keepalive_time_ms", round(self.ping_every_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(PONG_WITHIN_S * 1000)),
            ("grpc.http2.ping_timeout_ms", round(PONG_WITHIN_S * 1000)),  # the longer of the two is waited for
            ("grpc.http2.max_pings_without_data", 0),  # for as long as nothing changes, nothing is said
            ("grpc.enable_retries", 0),
        ]
        if self.tls is None:
            return aio.insecure_channel(self.target, options)
        if self.name:
            options.append(("grpc.ssl_target_name_override", self.name))
        return aio.secure_channel(self.target, self.tls.credentials(), options)

    def file_states(self) -> FileStates:
        return self.tls.state() if self.tls else ()

    def without_secrets(self, text: str) -> str:
        """What a server says of a failure, fit for a log: one line, and what we told it in confidence left out.

        Of a header's value a server may repeat a part, `Bearer` and the token being two words, and in another case.
        """
        values = [value.decode(errors="replace") if isinstance(value, bytes) else value for _, value in self.headers]
        words = [
            word for value in values for word in (*value.split(), *_WORD.findall(value)) if len(word) >= SHORTEST_SECRET
        ]
        secrets = sorted(filter(None, {*values, *words}), key=len, reverse=True)
        if secrets:
            text = re.sub("|".join(map(re.escape, secrets)), "***", text, flags=re.IGNORECASE)
        return one_line(text)[:LONGEST_REASON]


class StreamEnded(Exception):
    """The server, the network or a bad message ended it; or there was none to begin with."""


class FilesChanged(Exception):
    """There are new TLS files: it is to be replaced by one that uses them."""


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
        """The first one returns when there is a connection; raises StreamEnded if there is none, or no more."""
        try:
            await self._call.write(request)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise await self._end() from error

    async def is_answered(self, within_s: float | None = None) -> bool:
        """Whether a response, or the end, has come by then; None: whenever it comes. Raises FilesChanged."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
        waited_for = {self._reading, self._changing} if self._changing else {self._reading}
        await asyncio.wait(waited_for, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if self._changing is not None and self._changing.done() and not self._reading.done():
            raise FilesChanged
        return self._reading.done()

    async def receive(self) -> Any:
        """The next response. Raises StreamEnded or FilesChanged."""
        await self.is_answered()
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
        why = f"{code.name}: {self._server.without_secrets(details or '')}"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            why += "; XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES bounds what is received"
        return StreamEnded(why)

    async def close(self) -> None:
        tasks = [task for task in (self._reading, self._changing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._call.cancel()


@asynccontextmanager
async def open_stream(server: AdsServer, seen: FileStates) -> AsyncIterator[AdsStream]:
    """Raises StreamEnded if the files for it cannot be used. It may yet turn out that nobody is there.

    `seen` are the files' states from before they are read here, so that no change in between is missed.
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
