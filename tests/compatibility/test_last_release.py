"""Clients of the last release can use the APIs of this checkout (docs/compatibility.md)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tools.api_compatibility import (
    OPENAPI,
    PROTOS,
    current_openapi,
    current_protos,
    openapi_breaks,
    proto_breaks,
)

RELEASED: dict[str, Any] = json.loads(OPENAPI.read_text())


def test_admin_api_is_compatible_with_the_last_release() -> None:
    assert [*openapi_breaks(RELEASED, current_openapi())] == []


def test_protos_are_compatible_with_the_last_release() -> None:
    released = FileDescriptorSet.FromString(PROTOS.read_bytes())
    assert [*proto_breaks(released, current_protos())] == []


def schema(document: dict[str, Any], operation: dict[str, Any], *, of_request: bool) -> dict[str, Any]:
    body = operation["requestBody"] if of_request else operation["responses"]["200"]
    reference = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][reference]
    return found


def drop_path(document: dict[str, Any]) -> None:
    del document["paths"]["/api/v1/tiers"]


def drop_method(document: dict[str, Any]) -> None:
    del document["paths"]["/api/v1/users/{user_id}"]["delete"]


def drop_response_field(document: dict[str, Any]) -> None:
    operation = document["paths"]["/api/v1/users/{user_id}"]["get"]
    properties = schema(document, operation, of_request=False)["properties"]
    del properties[next(iter(properties))]


def change_response_type(document: dict[str, Any]) -> None:
    operation = document["paths"]["/api/v1/users/{user_id}"]["get"]
    properties = schema(document, operation, of_request=False)["properties"]
    properties[next(iter(properties))] = {"type": "number"}


def require_request_field(document: dict[str, Any]) -> None:
    operation = document["paths"]["/api/v1/tiers"]["post"]
    body = schema(document, operation, of_request=True)
    body["properties"]["added"] = {"type": "string"}
    body["required"] = [*body.get("required", ()), "added"]


def require_parameter(document: dict[str, Any]) -> None:
    operation = document["paths"]["/api/v1/tiers"]["get"]
    operation.setdefault("parameters", []).append({"in": "query", "name": "added", "required": True})


@pytest.mark.parametrize(
    "change",
    [drop_path, drop_method, drop_response_field, change_response_type, require_request_field, require_parameter],
)
def test_breaking_change_of_the_admin_api_is_found(change: Callable[[dict[str, Any]], None]) -> None:
    changed = copy.deepcopy(RELEASED)
    change(changed)
    assert [*openapi_breaks(RELEASED, changed)] != []


def test_additions_to_the_admin_api_are_compatible() -> None:
    changed = copy.deepcopy(RELEASED)
    changed["paths"]["/api/v1/new"] = {"get": {"responses": {}}}
    operation = changed["paths"]["/api/v1/tiers"]["post"]
    schema(changed, operation, of_request=True)["properties"]["added"] = {"type": "string"}
    assert [*openapi_breaks(RELEASED, changed)] == []


def rename_field(files: FileDescriptorSet) -> None:
    own_message(files).field[0].name = "renamed"


def renumber_field(files: FileDescriptorSet) -> None:
    own_message(files).field[0].number = 99


def drop_rpc(files: FileDescriptorSet) -> None:
    service = next(file.service[0] for file in files.file if file.package == "ratelimit_rls.v1")
    del service.method[0]


def own_message(files: FileDescriptorSet) -> Any:
    return next(file.message_type[0] for file in files.file if file.package == "ratelimit_rls.v1")


@pytest.mark.parametrize("change", [rename_field, renumber_field, drop_rpc])
def test_breaking_change_of_a_proto_is_found(change: Callable[[FileDescriptorSet], None]) -> None:
    released = FileDescriptorSet.FromString(PROTOS.read_bytes())
    changed = current_protos()
    change(changed)
    assert [*proto_breaks(released, changed)] != []
