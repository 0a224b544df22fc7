"""Request ids, under which a call is counted once however often it is retried: extraction and validation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ratelimit_rls.core.model import Descriptor, Request
from ratelimit_rls.errors import BadRequest

MAX_ID_BYTES = 256
"""A trace id has 32 bytes, a UUID 36. Much longer values are not ids, and would be hashed for every call."""


class RequestWithId(NamedTuple):
    """A request from which its id was removed."""

    request: Request
    request_id: bytes | None
    dropped: tuple[int, ...]  # indexes of descriptors of the message that had nothing but the id


def extract_request_id(request: Request, key: str) -> RequestWithId:
    """Remove the entries with this key from a request's descriptors: the first that is not empty is its id.

    Raises BadRequest if the id is too long.
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
    request_id = validate_request_id(texts[0].encode()) if texts else None
    return RequestWithId(request._replace(descriptors=tuple(kept)), request_id, tuple(dropped))


def validate_request_id(request_id: bytes) -> bytes:
    """Return the id. Raises BadRequest if it is too long."""
    if len(request_id) > MAX_ID_BYTES:
        raise BadRequest(f"a request id of {len(request_id)} bytes; at most {MAX_ID_BYTES} are taken")
    return request_id


def request_id_from_metadata(metadata: Iterable[tuple[str, str | bytes]], key: str) -> bytes | None:
    """Return the value of this key in a call's metadata; None if it is missing or empty."""
    for name, value in metadata:
        if name == key:
            return (value.encode() if isinstance(value, str) else value) or None
    return None
