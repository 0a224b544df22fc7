"""TLS of the HTTP ports: the files of the gRPC port, with HTTP-specific settings."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from ratelimit_rls.tls.certificates import TlsFiles


@dataclass(frozen=True, slots=True)
class HttpTlsFiles(TlsFiles):
    """TLS files with optional client certificates, because health probes have none. `Guard` restricts the paths.

    A client certificate must be one that the gRPC port would accept.
    """

    @classmethod
    def from_files(cls, files: TlsFiles) -> HttpTlsFiles:
        return cls(**{one.name: getattr(files, one.name) for one in fields(files)})

    def load(self, *, even_expired: bool = False) -> tuple[ssl.SSLContext, datetime | None]:
        context, crl_expiry = TlsFiles.load(self, even_expired=even_expired)
        context.set_alpn_protocols(["http/1.1"])
        if self.client_ca:
            context.verify_mode = ssl.CERT_OPTIONAL
        return context, crl_expiry

    def admits(self, peer_certificate: Mapping[str, Any] | None) -> bool:
        return not peer_certificate or TlsFiles.admits(self, peer_certificate)
