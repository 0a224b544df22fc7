"""xDS client: rules from a management server over one ADS stream (state of the world), as a source of rules.

    response ─► read() as documents ─► compiled and activated ─► ACK        (by the reloader, as with files)
                                    └► rejected, the active rules stay ─► NACK

`watch` yields once per response and resumes after the reloader's attempt, so the server is sent the result of that very
attempt. A version counts as accepted only while its rules are active.
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

from ratelimit_rls.common.backoff import Backoff
from ratelimit_rls.errors import Problem, RateLimitRlsError, RulesError, one_line
from ratelimit_rls.protos.messages import DiscoveryRequest, RateLimitConfig
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.rules.sources.xds import documents
from ratelimit_rls.rules.sources.xds.stream import AdsServer, AdsStream, FilesChanged, StreamEnded, open_stream
from ratelimit_rls.rules.sources.xds.tls import FileStates
from ratelimit_rls.telemetry.instruments import XDS_CONNECTED
from ratelimit_rls.telemetry.series import Series

CONFIG_NAME: str = RateLimitConfig.DESCRIPTOR.full_name
TYPE_URL = f"type.googleapis.com/{CONFIG_NAME}"

RESPONSE_TIMEOUT_S = 5.0
"""A server that has neither answered nor ended a new stream by then is present, and has nothing newer to send."""

MAX_NACK_LENGTH = 4096
"""Characters of a NACK's error message."""

MAX_VERSION_LENGTH = 100
"""Characters of a version in the log."""

INVALID_ARGUMENT = 3

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AdsNode:
    """Identity of this client, sent with each request."""

    id: str
    metadata: Mapping[str, str]


class AdsRulesSource:
    """A management server as a source of rules. The last response is kept and can be read again at any time."""

    def __init__(
        self, server: AdsServer, node: AdsNode, rules: ActiveRules, backoff: Backoff, max_initial_delay_s: float
    ) -> None:
        """Initialise the source.

        Until there are active `rules`, no delay between attempts is longer than `max_initial_delay_s`.
        """
        self._server = server
        self._node = node
        self._rules = rules
        self._backoff = backoff
        self._eager_s = max_initial_delay_s
        self._received: Any = None
        self._read: Any = None  # the response being loaded: another may arrive meanwhile
        self._accepted = ""
        self._is_connected = False

    def check(self) -> None:
        """Do nothing: an unreachable server does not prevent the start."""

    def read(self) -> list[SourceDocument] | None:
        """Return the documents of the last response. Raise RulesError if a resource is not a RateLimitConfig."""
        self._read = self._received
        return None if self._read is None else documents.to_documents(_configs(self._read))

    def explain(self, error: RulesError) -> RulesError:
        """Add the descriptor to each problem of the last read."""
        return documents.explain_problems(error, _configs(self._read))

    def measured(self) -> Iterator[tuple[Series, int]]:
        yield Series(XDS_CONNECTED.name, ()), int(self._is_connected)

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yield after every response. Never ends: a new stream replaces one that ended."""
        while True:
            seen = self._server.file_states()
            try:
                async with open_stream(self._server, seen) as stream:
                    await self._subscribe(stream)
                    while True:
                        response = self._received = await stream.receive()
                        self._connected()
                        self._backoff.reset()
                        yield
                        await stream.send(self._ack_or_nack(response))
            except FilesChanged:
                self._is_connected = False
                _log.info("xds_tls_files_changed", address=self._server.target)
            except StreamEnded as ended:
                self._is_connected = False
                await self._pause(ended, seen)

    async def _subscribe(self, stream: AdsStream) -> None:
        """Subscribe to all resources. The request has the accepted version, so that it need not be sent again.

        A restarted server may count its versions from one again, and mistake our version for its current one. So if no
        response arrives, everything is requested once more; unchanged rules cost nothing.
        """
        await stream.send(self._request())
        if await stream.wait_for_response(RESPONSE_TIMEOUT_S):
            return  # by a response, or the stream ended
        self._connected()
        if self._accepted:
            request = self._request()
            request.version_info = ""
            await stream.send(request)

    def _connected(self) -> None:
        """Mark the stream as connected: it has delivered a response, or has lasted RESPONSE_TIMEOUT_S.

        A successful send only shows that something there speaks HTTP/2, possibly a proxy without a server behind it. A
        server with nothing to send does not even begin its response, so only time shows that it is present.
        """
        if not self._is_connected:
            self._is_connected = True
            _log.info("xds_connected", address=self._server.target, version=_loggable(self._accepted))

    def _ack_or_nack(self, response: Any) -> Any:
        """Return the ACK or NACK for a response, depending on the result of loading it."""
        error, version = self._rules.last_error, _loggable(response.version_info)
        if error is None:
            self._accepted = response.version_info
            _log.info("xds_config_accepted", version=version, resources=len(response.resources))
        else:
            _log.warning("xds_config_rejected", version=version, version_kept=_loggable(self._accepted))
        request = self._request()
        request.response_nonce = response.nonce
        if error is not None:
            request.error_detail.code = INVALID_ARGUMENT
            request.error_detail.message = _nack_message(error)
        return request

    def _request(self) -> Any:
        request = DiscoveryRequest(version_info=self._accepted, type_url=TYPE_URL)
        request.node.id = self._node.id
        if self._node.metadata:
            request.node.metadata.update(self._node.metadata)
        return request

    async def _pause(self, ended: StreamEnded, seen: FileStates) -> None:
        """Wait until the next attempt; changed TLS files end the wait."""
        pause_s = self._backoff.next_s(self._eager_s) if self._rules.current is None else self._backoff.next_s()
        _log.warning(
            "xds_connection_lost", address=self._server.target, error=str(ended), next_attempt_s=round(pause_s, 1)
        )
        if self._server.tls is None:
            await asyncio.sleep(pause_s)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._server.tls.until_changed(seen)


def _configs(response: Any) -> list[documents.Config]:
    """Return the resources as dicts. Raise RulesError with every resource that is not a RateLimitConfig."""
    configs: list[documents.Config] = []
    problems: list[Problem] = []
    if response.type_url not in ("", TYPE_URL):
        problems.append(Problem("response", 1, 1, _unexpected_type(response.type_url)))
    for at, resource in enumerate(response.resources):
        try:
            configs.append(_config(resource))
        except ValueError as error:
            problems.append(Problem(f"resources[{at}]", 1, 1, str(error)))
    if problems:
        raise RulesError(problems)
    return configs


def _config(resource: Any) -> documents.Config:
    if resource.type_url.rpartition("/")[2] != CONFIG_NAME:
        raise ValueError(_unexpected_type(resource.type_url))
    try:
        config = RateLimitConfig.FromString(resource.value)
        return json_format.MessageToDict(config, preserving_proto_field_name=True)
    except DecodeError as error:
        raise ValueError(f"the bytes are not a {CONFIG_NAME}") from error
    except json_format.Error as error:  # NaN or infinity
        raise ValueError(f"error parsing metadata: {error}") from error


def _unexpected_type(type_url: str) -> str:
    return f"type {type_url[:MAX_VERSION_LENGTH]!r}; expected {TYPE_URL}"


def _nack_message(error: RateLimitRlsError) -> str:
    text = str(error)
    return text if len(text) <= MAX_NACK_LENGTH else text[:MAX_NACK_LENGTH] + "…"


def _loggable(version: str) -> str:
    return one_line(version)[:MAX_VERSION_LENGTH]
