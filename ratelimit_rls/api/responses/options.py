"""Response options of the operator, which apply where the rules choose nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Values of the LIMIT_* and RESPONSE_DYNAMIC_METADATA variables of envoyproxy/ratelimit."""

    headers_enabled: bool = False
    limit_header: str = "RateLimit-Limit"
    remaining_header: str = "RateLimit-Remaining"
    reset_header: str = "RateLimit-Reset"
    dynamic_metadata: bool = False
