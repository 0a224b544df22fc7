"""Limits in bodies, read by the compiler of rules."""

from __future__ import annotations

from collections.abc import Sequence

from ratelimit_rls.core.model import Limit
from ratelimit_rls.rules.limits_text import read_limits
from ratelimit_rls.transport.http.admin import models


def limits_of(limits: Sequence[models.Limit]) -> tuple[Limit, ...]:
    """Raises RulesError, which names the field."""
    return read_limits([limit.model_dump(exclude_none=True) for limit in limits])
