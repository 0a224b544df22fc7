"""Certificate revocation lists (CRLs), which are validated before OpenSSL loads them."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from re import DOTALL, compile

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.hashes import SHA256

from ratelimit_rls.errors import SettingsError

_BLOCK = compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.+?-----END \1-----", DOTALL)

NEVER = datetime.max.replace(tzinfo=UTC)


def load_crl(context: ssl.SSLContext, path: str, ca_path: str, *, even_expired: bool = False) -> datetime | None:
    """Make a context reject the certificates that the CRLs in a file revoke, and return when the next CRL expires.

    The whole chain of a client is checked. Every authority in `ca_path` needs a CRL, and every CRL an authority there
    that signed it: OpenSSL rejects all clients of an authority whose CRL is missing or not current, so that either
    fault would show at the handshake only. Raises SettingsError; the context must not be used then.
    With `even_expired` a CRL may have expired, and the context rejects those clients; None: all of them have.
    """
    now = datetime.now(UTC)
    try:
        crls = _read(Path(path).read_bytes())
        _check(crls, x509.load_pem_x509_certificates(Path(ca_path).read_bytes()), now, even_expired)
        before = context.cert_store_stats()
        context.load_verify_locations(path)
        added = {kind: count - before[kind] for kind, count in context.cert_store_stats().items()}
        # OpenSSL reads the file again, and would trust certificates that it found there.
        if added != {"crl": len({crl.fingerprint(SHA256()) for crl in crls}), "x509": 0, "x509_ca": 0}:
            raise ValueError("the file changed while it was read")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettingsError(
            f"GRPC_SERVER_TLS_CRL={path}: {why}; it must be a PEM file with a current CRL of each CA in {ca_path}"
        ) from error
    context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_CHAIN
    expiries = [crl.next_update_utc or NEVER for crl in crls]
    return min([expiry for expiry in expiries if expiry > now], default=None)


def _read(content: bytes) -> list[x509.CertificateRevocationList]:
    blocks = list(_BLOCK.finditer(content))
    for block in blocks:
        if block[1] != b"X509 CRL":
            raise ValueError(f"it has a {block[1].decode()} beside CRLs")
    if not blocks:
        raise ValueError("it has no CRL")
    return [x509.load_pem_x509_crl(block[0]) for block in blocks]


def _check(
    crls: list[x509.CertificateRevocationList],
    authorities: list[x509.Certificate],
    now: datetime,
    even_expired: bool,
) -> None:
    for crl in crls:
        name = crl.issuer.rfc4514_string()
        if not any(_is_signed_by(authority, crl) for authority in authorities):
            raise ValueError(f"the CRL of {name} is signed by none of the authorities")
        if any(isinstance(extension.value, x509.DeltaCRLIndicator) for extension in crl.extensions):
            raise ValueError(f"the CRL of {name} is a delta CRL, which is not supported")
        if crl.last_update_utc > now:
            raise ValueError(f"the CRL of {name} is not valid before {crl.last_update_utc.isoformat()}")
        if crl.next_update_utc is not None and crl.next_update_utc <= now and not even_expired:
            raise ValueError(f"the CRL of {name} expired at {crl.next_update_utc.isoformat()}")
    for authority in authorities:
        if not any(_is_signed_by(authority, crl) for crl in crls):
            raise ValueError(f"it has no CRL of {authority.subject.rfc4514_string()}")


def _is_signed_by(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    key = authority.public_key()
    return crl.issuer == authority.subject and crl.is_signature_valid(key)  # type: ignore[arg-type]
