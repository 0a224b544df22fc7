"""Our reduced .proto files are compatible with Envoy's, and the descriptor set is up to date."""

from __future__ import annotations

import warnings
from pathlib import Path

from google.protobuf import descriptor_pool
from grpc_tools import protoc

from ratelimit_rls.core.model import Unit
from ratelimit_rls.protos import messages
from ratelimit_rls.protos.messages import (
    DISCOVERY,
    POOL,
    SERVICES,
    STREAM_RESOURCES,
    CheckRequest,
    CheckResponse,
    DiscoveryRequest,
    DiscoveryResponse,
    RateLimitConfig,
    RateLimitRequest,
    RateLimitResponse,
)

with warnings.catch_warnings():
    # The package declares its validators in a way that pydantic deprecates.
    warnings.simplefilter("ignore")
    from envoy_data_plane.envoy.service.auth import v3 as auth
    from envoy_data_plane.envoy.service.discovery import v3 as discovery
    from envoy_data_plane.envoy.service.ratelimit import v3 as envoy
    from envoy_data_plane.envoy.type.v3 import RateLimitUnit

PROTOS = Path(messages.__file__).parent


def test_descriptor_set_is_up_to_date(tmp_path: Path) -> None:
    fresh = tmp_path / "descriptors.binpb"
    arguments = ["protoc", f"-I{PROTOS}", "--include_imports", f"--descriptor_set_out={fresh}"]
    include = Path(protoc.__file__).parent / "_proto"
    services = [POOL.FindServiceByName(name).file.name for name in (*SERVICES, DISCOVERY)]
    assert protoc.main([*arguments, f"-I{include}", *services, RateLimitConfig.DESCRIPTOR.file.name]) == 0
    assert (PROTOS / "descriptors.binpb").read_bytes() == fresh.read_bytes(), "stale: run `make docs`"


def test_every_proto_file_is_in_the_descriptor_set() -> None:
    for path in (PROTOS).rglob("*.proto"):
        assert POOL.FindFileByName(str(path.relative_to(PROTOS)))


def test_default_descriptor_pool_is_not_used() -> None:
    assert RateLimitRequest.DESCRIPTOR.file.pool is POOL
    assert POOL is not descriptor_pool.Default()


def test_request_is_compatible_with_envoy_api() -> None:
    own = RateLimitRequest(domain="edge", hits_addend=7)
    descriptor = own.descriptors.add(is_negative_hits=True)
    descriptor.entries.add(key="user", value="ä")
    descriptor.limit.requests_per_unit = 2**32 - 1
    descriptor.limit.unit = Unit.MONTH
    descriptor.hits_addend.value = 2**64 - 1
    envoy_message = envoy.RateLimitRequest.parse(own.SerializeToString())
    (read,) = envoy_message.descriptors
    assert (envoy_message.domain, envoy_message.hits_addend) == ("edge", 7)
    assert [(entry.key, entry.value) for entry in read.entries] == [("user", "ä")]
    assert read.limit is not None
    assert (read.limit.requests_per_unit, read.limit.unit) == (2**32 - 1, RateLimitUnit.MONTH)
    assert (read.hits_addend, read.is_negative_hits) == (2**64 - 1, True)
    assert RateLimitRequest.FromString(bytes(envoy_message)) == own


def test_response_is_compatible_with_envoy_api() -> None:
    own = RateLimitResponse(overall_code="OVER_LIMIT", raw_body=b"no")
    status = own.statuses.add(code="OK", limit_remaining=2**32 - 1)
    status.current_limit.name = "per-user"
    status.current_limit.requests_per_unit = 10
    status.current_limit.unit = Unit.WEEK
    status.duration_until_reset.seconds = 58
    status.quota.requests = 3
    own.response_headers_to_add.add(key="a", value="b")
    own.request_headers_to_add.add(key="c", raw_value=b"\xff")
    own.dynamic_metadata.update({"domain": "edge", "numbers": [1.5]})
    own.quota.id = "q"
    own.quota.valid_until.seconds = 1_700_000_000
    envoy_message = envoy.RateLimitResponse.parse(own.SerializeToString())
    assert envoy_message.overall_code is envoy.RateLimitResponseCode.OVER_LIMIT
    assert envoy_message.statuses[0].current_limit is not None
    assert envoy_message.statuses[0].current_limit.unit is envoy.RateLimitResponseRateLimitUnit.WEEK
    assert envoy_message.statuses[0].quota is not None
    assert (envoy_message.request_headers_to_add[0].raw_value, envoy_message.raw_body) == (b"\xff", b"no")
    assert RateLimitResponse.FromString(bytes(envoy_message)) == own


def test_check_request_is_compatible_with_envoy_api() -> None:
    own = CheckRequest()
    attributes = own.attributes
    attributes.source.address.socket_address.address = "192.0.2.1"
    attributes.source.address.socket_address.port_value = 1234
    attributes.source.principal = "spiffe://ours/web"
    attributes.destination.address.pipe.path = "/run/envoy.sock"
    http = attributes.request.http
    http.id, http.method, http.path, http.host, http.scheme = "id", "GET", "/a?b=c", "shop.example", "https"
    http.size, http.protocol = -1, "HTTP/2"
    http.headers["x-forwarded-for"] = "192.0.2.7"
    http.header_map.headers.add(key="x-raw", raw_value=b"\xff")
    attributes.context_extensions["name"] = "route"
    attributes.metadata_context.filter_metadata["jwt"].update({"payload": {"sub": "ann"}})
    attributes.route_metadata_context.filter_metadata["route"].update({"tier": 1.0})
    attributes.request.time.seconds = 1_700_000_000
    envoy_message = auth.CheckRequest.parse(own.SerializeToString())
    assert envoy_message.attributes is not None
    assert envoy_message.attributes.request is not None
    read = envoy_message.attributes.request.http
    assert read is not None
    assert (read.method, read.path, read.host, read.scheme) == ("GET", "/a?b=c", "shop.example", "https")
    assert (read.headers, read.size) == ({"x-forwarded-for": "192.0.2.7"}, -1)
    assert envoy_message.attributes.context_extensions == {"name": "route"}
    assert CheckRequest.FromString(bytes(envoy_message)) == own


