"""How answers are worded, as the rules choose it: which headers, and what a refusal says besides.

What the words are is transport's business (transport/answers/); here is only what can be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ratelimit_rls.core.template import Template


class Family(Enum):
    """Headers that belong together. The value is the name in YAML."""

    REFERENCE = "reference"  # RateLimit-Limit, -Remaining, -Reset, or as LIMIT_*_HEADER names them
    LEGACY = "x-ratelimit"  # X-RateLimit-Limit, -Remaining, -Reset; the reset in seconds from now
    LEGACY_EPOCH = "x-ratelimit-epoch"  # the same, the reset as a Unix timestamp
    WINDOWS = "x-ratelimit-windows"  # X-RateLimit-Limit-Minute, … for every window of the descriptor
    IETF = "ietf"  # RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-11)
    RETRY_AFTER = "retry-after"  # of refusals only
    RULE = "rule"  # X-RateLimit-Rule: which rule is spoken of


class BodyFormat(Enum):
    """What the body of a refusal is. The value is the name in YAML."""

    JSON = "json"
    PROBLEM = "problem+json"
    TEXT = "text"  # a template of the operator's own


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """`answer:` of a domain or a descriptor."""

    headers: tuple[Family, ...] | None = None  # None: the reference's three, if the settings enable them
    retry_jitter_us: int = 0  # added to Retry-After, drawn anew each time, so that a crowd does not return at once


@dataclass(frozen=True, slots=True)
class Deny:
    """`deny:` of a domain or a descriptor: what a refusal says."""

    format: BodyFormat | None = None  # None: no body
    body: Template | None = None  # exactly when the format is TEXT
    content_type: str = ""  # "": the format's own
    headers: tuple[tuple[str, Template], ...] = ()
    status: int = 429  # where the protocol lets us choose: ext_authz, not RLS


PLAIN = AnswerStyle()
