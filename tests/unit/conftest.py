"""Fixtures for tests of settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.catalogue import VARIABLES

Read = Callable[..., Settings]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Return settings from only the given variables."""

    def read(**environ: str) -> Settings:
        for variable in VARIABLES:
            monkeypatch.delenv(variable.name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return Settings()

    return read
