"""Who is believed, by the settings: keys of the directory, and tokens of the issuers that are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.collected import Series
from ratelimit_rls.telemetry.instruments import CREDENTIALS, ISSUER_KEYS, TOKENS_REFUSED
from ratelimit_rls.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from ratelimit_rls.identity.api_keys import ApiKeys
    from ratelimit_rls.identity.directory import Directory
    from ratelimit_rls.identity.verifier import Callers


def new_callers(
    settings: Settings, metrics: Metrics, api_keys: ApiKeys | None = None, directory: Directory | None = None
) -> Callers | None:
    """None if nobody is. Raises SettingsError."""
    if api_keys is None and not settings.rls_jwt_issuers:
        return None
    from ratelimit_rls.identity.verifier import Callers

    tokens = None
    if settings.rls_jwt_issuers:
        from ratelimit_rls.identity.issuers import read_issuers
        from ratelimit_rls.identity.jwt import Tokens

        tokens = Tokens(read_issuers(Path(settings.rls_jwt_issuers)))
    callers = Callers(api_keys, tokens, directory)
    metrics.measure(lambda: _measured(callers))
    return callers


def _measured(callers: Callers) -> Iterator[tuple[Series, float]]:
    for (kind, outcome), count in callers.counts().items():
        yield Series(CREDENTIALS.name, (kind, outcome)), count
    for reason, count in callers.refused_tokens().items():
        yield Series(TOKENS_REFUSED.name, (reason,)), count
    for issuer, keys in callers.token_keys().items():
        yield Series(ISSUER_KEYS.name, (issuer,)), keys
