"""The files of a TLS connection to a management server: read anew for each connection, and looked at in between."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.transport.grpc.certificates import FileState, file_state, reason

LOOK_EVERY_S = 1.0
"""At the files. A look is three stat calls, and sees links swapped on a mounted volume, which notifications may not."""

FileStates = tuple[FileState | None, ...]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AdsTlsFiles:
    """Whom to trust, and what to show. Each may be empty: the system's authorities, no certificate."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def state(self) -> FileStates:
        """Different after any of the files, or the link to it, was replaced or rewritten."""
        return tuple(file_state(path) for path in (self.ca, self.certificate, self.key) if path)

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises SettingsError if a file is missing or cannot be used: gRPC itself would only say that it failed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"CONFIG_GRPC_XDS_SERVER_TLS_CACERT={self.ca}: {reason(error)}; it must be a PEM file"
            ) from error
        try:
            if self.certificate:
                # An empty password: a key that needs one is an error, not a question on the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"CONFIG_GRPC_XDS_CLIENT_TLS_CERT={self.certificate}, CONFIG_GRPC_XDS_CLIENT_TLS_KEY={self.key}: "
                f"{reason(error)}; both must be PEM files, the key unencrypted and belonging to the certificate"
            ) from error
        try:
            return grpc.ssl_channel_credentials(*(_content(path) for path in (self.ca, self.key, self.certificate)))
        except OSError as error:  # gone since they were looked at
            raise SettingsError(f"the TLS files for the xDS server: {reason(error)}") from error

    async def until_changed(self, seen: FileStates) -> None:
        """Return once the files are others than those `seen`, and can be used. Nothing is given up for bad ones."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            state = self.state()
            if state == seen:
                continue
            seen = state
            try:
                self.credentials()
            except SettingsError as error:
                _log.error("changed TLS files for xDS cannot be used", error=str(error))
            else:
                return


def _content(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
