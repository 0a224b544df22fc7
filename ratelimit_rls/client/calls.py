"""The service's methods and the messages of their calls."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple, get_args

from ratelimit_rls.transport.grpc import messages

Dimension = Literal["user", "ip", "api_key"]
"""What an identifier is: a user's name, an address, or an API key (the key itself, or its public id)."""

IDEMPOTENCY_KEY = "x-idempotency-key"
"""Metadata under which the id of a call is sent; the service reads it if RLS_REQUEST_ID_METADATA names it."""

_NUMBERS = {name: number for number, name in enumerate(get_args(Dimension), 1)}
_MOST_COST = 2**32 - 1

LONGEST_TEXT = 4096
"""Characters of an identifier or an endpoint that are sent. Whoever calls an application must not be able to make a
message too large to be answered; two that differ only after this many are counted as one."""

Metadata = tuple[tuple[str, str], ...]


class Method(NamedTuple):
    path: str
    request: Any
    response: Any


CHECK = Method(messages.CHECK_RATE_LIMIT, messages.LimiterCheckRequest, messages.LimiterCheckResponse)
QUOTA = Method(messages.GET_REMAINING_QUOTA, messages.QuotaRequest, messages.QuotaResponse)
RESET = Method(messages.RESET_LIMIT, messages.ResetRequest, messages.ResetResponse)


def check_request(identifier: str, dimension: Dimension, endpoint: str, cost: int, domain: str) -> Any:
    if not 0 <= cost <= _MOST_COST:
        raise ValueError(f"cost is {cost}; it goes from 0 (which only looks) to {_MOST_COST}")
    return CHECK.request(
        identifier=_text(identifier),
        dimension=_number(dimension),
        endpoint=_text(endpoint),
        cost=cost,
        timestamp=int(time.time()),
        domain=domain,
    )


def request_of(method: Method, identifier: str, dimension: Dimension, endpoint: str, domain: str) -> Any:
    return method.request(
        identifier=_text(identifier), dimension=_number(dimension), endpoint=_text(endpoint), domain=domain
    )


def idempotent(key: str) -> Metadata:
    return ((IDEMPOTENCY_KEY, key),) if key else ()


def authorized(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),) if token else ()


def _text(text: str) -> str:
    """What came over the wire may hold half a character, which UTF-8 has no bytes for."""
    text = text[:LONGEST_TEXT]
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _number(dimension: Dimension) -> int:
    try:
        return _NUMBERS[dimension]
    except KeyError:
        raise ValueError(f"dimension is {dimension!r}; say {', '.join(map(repr, _NUMBERS))}") from None