def test_undeclared_fields_of_check_request_are_skipped() -> None:
    envoy_message = auth.CheckRequest(
        attributes=auth.AttributeContext(
            source=auth.AttributeContextPeer(certificate="-----BEGIN", labels={"app": "shop"}),
            request=auth.AttributeContextRequest(http=auth.AttributeContextHttpRequest(path="/a", body="x" * 1000)),
            tls_session=auth.AttributeContextTlsSession(sni="shop.example"),
        )
    )
    assert CheckRequest.FromString(bytes(envoy_message)).attributes.request.http.path == "/a"


def test_check_response_is_compatible_with_envoy_api() -> None:
    denial = CheckResponse()
    denial.status.code, denial.status.message = 8, "over limit"
    denial.denied_response.status.code = 429
    header = denial.denied_response.headers.add(append_action="OVERWRITE_IF_EXISTS_OR_ADD", keep_empty_value=True)
    header.header.key, header.header.value = "retry-after", "3"
    denial.denied_response.body = "no"
    denial.dynamic_metadata.update({"rule": "edge.user"})
    envoy_message = auth.CheckResponse.parse(denial.SerializeToString())
    assert envoy_message.denied_response is not None
    assert envoy_message.denied_response.status is not None
    assert (envoy_message.denied_response.status.code, envoy_message.denied_response.body) == (429, "no")
    assert envoy_message.denied_response.headers[0].append_action == 2
    assert CheckResponse.FromString(bytes(envoy_message)) == denial

    passing = CheckResponse()
    passing.status.code = 0
    passing.ok_response.headers.add().header.key = "x-rule"
    passing.ok_response.response_headers_to_add.add().header.key = "ratelimit"
    passing.ok_response.headers_to_remove.append("x-mine")
    envoy_message = auth.CheckResponse.parse(passing.SerializeToString())
    assert envoy_message.ok_response is not None
    assert envoy_message.ok_response.headers_to_remove == ["x-mine"]
    assert CheckResponse.FromString(bytes(envoy_message)) == passing


def test_units_match_envoy_api() -> None:
    known = {unit.name: int(unit) for unit in RateLimitUnit}
    envoy_message = {unit.name: int(unit) for unit in envoy.RateLimitResponseRateLimitUnit}
    assert envoy_message == {unit.name: int(unit) for unit in Unit}
    assert known.items() <= envoy_message.items()


def test_discovery_request_is_compatible_with_envoy_api() -> None:
    own = DiscoveryRequest(version_info="1", type_url="t", response_nonce="n", resource_names=["*"])
    own.node.id = "me"
    own.node.metadata.update({"zone": "b"})
    own.error_detail.code, own.error_detail.message = 3, "no"
    envoy_message = discovery.DiscoveryRequest.parse(own.SerializeToString())
    assert (envoy_message.version_info, envoy_message.type_url, envoy_message.response_nonce) == ("1", "t", "n")
    assert envoy_message.node is not None
    assert envoy_message.node.id == "me"
    assert envoy_message.error_detail is not None
    assert (envoy_message.error_detail.code, envoy_message.error_detail.message) == (3, "no")
    assert DiscoveryRequest.FromString(bytes(envoy_message)) == own


def test_discovery_response_is_compatible_with_envoy_api() -> None:
    own = DiscoveryResponse(version_info="1", type_url="t", nonce="n")
    own.resources.add(type_url="t", value=b"v")
    envoy_message = discovery.DiscoveryResponse.parse(own.SerializeToString())
    assert (envoy_message.version_info, envoy_message.type_url, envoy_message.nonce) == ("1", "t", "n")
    assert (envoy_message.resources[0].type_url, envoy_message.resources[0].value) == ("t", b"v")
    assert DiscoveryResponse.FromString(bytes(envoy_message)) == own


def test_discovery_method_is_declared() -> None:
    method = POOL.FindServiceByName(DISCOVERY).FindMethodByName("StreamAggregatedResources")
    assert f"/{method.containing_service.full_name}/{method.name}" == STREAM_RESOURCES
    assert (method.input_type.full_name, method.output_type.full_name) == (
        DiscoveryRequest.DESCRIPTOR.full_name,
        DiscoveryResponse.DESCRIPTOR.full_name,
    )


def test_rate_limit_config_has_the_public_field_numbers() -> None:
    """Checked by hand, because the package with Envoy's API does not contain these."""
    by_message = {
        "RateLimitConfig": ["name", "domain", "descriptors"],
        "RateLimitDescriptor": [
            "key",
            "value",
            "rate_limit",
            "descriptors",
            "shadow_mode",
            "detailed_metric",
            "quota_mode",
            "metadata",
        ],
        "RateLimitPolicy": ["unit", "requests_per_unit", "unlimited", "name", "replaces"],
        "RateLimitReplace": ["name"],
    }
    for message, names in by_message.items():
        fields = POOL.FindMessageTypeByName(f"ratelimit.config.ratelimit.v3.{message}").fields_by_number
        assert {number: field.name for number, field in fields.items()} == dict(enumerate(names, 1))
    units = POOL.FindEnumTypeByName("ratelimit.config.ratelimit.v3.RateLimitUnit")
    assert {value.name: value.number for value in units.values} == {unit.name: int(unit) for unit in Unit}
