"""TLS termination: connections are decrypted here, and passed to their protocol once the client is admitted.

A connection keeps the certificates it started with; new connections use the latest ones. The protocol receives no data
from a client before its certificate was accepted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import cast

import structlog

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.tls.key_updates import BoundedSslObject
from ratelimit_rls.transport.peers import UNIX, PendingTasks

HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 1.0
ACCEPT_PAUSE_S = 0.1
RELOAD_INTERVAL_S = 1.0
"""Interval for checking the files for changes. A check is one stat call per file. It detects symbolic links that are
swapped on a mounted volume, which file notifications may miss."""

OPENSSL_CLOCK = timedelta(seconds=1)
"""Resolution of OpenSSL's clock. A context must not issue sessions while OpenSSL may still accept an expired CRL."""

_log = structlog.get_logger()

MAX_HANDSHAKES = 256
MAX_HANDSHAKES_PER_PEER = 64
"""Concurrent handshakes. A handshake costs CPU for a client that is not authenticated yet."""

NewProtocol = Callable[[], asyncio.Protocol]


class TlsListener:
    """Accepts TLS connections, and reloads changed files."""

    def __init__(self, files: TlsFiles, abuse: AbuseLog) -> None:
        """Load the files. Raises SettingsError if they cannot be used."""
        self._files = files
        self._abuse = abuse
        self._handshakes = PendingTasks(MAX_HANDSHAKES, MAX_HANDSHAKES_PER_PEER)
        self._state = files.state()
        self._context, self._crl_expiry = files.load()
        self._rejects_sessions = False
        self._error = ""  # why the current files cannot be used
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, listening: socket.socket, new_protocol: NewProtocol) -> None:
        """Start accepting clients on this socket; each admitted client gets its own protocol."""
        self._run(self._accept(listening, new_protocol))
        self._run(self._watch())

    async def close(self) -> None:
        """Stop accepting clients. Existing connections stay open."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket, new_protocol: NewProtocol) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    client, address = await loop.sock_accept(listening)
                except OSError as error:  # out of file descriptors, or the client disconnected at once
                    _log.warning("tls_accept_failed", error=str(error))
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                peer = address[0] if isinstance(address, tuple) else UNIX
                if self._begin_handshake(client, peer, new_protocol):
                    await asyncio.sleep(0)  # let handshakes proceed while many clients wait to be accepted

    def _begin_handshake(self, client: socket.socket, peer: str, new_protocol: NewProtocol) -> bool:
        """Start a handshake. Return whether another one was evicted in its favour."""
        task = self._run(self._serve(client, peer, new_protocol))
        evicted = self._handshakes.add(task, peer)

        def end(_: asyncio.Task[None]) -> None:
            self._handshakes.discard(task, peer)
            if task.cancelled():  # possibly before it started
                client.close()

        task.add_done_callback(end)
        if evicted is None:
            return False
        self._abuse.record(evicted.reason, evicted.address)
        evicted.task.cancel()
        return True

    async def _serve(self, client: socket.socket, peer: str, new_protocol: NewProtocol) -> None:
        """Perform the handshake; then `_Admission` takes over."""
        try:
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Admission(self._admits, new_protocol, lambda abuse: self._abuse.record(abuse, peer)),
                client,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except (OSError, TimeoutError) as error:
            _log.debug("tls_handshake_failed", error=str(error) or type(error).__name__)
            if _is_about_certificate(error):
                self._abuse.record(Abuse.UNAUTHENTICATED, peer)
            client.close()

    def _admits(self, secured: asyncio.Transport) -> bool:
        """Return True if the client may connect. Its certificate was verified, now or when its TLS session began."""
        if self._rejects_sessions and secured.get_extra_info("ssl_object").session_reused:
            _log.debug("tls_client_rejected", error="the TLS session was issued before a CRL expired")
            return False
        certificate = secured.get_extra_info("peercert")
        if self._files.admits(certificate):
            return True
        _log.debug("tls_client_rejected", names=certificate.get("subjectAltName"))
        return False

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            self._reload()
            if self._crl_expiry is not None and self._crl_expiry <= datetime.now(UTC) - OPENSSL_CLOCK:
                # From now on OpenSSL rejects every client whose chain needs the expired CRL.
                _log.error("tls_crl_expired", file=self._files.crl, expired_at=self._crl_expiry.isoformat())
                self._forget_sessions()

    def _forget_sessions(self) -> None:
        """Have every client verified again: a session is resumed without a look at the CRL.

        Sessions are a context's own, so a new one takes its place, of the same files.
        """
        try:
            self._context, self._crl_expiry = self._files.load(even_expired=True)
        except SettingsError:  # the files have changed, which was logged; those before stay, without their sessions
            self._crl_expiry = None
            self._rejects_sessions = True

    def _reload(self) -> None:
        """Load changed files. Files that cannot be used are retried: they may become readable or valid later."""
        state = self._files.state()
        if state == self._state and not self._error:
            return
        self._state = state
        try:
            self._context, self._crl_expiry = self._files.load()
        except SettingsError as error:
            if str(error) != self._error:
                _log.error("tls_reload_failed", error=str(error))
            self._error = str(error)
        else:
            self._error = ""
            self._rejects_sessions = False
            _log.info("tls_reloaded")


def _is_about_certificate(error: OSError) -> bool:
    """Return whether a handshake failed because the client's certificate is missing or not accepted."""
    return isinstance(error, ssl.SSLCertVerificationError) or (
        isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE"
    )


class _Admission(asyncio.Protocol):
    """Protocol of a new connection that checks the names in the client's certificate, then replaces itself."""

    def __init__(
        self,
        admits: Callable[[asyncio.Transport], bool],
        new_protocol: NewProtocol,
        record: Callable[[Abuse], None],
    ) -> None:
        self._admits = admits
        self._new_protocol = new_protocol
        self._record = record

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        secured = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        if not self._admits(secured):
            self._record(Abuse.UNAUTHENTICATED)
            secured.abort()
            return
        decrypting = cast("BoundedSslObject", secured.get_extra_info("ssl_object"))
        decrypting.on_flood = partial(self._record, Abuse.TLS_KEY_UPDATE_FLOOD)
        protocol = self._new_protocol()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
