"""Rules from a management server over xDS: the state of the world, on one ADS stream, as a source of rules.

    response ─► read() as documents ─► compiled and in force ─► ACK        (the loader's, as with files)
                                    └► refused, the old ones stay ─► NACK

`watch` yields once for each response and goes on when the loader has tried it: what the server is told is what became
of that very attempt. A version is called accepted only while its rules are in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from ratelimit_rls.errors import Problem, RateLimitRlsError, RulesError, one_line
from ratelimit_rls.rules.load import Source
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.rules.sources import xds
from ratelimit_rls.telemetry.collected import Series
from ratelimit_rls.telemetry.instruments import XDS_CONNECTED
from ratelimit_rls.transport.grpc.ads_pauses import Pauses
from ratelimit_rls.transport.grpc.ads_stream import AdsServer, AdsStream, FilesChanged, StreamEnded, open_stream
from ratelimit_rls.transport.grpc.ads_tls import FileStates
from ratelimit_rls.transport.grpc.messages import DiscoveryRequest, RateLimitConfig

CONFIG_NAME: str = RateLimitConfig.DESCRIPTOR.full_name
TYPE_URL = f"type.googleapis.com/{CONFIG_NAME}"

SILENCE_S = 5.0
"""A server that has neither answered a new stream nor ended it by then is there, and holds what we have for newest."""

LONGEST_REFUSAL = 4096
"""Of the reasons that a server is told."""

LONGEST_VERSION = 100
"""Of a version that is logged."""

INVALID_ARGUMENT = 3

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AdsNode:
    """Who we say we are."""

    id: str
    metadata: Mapping[str, str]


class AdsRules:
    """A management server as a source of rules. What came last is kept, to be read again at any time."""

    def __init__(self, server: AdsServer, node: AdsNode, rules: Rules, pauses: Pauses, eager_s: float) -> None:
        """While there are no `rules` at all, no pause is longer than `eager_s`."""
        self._server = server
        self._node = node
        self._rules = rules
        self._pauses = pauses
        self._eager_s = eager_s
        self._received: Any = None
        self._read: Any = None  # what is being loaded: another may come meanwhile
        self._accepted = ""
        self._is_connected = False

    def check(self) -> None:
        """That nobody answers yet is no reason not to start."""

    def read(self) -> list[Source] | None:
        """What the last response says; raises RulesError if it says nothing that rules could be made of."""
        self._read = self._received
        return None if self._read is None else xds.documents(_configs(self._read))

    def explain(self, error: RulesError) -> RulesError:
        """What is wrong with what was read, by descriptor."""
        return xds.explained(error, _configs(self._read))

    def measured(self) -> Iterator[tuple[Series, int]]:
        yield Series(XDS_CONNECTED.name, ()), int(self._is_connected)

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yield after every response. Goes on for ever, from one stream to the next."""
        while True:
            seen = self._server.file_states()
            try:
                async with open_stream(self._server, seen) as stream:
                    await self._subscribe(stream)
                    while True:
                        response = self._received = await stream.receive()
                        self._connected()
                        self._pauses.reset()
                        yield
                        await stream.send(self._verdict(response))
            except FilesChanged:
                self._is_connected = False
                _log.info("connecting to xDS anew with changed TLS files", server=self._server.target)
            except StreamEnded as ended:
                self._is_connected = False
                await self._pause(ended, seen)

    async def _subscribe(self, stream: AdsStream) -> None:
        """To all there is. The version says what is in force, so that it need not be sent again.

        A server that was restarted may count its versions from one again, and take what we have for what it has. So
        where nothing comes, all is asked for once more; rules that are as they were cost nothing.
        """
        await stream.send(self._request())
        if await stream.is_answered(SILENCE_S):
            return  # by a response or by the end
        self._connected()
        if self._accepted:
            request = self._request()
            request.version_info = ""
            await stream.send(request)

    def _connected(self) -> None:
        """Said of a stream that has brought something, or has lasted.

        That a request could be sent shows no more than that something there speaks HTTP/2, a proxy without a server
        behind it as well. Servers that have nothing to send do not even begin their answer, so that only time shows
        that one of them is there.
        """
        if not self._is_connected:
            self._is_connected = True
            _log.info("connected to xDS", server=self._server.target, version=_short(self._accepted))

    def _verdict(self, response: Any) -> Any:
        """ACK or NACK, by what became of the response."""
        error, version = self._rules.last_error, _short(response.version_info)
        if error is None:
            self._accepted = response.version_info
            _log.info("xDS configuration accepted", version=version, resources=len(response.resources))
        else:
            _log.warning("xDS configuration refused", version=version, version_kept=_short(self._accepted))
        request = self._request()
        request.response_nonce = response.nonce
        if error is not None:
            request.error_detail.code = INVALID_ARGUMENT
            request.error_detail.message = _told(error)
        return request

    def _request(self) -> Any:
        request = DiscoveryRequest(version_info=self._accepted, type_url=TYPE_URL)
        request.node.id = self._node.id
        if self._node.metadata:
            request.node.metadata.update(self._node.metadata)
        return request

    async def _pause(self, ended: StreamEnded, seen: FileStates) -> None:
        """Until the next attempt; changed TLS files cut it short."""
        pause_s = self._pauses.next_s(self._eager_s) if self._rules.current is None else self._pauses.next_s()
        _log.warning(
            "no connection to xDS", server=self._server.target, error=str(ended), next_attempt_s=round(pause_s, 1)
        )
        if self._server.tls is None:
            await asyncio.sleep(pause_s)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._server.tls.until_changed(seen)


def _configs(response: Any) -> list[xds.Config]:
    """Raises RulesError with every resource that is not a RateLimitConfig."""
    configs: list[xds.Config] = []
    problems: list[Problem] = []
    if response.type_url not in ("", TYPE_URL):
        problems.append(Problem("response", 1, 1, _foreign(response.type_url)))
    for at, resource in enumerate(response.resources):
        try:
            configs.append(_config(resource))
        except ValueError as error:
            problems.append(Problem(f"resources[{at}]", 1, 1, str(error)))
    if problems:
        raise RulesError(problems)
    return configs


def _config(resource: Any) -> xds.Config:
    if resource.type_url.rpartition("/")[2] != CONFIG_NAME:
        raise ValueError(_foreign(resource.type_url))
    try:
        config = RateLimitConfig.FromString(resource.value)
        return json_format.MessageToDict(config, preserving_proto_field_name=True)
    except DecodeError as error:
        raise ValueError(f"its bytes are not a {CONFIG_NAME}") from error
    except json_format.Error as error:  # a number that is none
        raise ValueError(f"error parsing metadata: {error}") from error


def _foreign(type_url: str) -> str:
    return f"it is of type {type_url[:LONGEST_VERSION]!r}; {TYPE_URL} was asked for"


def _told(error: RateLimitRlsError) -> str:
    text = str(error)
    return text if len(text) <= LONGEST_REFUSAL else text[:LONGEST_REFUSAL] + "…"


def _short(version: str) -> str:
    return one_line(version)[:LONGEST_VERSION]
