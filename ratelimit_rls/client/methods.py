"""RPC methods of the service and construction of their requests."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple, get_args

from ratelimit_rls.protos import messages

Dimension = Literal["user", "ip", "api_key"]
"""Kind of an identifier: a user id, an IP address, or an API key (the key itself, or its public id)."""

IDEMPOTENCY_KEY = "x-idempotency-key"
"""Metadata key of the idempotency key; the service reads it if RLS_REQUEST_ID_METADATA names it."""

_NUMBERS = {name: number for number, name in enumerate(get_args(Dimension), 1)}
_MAX_COST = 2**32 - 1

MAX_TEXT_LENGTH = 4096
"""Maximum number of characters of an identifier or an endpoint; the rest is cut off.

Clients of the application must not be able to make a message too large for the service. Identifiers that differ only
after this length share their counters.
"""

Metadata = tuple[tuple[str, str], ...]


class Method(NamedTuple):
    path: str
    request: Any
    response: Any


CHECK = Method(messages.CHECK_RATE_LIMIT, messages.LimiterCheckRequest, messages.LimiterCheckResponse)
QUOTA = Method(messages.GET_REMAINING_QUOTA, messages.QuotaRequest, messages.QuotaResponse)
RESET = Method(messages.RESET_LIMIT, messages.ResetRequest, messages.ResetResponse)


def build_check_request(identifier: str, dimension: Dimension, endpoint: str, cost: int, domain: str) -> Any:
    if not 0 <= cost <= _MAX_COST:
        raise ValueError(f"cost is {cost}; must be between 0 (counts nothing) and {_MAX_COST}")
    return CHECK.request(
        identifier=_text(identifier),
        dimension=_number(dimension),
        endpoint=_text(endpoint),
        cost=cost,
        timestamp=int(time.time()),
        domain=domain,
    )


def build_request(method: Method, identifier: str, dimension: Dimension, endpoint: str, domain: str) -> Any:
    return method.request(
        identifier=_text(identifier), dimension=_number(dimension), endpoint=_text(endpoint), domain=domain
    )


def idempotency_metadata(key: str) -> Metadata:
    return ((IDEMPOTENCY_KEY, key),) if key else ()


def authorization_metadata(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),) if token else ()


def _text(text: str) -> str:
    """Truncate text, and escape lone surrogates.

    Text from the network may contain them, and UTF-8 cannot encode them.
    """
    text = text[:MAX_TEXT_LENGTH]
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _number(dimension: Dimension) -> int:
    try:
        return _NUMBERS[dimension]
    except KeyError:
        raise ValueError(f"dimension is {dimension!r}; must be one of {', '.join(map(repr, _NUMBERS))}") from None
