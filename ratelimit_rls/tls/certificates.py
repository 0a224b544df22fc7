"""TLS files of a server, and the SSL context that is built from them and replaced when they change."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.tls import spiffe
from ratelimit_rls.tls.key_updates import bound_key_updates

FileState = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate and key of a server, and the requirements for its clients.

    With `client_ca`, a client must present a certificate that this CA signed; the system's CAs are not used. With
    `client_names`, the certificate must also contain one of these DNS names or SPIFFE IDs (see tls/spiffe.py). With
    `crl`, no certificate of the chain may be revoked by a CRL in that file.
    """

    certificate: str
    key: str
    client_ca: str = ""
    client_names: tuple[str, ...] = ()
    crl: str = ""

    def __post_init__(self) -> None:
        if self.client_names and not self.client_ca:
            raise SettingsError(
                "GRPC_CLIENT_TLS_SAN names clients, but without GRPC_CLIENT_TLS_CACERT no client is asked for a "
                "certificate; set both or neither"
            )
        if self.crl and not self.client_ca:
            raise SettingsError(
                "GRPC_SERVER_TLS_CRL revokes clients' certificates, but without GRPC_CLIENT_TLS_CACERT no client is "
                "asked for one; set both or neither"
            )

    def state(self) -> tuple[FileState | None, ...]:
        """Return a value that changes when any of the files, or a link to it, is replaced or rewritten."""
        return tuple(file_state(path) for path in (self.certificate, self.key, self.client_ca, self.crl) if path)

    def context(self) -> ssl.SSLContext:
        """Return the context of `load` without the expiry."""
        return self.load()[0]

    def load(self, *, even_expired: bool = False) -> tuple[ssl.SSLContext, datetime | None]:
        """Return a context, and the time when it begins to reject (more) clients because a CRL expires; None: never.

        With `even_expired`, CRLs that have expired are accepted, for the time until they are renewed. Raises
        SettingsError if a file cannot be read, the key does not match the certificate, or a CRL cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        bound_key_updates(context)
        try:
            # With an empty password, an encrypted key is an error instead of a prompt on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"GRPC_SERVER_TLS_CERT={self.certificate}, GRPC_SERVER_TLS_KEY={self.key}: {error_text(error)}; "
                "both must be PEM files, the key unencrypted and belonging to the certificate"
            ) from error
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise SettingsError(
                    f"the clients' certificate authority {self.client_ca}: {error_text(error)}; it must be a PEM file"
                ) from error
        return context, self._load_crl(context, even_expired)

    def _load_crl(self, context: ssl.SSLContext, even_expired: bool) -> datetime | None:
        if not self.crl:
            return None
        from ratelimit_rls.tls.revocation import load_crl  # imports cryptography, which takes 0.1 s

        return load_crl(context, self.crl, self.client_ca, even_expired=even_expired)

    def admits(self, peer_certificate: Mapping[str, Any] | None) -> bool:
        """Return whether a verified client certificate contains one of the allowed names."""
        if not self.client_names:
            return True
        names: Sequence[tuple[str, str]] = (peer_certificate or {}).get("subjectAltName", ())
        uris = [value for kind, value in names if kind == "URI"]
        dns_names = [value for kind, value in names if kind == "DNS"]
        for name in self.client_names:
            if name.startswith(spiffe.SCHEME):
                # A certificate with several URIs is not an X.509-SVID, so it proves none of them.
                if len(uris) == 1 and spiffe.allows(name, uris[0]):
                    return True
            elif any(matches_dns_name(pattern, name) for pattern in dns_names):
                return True
        return False


def matches_dns_name(pattern: str, name: str) -> bool:
    """Return whether a DNS name of a certificate, with or without a leading "*.", matches `name`."""
    pattern, name = pattern.lower(), name.lower()
    if pattern.startswith("*."):
        label, _, rest = name.partition(".")
        return bool(label) and rest == pattern[2:]
    return pattern == name


def file_state(path: str) -> FileState | None:
    """Return inode, modification time and size of a file; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def error_text(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not readable as PEM"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
