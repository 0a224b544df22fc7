"""Decoder: CheckRequest ─► Attributes. Reads only what a mapping can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from ratelimit_rls.core.attributes import Attributes, MetadataPath, metadata_text
from ratelimit_rls.pipeline.message_bounds import DEFAULT_BOUNDS, MessageBounds
from ratelimit_rls.protos.messages import CheckRequest
from ratelimit_rls.protos.scan import decode_error


def parse(message: bytes, bounds: MessageBounds = DEFAULT_BOUNDS) -> Any:
    """Return the AttributeContext of a CheckRequest. Raises BadRequest if it is malformed, or TooComplex."""
    if len(message) > bounds.unscanned_check_bytes:
        bounds.check_scan.check(message)
    try:
        return CheckRequest.FromString(message).attributes
    except DecodeError:
        raise decode_error(CheckRequest.DESCRIPTOR.full_name) from None


def attributes(context: Any, wanted: Sequence[MetadataPath]) -> Attributes:
    """Return the attributes of a request, with the metadata at the `wanted` paths."""
    http = context.request.http
    path, _, query = http.path.partition("?")
    return Attributes(
        method=http.method,
        scheme=http.scheme,
        host=http.host,
        path=path,
        query=query,
        peer=context.source.address.socket_address.address,
        headers=_headers(http),
        context=context.context_extensions,
        metadata=_metadata(context.metadata_context.filter_metadata, wanted) if wanted else {},
    )


def _headers(http: Any) -> Mapping[str, str]:
    raw = http.header_map.headers
    if not raw:
        headers: Mapping[str, str] = http.headers
        return headers
    # With `encode_raw_headers`, a name can occur several times and a value can be any bytes.
    values: dict[str, list[str]] = {}
    for header in raw:
        value = header.raw_value.decode(errors="backslashreplace") or header.value
        values.setdefault(header.key, []).append(value)
    return {name: ",".join(values_of_name) for name, values_of_name in values.items()}


def _metadata(namespaces: Any, wanted: Sequence[MetadataPath]) -> dict[MetadataPath, str]:
    found: dict[MetadataPath, str] = {}
    for path in wanted:
        namespace, *keys = path
        if namespace in namespaces:  # reading a missing key would insert it
            text = _text(namespaces[namespace], keys)
            if text is not None:
                found[path] = text
    return found


def _text(struct: Any, keys: Sequence[str]) -> str | None:
    """Return the value at the path `keys` as text, or None if it is missing or not a scalar."""
    *outer, last = keys
    for key in outer:
        if key not in struct.fields:
            return None
        struct = struct.fields[key].struct_value  # empty if it is another type
    if last not in struct.fields:
        return None
    value = struct.fields[last]
    kind = value.WhichOneof("kind")
    return metadata_text(getattr(value, kind)) if kind in ("string_value", "bool_value", "number_value") else None
