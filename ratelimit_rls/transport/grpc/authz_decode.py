"""CheckRequest ─► Attributes: where protobuf ends. Only what a mapping can ask for is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from ratelimit_rls.core.attributes import Attributes, MetadataPath, metadata_text
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.transport.grpc.messages import CheckRequest


def parse(message: bytes) -> Any:
    """The request's AttributeContext; raises BadRequest if the bytes are something else."""
    try:
        return CheckRequest.FromString(message).attributes
    except DecodeError:
        raise BadRequest(
            "the message cannot be read as envoy.service.auth.v3.CheckRequest: "
            "it is cut short, not protobuf, or has a text that is not UTF-8"
        ) from None


def attributes(context: Any, wanted: Sequence[MetadataPath]) -> Attributes:
    """`wanted` is what to read of the metadata."""
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
    # With `encode_raw_headers` a name may come several times and a value be anything.
    values: dict[str, list[str]] = {}
    for header in raw:
        value = header.raw_value.decode(errors="backslashreplace") or header.value
        values.setdefault(header.key, []).append(value)
    return {name: ",".join(of_one_name) for name, of_one_name in values.items()}


def _metadata(namespaces: Any, wanted: Sequence[MetadataPath]) -> dict[MetadataPath, str]:
    found: dict[MetadataPath, str] = {}
    for path in wanted:
        namespace, *keys = path
        if namespace in namespaces:  # to read what is not there would put it there
            text = _text(namespaces[namespace], keys)
            if text is not None:
                found[path] = text
    return found


def _text(struct: Any, keys: Sequence[str]) -> str | None:
    """What the keys lead to, if it is one value."""
    *outer, last = keys
    for key in outer:
        if key not in struct.fields:
            return None
        struct = struct.fields[key].struct_value  # an empty one, if it is something else
    if last not in struct.fields:
        return None
    value = struct.fields[last]
    kind = value.WhichOneof("kind")
    return metadata_text(getattr(value, kind)) if kind in ("string_value", "bool_value", "number_value") else None
