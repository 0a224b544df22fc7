"""Construction of the credential verifier: API keys of the directory, and JWTs of the configured issuers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.instruments import CREDENTIALS, ISSUER_KEYS, TOKENS_REJECTED
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.series import Series

if TYPE_CHECKING:
    from ratelimit_rls.identity.api_keys import ApiKeyVerifier
    from ratelimit_rls.identity.directory import Directory
    from ratelimit_rls.identity.verifier import CredentialVerifier


def new_credential_verifier(
    settings: Settings, metrics: Metrics, api_keys: ApiKeyVerifier | None = None, directory: Directory | None = None
) -> CredentialVerifier | None:
    """Return the verifier, or None if neither a database nor JWT issuers are configured. Raises SettingsError."""
    if api_keys is None and not settings.rls_jwt_issuers:
        return None
    from ratelimit_rls.identity.verifier import CredentialVerifier

    tokens = None
    if settings.rls_jwt_issuers:
        from ratelimit_rls.identity.issuers import read_issuers
        from ratelimit_rls.identity.jwt import JwtVerifier

        tokens = JwtVerifier(read_issuers(Path(settings.rls_jwt_issuers)))
    verifier = CredentialVerifier(api_keys, tokens, directory)
    metrics.export_series(lambda: _measured(verifier))
    return verifier


def _measured(verifier: CredentialVerifier) -> Iterator[tuple[Series, float]]:
    for (kind, outcome), count in verifier.counts().items():
        yield Series(CREDENTIALS.name, (kind, outcome)), count
    for reason, count in verifier.rejected_tokens().items():
        yield Series(TOKENS_REJECTED.name, (reason,)), count
    for issuer, keys in verifier.token_keys().items():
        yield Series(ISSUER_KEYS.name, (issuer,)), keys
