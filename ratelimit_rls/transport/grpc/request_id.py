"""The id under which a call is counted once, however often it is retried: where it stands, and what it may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ratelimit_rls.core.model import Descriptor, Request
from ratelimit_rls.errors import BadRequest

LONGEST_ID_BYTES = 256
"""A trace id has 32, a UUID 36. What is much longer is something else, and would be hashed for every call."""


class Identified(NamedTuple):
    """A request without its id."""

    request: Request
    request_id: bytes | None
    dropped: tuple[int, ...]  # descriptors of the message, by number, that had nothing but the id


def identified(request: Request, key: str) -> Identified:
    """Take the entries of this key out of a request's descriptors: the first that is not empty is its id.

    Raises BadRequest if that is too long.
    """
    kept: list[Descriptor] = []
    dropped: list[int] = []
    texts: list[str] = []
    for number, descriptor in enumerate(request.descriptors):
        rest = tuple([entry for entry in descriptor.entries if entry.key != key])
        if len(rest) == len(descriptor.entries):
            kept.append(descriptor)
            continue
        texts += [entry.value for entry in descriptor.entries if entry.key == key and entry.value]
        if rest or descriptor.limit is not None:
            kept.append(descriptor._replace(entries=rest))
        else:
            dropped.append(number)
    request_id = checked(texts[0].encode()) if texts else None
    return Identified(request._replace(descriptors=tuple(kept)), request_id, tuple(dropped))


def checked(request_id: bytes) -> bytes:
    """Raises BadRequest if it cannot be one."""
    if len(request_id) > LONGEST_ID_BYTES:
        raise BadRequest(f"a request id of {len(request_id)} bytes; at most {LONGEST_ID_BYTES} are taken")
    return request_id


def sent_along(metadata: Iterable[tuple[str, str | bytes]], key: str) -> bytes | None:
    """What a call's metadata has under this key; None if nothing."""
    for name, value in metadata:
        if name == key:
            return (value.encode() if isinstance(value, str) else value) or None
    return None
