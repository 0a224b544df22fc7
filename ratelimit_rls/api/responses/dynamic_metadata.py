"""Dynamic metadata: a description of the request, and the metadata of the rules that allowed it.

The first part depends only on the request and is encoded once per distinct request. The second part depends on the
decision, as does the reported rule (rule_metadata.py). All are fields of one google.protobuf.Struct, whose serialised
forms can be concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct

from ratelimit_rls.core.model import Code, Decision, Descriptor, LimitOverride, PlanTemplate, Request


def describe_request(request: Request) -> dict[str, Any]:
    """Describe the request with the field names of envoyproxy/ratelimit."""
    fields: dict[str, Any] = {
        "domain": request.domain,
        "descriptors": [_descriptor(descriptor) for descriptor in request.descriptors],
    }
    if request.hits:
        fields["hitsAddend"] = request.hits
    return fields


def merge_rule_metadata(decision: Decision) -> dict[str, Any]:
    """Merge the metadata of every rule whose limit allowed the call; earlier descriptors take precedence."""
    merged: dict[str, Any] = {}
    for status in decision.statuses:
        rule = status.descriptor_plan.rule
        if status.code is Code.OK and status.step is not None and rule is not None and rule.metadata:
            _merge(merged, rule.metadata)
    return merged


def has_metadata(template: PlanTemplate) -> bool:
    return any(one.rule is not None and one.rule.metadata for one in template.descriptor_plans)


def encode_struct(fields: Mapping[str, Any]) -> bytes:
    """Serialise the fields as a Struct."""
    message = Struct()
    message.update(_to_json_types(fields))
    return message.SerializeToString(deterministic=True)


def _descriptor(descriptor: Descriptor) -> dict[str, Any]:
    fields: dict[str, Any] = {"entries": [f"{entry.key}={entry.value}" for entry in descriptor.entries]}
    if descriptor.limit is not None:
        fields["limit"] = _limit(descriptor.limit)
    if descriptor.hits is not None:
        fields["hitsAddend"] = descriptor.hits
    return fields


def _limit(limit: LimitOverride) -> str:
    """Format a limit deterministically; envoyproxy/ratelimit's text varies its spaces on purpose."""
    return f"requests_per_unit:{limit.requests_per_unit} unit:{limit.unit.name}"


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        present = into.get(key)
        if key not in into:
            into[key] = dict(value) if isinstance(value, Mapping) else value
        elif isinstance(present, Mapping) and isinstance(value, Mapping):
            deeper = dict(present)
            _merge(deeper, value)
            into[key] = deeper


def _to_json_types(value: Any) -> Any:
    """Convert a value to JSON types; a value that JSON cannot express becomes a string."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_types(inner) for inner in value]
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return str(value)
        return number if math.isfinite(number) else str(value)
    return str(value)
