"""The TLS files, and what is made of them: a context that is replaced as a whole when they change."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratelimit_rls.errors import SettingsError

FileState = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The server's own pair, and who may be its client.

    With `client_ca` a client must show a certificate that this authority signed (and no other: the system's own
    authorities are not asked). With `client_names` it must also be made out to one of these DNS names.
    """

    certificate: str
    key: str
    client_ca: str = ""
    client_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.client_names and not self.client_ca:
            raise SettingsError(
                "GRPC_CLIENT_TLS_SAN names clients, but without GRPC_CLIENT_TLS_CACERT no client is asked for a "
                "certificate; set both or neither"
            )

    def state(self) -> tuple[FileState | None, ...]:
        """Different after any of the files, or the link to it, was replaced or rewritten."""
        return tuple(file_state(path) for path in (self.certificate, self.key, self.client_ca) if path)

    def context(self) -> ssl.SSLContext:
        """Raises SettingsError if a file cannot be read or the key is not the certificate's."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        try:
            # An empty password: a key that needs one is an error, not a question on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"GRPC_SERVER_TLS_CERT={self.certificate}, GRPC_SERVER_TLS_KEY={self.key}: {reason(error)}; "
                "both must be PEM files, the key unencrypted and belonging to the certificate"
            ) from error
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise SettingsError(
                    f"the clients' certificate authority {self.client_ca}: {reason(error)}; it must be a PEM file"
                ) from error
        return context

    def admits(self, peer_certificate: Mapping[str, Any] | None) -> bool:
        """Whether a client whose certificate was already verified is one of those named."""
        if not self.client_names:
            return True
        shown: Sequence[tuple[str, str]] = (peer_certificate or {}).get("subjectAltName", ())
        return any(kind == "DNS" and covers(pattern, name) for kind, pattern in shown for name in self.client_names)


def covers(pattern: str, name: str) -> bool:
    """Whether a certificate's DNS name, with or without a leading "*.", is made out to `name`."""
    pattern, name = pattern.lower(), name.lower()
    if pattern.startswith("*."):
        label, _, rest = name.partition(".")
        return bool(label) and rest == pattern[2:]
    return pattern == name


def file_state(path: str) -> FileState | None:
    """None while there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not readable as PEM"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
