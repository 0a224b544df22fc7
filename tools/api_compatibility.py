"""Compare the public APIs with those of the last release: `python -m tools.api_compatibility --write` at a release.

tests/compatibility/ keeps the admin API's OpenAPI document and the descriptor set of the protos as they were released.
A test fails if the code breaks a client of that release (docs/compatibility.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet

from ratelimit_rls.admin.http.app import documented_app

ROOT = Path(__file__).parents[1]
OPENAPI = ROOT / "tests" / "compatibility" / "openapi.json"
PROTOS = ROOT / "tests" / "compatibility" / "descriptors.binpb"
PUBLIC_PROTO_PACKAGES = ("ratelimit_rls.",)

_METHODS = ("get", "put", "post", "delete", "patch")


def openapi_breaks(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a client of the old document can no longer rely on."""
    for path, operations in old["paths"].items():
        for method in _METHODS:
            if method not in operations:
                continue
            current = new["paths"].get(path, {}).get(method)
            if current is None:
                yield f"{method.upper()} {path} is gone"
                continue
            yield from _operation_breaks(f"{method.upper()} {path}", operations[method], current, (old, new))


Documents = tuple[Mapping[str, Any], Mapping[str, Any]]


def _operation_breaks(where: str, old: Mapping[str, Any], new: Mapping[str, Any], both: Documents) -> Iterator[str]:
    before = {(one["in"], one["name"]): one for one in old.get("parameters", ())}
    after = {(one["in"], one["name"]): one for one in new.get("parameters", ())}
    for key in before.keys() - after.keys():
        yield f"{where}: the {key[0]} parameter {key[1]} is gone"
    for key, parameter in after.items():
        if parameter.get("required") and not before.get(key, {}).get("required"):
            yield f"{where}: the {key[0]} parameter {key[1]} became required"
    for schema_of, is_request in ((_request_schema, True), (_response_schema, False)):
        one, other = schema_of(old), schema_of(new)
        if one is not None and other is None:
            yield f"{where}: the {'request' if is_request else 'response'} body is gone"
        elif one is not None and other is not None:
            yield from _schema_breaks(where, one, other, both, is_request=is_request, seen=frozenset())
        elif other is not None and is_request and new["requestBody"].get("required"):
            yield f"{where}: a request body became required"


def _request_schema(operation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return _json_schema(operation.get("requestBody", {}))


def _response_schema(operation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for status, response in sorted(operation.get("responses", {}).items()):
        if status.startswith("2"):
            return _json_schema(response)
    return None


def _json_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    schema: Mapping[str, Any] | None = body.get("content", {}).get("application/json", {}).get("schema")
    return schema


def _schema_breaks(
    where: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    both: Documents,
    *,
    is_request: bool,
    seen: frozenset[str],
) -> Iterator[str]:
    name = old.get("$ref", "")
    if name and name in seen:
        return
    seen |= {name}
    old, new = _resolved(old, both[0]), _resolved(new, both[1])
    if old.get("type") != new.get("type"):
        yield f"{where}: type {old.get('type')} became {new.get('type')}"
        return
    if "enum" in old and "enum" in new:
        removed = set(old["enum"]) - set(new["enum"]) if is_request else set()
        for value in sorted(map(str, removed)):
            yield f"{where}: the value {value} is gone"
    properties = new.get("properties", {})
    for field, schema in old.get("properties", {}).items():
        if field not in properties:
            yield f"{where}: the field {field} is gone"
        else:
            yield from _schema_breaks(
                f"{where}.{field}", schema, properties[field], both, is_request=is_request, seen=seen
            )
    if is_request:
        for field in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
            yield f"{where}: the field {field} became required"
    if "items" in old and "items" in new:
        yield from _schema_breaks(f"{where}[]", old["items"], new["items"], both, is_request=is_request, seen=seen)


def _resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def proto_breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> Iterator[str]:
    """Yield messages, fields, enum values and methods of our own packages that are gone or changed."""
    before, after = _by_name(old), _by_name(new)
    for name, signature in before.items():
        if name not in after:
            yield f"{name} is gone"
        elif after[name] != signature:
            yield f"{name} was {signature} and is {after[name]}"


def _by_name(files: FileDescriptorSet) -> dict[str, str]:
    """Return a signature for every field, enum value and method, by full name."""
    found: dict[str, str] = {}
    for file in files.file:
        if not f"{file.package}.".startswith(PUBLIC_PROTO_PACKAGES):
            continue
        for message in file.message_type:
            _add_message(f"{file.package}.{message.name}", message, found)
        for enum in file.enum_type:
            found |= {f"{file.package}.{enum.name}.{value.name}": str(value.number) for value in enum.value}
        for service in file.service:
            for method in service.method:
                name = f"{file.package}.{service.name}.{method.name}"
                found[name] = f"{method.input_type} -> {method.output_type}"
    return found


def _add_message(name: str, message: DescriptorProto, found: dict[str, str]) -> None:
    found[name] = "message"
    for field in message.field:
        found[f"{name}.{field.name}"] = f"{field.number}:{field.type}:{field.label}:{field.type_name}"
    for enum in message.enum_type:
        found.update({f"{name}.{enum.name}.{value.name}": str(value.number) for value in enum.value})
    for nested in message.nested_type:
        _add_message(f"{name}.{nested.name}", nested, found)


def current_openapi() -> dict[str, Any]:
    """Return the document that a server of this checkout serves."""
    return documented_app().openapi()


def current_protos() -> FileDescriptorSet:
    return FileDescriptorSet.FromString((ROOT / "ratelimit_rls" / "protos" / "descriptors.binpb").read_bytes())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.api_compatibility", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the APIs of this checkout as the released ones")
    if parser.parse_args(arguments).write:
        OPENAPI.write_text(json.dumps(current_openapi(), indent=1, sort_keys=True) + "\n")
        PROTOS.write_bytes(current_protos().SerializeToString(deterministic=True))
        return 0
    breaks = [*openapi_breaks(json.loads(OPENAPI.read_text()), current_openapi())]
    breaks += proto_breaks(FileDescriptorSet.FromString(PROTOS.read_bytes()), current_protos())
    print("\n".join(breaks) or "compatible with the last release")
    return 1 if breaks else 0


if __name__ == "__main__":
    sys.exit(main())
