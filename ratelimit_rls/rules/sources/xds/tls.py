"""TLS files for the connection to a management server: read for each connection, and checked for changes in between."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.tls.certificates import FileState, error_text, file_state

POLL_INTERVAL_S = 1.0
"""Interval of checks for changed files. A check is three stat calls. It also sees links swapped on a mounted volume,
which notifications may miss.
"""

FileStates = tuple[FileState | None, ...]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AdsTlsFiles:
    """CA, certificate and key files. Each may be empty: the system's CAs, no client certificate."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def state(self) -> FileStates:
        """Return a state that changes when one of the files, or the link to it, is replaced or rewritten."""
        return tuple(file_state(path) for path in (self.ca, self.certificate, self.key) if path)

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials.

        Raise SettingsError if a file is missing or unusable: gRPC itself would give no reason.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"CONFIG_GRPC_XDS_SERVER_TLS_CACERT={self.ca}: {error_text(error)}; it must be a PEM file"
            ) from error
        try:
            if self.certificate:
                # An empty password: an encrypted key must be an error, not a prompt on the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"CONFIG_GRPC_XDS_CLIENT_TLS_CERT={self.certificate}, CONFIG_GRPC_XDS_CLIENT_TLS_KEY={self.key}: "
                f"{error_text(error)}; both must be PEM files, the key unencrypted and belonging to the certificate"
            ) from error
        try:
            return grpc.ssl_channel_credentials(*(_content(path) for path in (self.ca, self.key, self.certificate)))
        except OSError as error:  # removed since they were checked
            raise SettingsError(f"the TLS files for the xDS server: {error_text(error)}") from error

    async def until_changed(self, seen: FileStates) -> None:
        """Return once the files differ from `seen` and are usable. Unusable files do not end the current connection."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            state = self.state()
            if state == seen:
                continue
            seen = state
            try:
                self.credentials()
            except SettingsError as error:
                _log.error("xds_tls_files_unusable", error=str(error))
            else:
                return


def _content(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
