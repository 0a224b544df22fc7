"""The server process: its components, the order in which they start and stop, and its worker processes."""

from __future__ import annotations

import uvloop

from ratelimit_rls.server.lifecycle import serve_until_signal
from ratelimit_rls.server.workers import supervise
from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry import logs

__all__ = ["run"]


def run(settings: Settings) -> int:
    """Serve until a stop signal and return the exit code. Raises SettingsError if the settings are unusable."""
    logs.configure(settings.log_level, settings.log_format)
    if settings.rls_workers > 1:
        return supervise(settings)
    return uvloop.run(serve_until_signal(settings))
