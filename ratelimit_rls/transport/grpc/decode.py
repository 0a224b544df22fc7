"""RateLimitRequest ─► Request: where protobuf ends."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from ratelimit_rls.core.model import Descriptor, Entry, Override, Purpose, Request, Unit
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.transport.grpc.messages import RateLimitRequest

_UNITS = {int(unit): unit for unit in Unit}


def decode(message: bytes, purpose: Purpose = Purpose.DECIDE) -> Request:
    """Raises BadRequest if the bytes are something else."""
    try:
        request = RateLimitRequest.FromString(message)
    except DecodeError:
        raise BadRequest(
            "the message cannot be read as envoy.service.ratelimit.v3.RateLimitRequest: "
            "it is cut short, not protobuf, or has a text that is not UTF-8"
        ) from None
    return Request(
        domain=request.domain,
        descriptors=tuple([_descriptor(descriptor) for descriptor in request.descriptors]),
        hits=request.hits_addend,
        purpose=purpose,
    )


def _descriptor(descriptor: Any) -> Descriptor:
    entries = tuple([Entry(entry.key, entry.value) for entry in descriptor.entries])
    limit = _override(descriptor.limit) if descriptor.HasField("limit") else None
    hits = descriptor.hits_addend.value if descriptor.HasField("hits_addend") else None
    return Descriptor(entries, limit, hits, descriptor.is_negative_hits)


def _override(limit: Any) -> Override:
    """A unit number that no version of the API has named is as good as none."""
    return Override(limit.requests_per_unit, _UNITS.get(limit.unit, Unit.UNKNOWN))
