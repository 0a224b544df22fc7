"""Response options of the rules: which headers to send, and the body and status of a denial.

Only the options are defined here. The responses are built in api/responses/.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ratelimit_rls.core.template import Template


class HeaderFamily(Enum):
    """Groups of rate limit headers. The value is the name in YAML."""

    REFERENCE = "reference"  # RateLimit-Limit, -Remaining, -Reset, or as LIMIT_*_HEADER names them
    LEGACY = "x-ratelimit"  # X-RateLimit-Limit, -Remaining, -Reset; the reset in seconds from now
    LEGACY_EPOCH = "x-ratelimit-epoch"  # the same, with the reset as a Unix timestamp
    WINDOWS = "x-ratelimit-windows"  # X-RateLimit-Limit-Minute, … for every window of the descriptor
    IETF = "ietf"  # RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-11)
    RETRY_AFTER = "retry-after"  # denials only
    RULE = "rule"  # X-RateLimit-Rule: the rule reported


class BodyFormat(Enum):
    """Formats of the body of a denial. The value is the name in YAML."""

    JSON = "json"
    PROBLEM = "problem+json"
    TEXT = "text"  # a template from the rules


@dataclass(frozen=True, slots=True)
class ResponsePolicy:
    """The `answer` section of a domain or a descriptor."""

    headers: tuple[HeaderFamily, ...] | None = (
        None  # None: RateLimit-Limit, -Remaining and -Reset, if enabled by settings
    )
    retry_jitter_us: int = 0  # maximum random addition to Retry-After, so that clients do not all retry at once


@dataclass(frozen=True, slots=True)
class DenyResponse:
    """The `deny` section of a domain or a descriptor: the response to a denied call."""

    format: BodyFormat | None = None  # None: no body
    body: Template | None = None  # set exactly if the format is TEXT
    content_type: str = ""  # "": that of the format
    headers: tuple[tuple[str, Template], ...] = ()
    status: int = 429  # where the protocol lets us choose: ext_authz, not RLS


DEFAULT_RESPONSE_POLICY = ResponsePolicy()
