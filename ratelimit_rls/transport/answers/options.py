"""What an answer tells beyond its codes where the rules choose nothing, by the operator's choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The reference's LIMIT_* and RESPONSE_DYNAMIC_METADATA variables."""

    headers_enabled: bool = False
    limit_header: str = "RateLimit-Limit"
    remaining_header: str = "RateLimit-Remaining"
    reset_header: str = "RateLimit-Reset"
    dynamic_metadata: bool = False
