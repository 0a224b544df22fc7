"""Dynamic metadata: what was asked, and what the rules that let it pass say of themselves.

The first part depends on the request alone and is written once per distinct request; the second on the decision, as
does which rule is spoken of (answers/fired.py). All are fields of one google.protobuf.Struct, whose serialised forms
can be joined end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct

from ratelimit_rls.core.model import Code, Decision, Descriptor, Outline, Override, Request


def described(request: Request) -> dict[str, Any]:
    """The request in the reference's words."""
    words: dict[str, Any] = {
        "domain": request.domain,
        "descriptors": [_descriptor(descriptor) for descriptor in request.descriptors],
    }
    if request.hits:
        words["hitsAddend"] = request.hits
    return words


def merged(decision: Decision) -> dict[str, Any]:
    """The metadata of every rule whose limit was met and passed; what an earlier descriptor says wins."""
    merged: dict[str, Any] = {}
    for status in decision.statuses:
        rule = status.slot.rule
        if status.code is Code.OK and status.step is not None and rule is not None and rule.metadata:
            _merge(merged, rule.metadata)
    return merged


def has_metadata(outline: Outline) -> bool:
    return any(slot.rule is not None and slot.rule.metadata for slot in outline.slots)


def struct(fields: Mapping[str, Any]) -> bytes:
    """The fields as a serialised Struct."""
    message = Struct()
    message.update(_plain(fields))
    return message.SerializeToString(deterministic=True)


def _descriptor(descriptor: Descriptor) -> dict[str, Any]:
    words: dict[str, Any] = {"entries": [f"{entry.key}={entry.value}" for entry in descriptor.entries]}
    if descriptor.limit is not None:
        words["limit"] = _limit(descriptor.limit)
    if descriptor.hits is not None:
        words["hitsAddend"] = descriptor.hits
    return words


def _limit(limit: Override) -> str:
    """Always the same text for the same limit; the reference's varies its spaces on purpose."""
    return f"requests_per_unit:{limit.requests_per_unit} unit:{limit.unit.name}"


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        mine = into.get(key)
        if key not in into:
            into[key] = dict(value) if isinstance(value, Mapping) else value
        elif isinstance(mine, Mapping) and isinstance(value, Mapping):
            deeper = dict(mine)
            _merge(deeper, value)
            into[key] = deeper


def _plain(value: Any) -> Any:
    """The value in JSON's types; what JSON cannot say becomes its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return str(value)
        return number if math.isfinite(number) else str(value)
    return str(value)
