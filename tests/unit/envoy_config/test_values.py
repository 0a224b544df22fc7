"""Values that a source can never have are reported with a remedy, and possible values are not."""

from __future__ import annotations

import pytest

from ratelimit_rls.envoy_config.unreachable_values import unreachable_reason
from ratelimit_rls.envoy_config.value_sources import parse_source
from ratelimit_rls.rules.compile import compile_documents

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 1}"
MASKED = "masked_remote_address:24,64"
LENGTHS = "is a network with /24 of IPv4 or /64 of IPv6, as the mapping says"


def reason_for(value: str, source: str) -> str:
    text = f"domain: edge\ndescriptors: [{{key: k, {value}, {LIMIT}}}]\n"
    (node,) = compile_documents({"edge.yaml": text.encode()}).tree.domains["edge"].children()
    return unreachable_reason(node, parse_source(source))


@pytest.mark.parametrize(
    ("value", "source", "reason"),
    [
        ("value: login", "path", "starts with a slash; write /login"),
        ("value: login/*", "path", "starts with a slash; write /login/*"),
        ("match: {prefix: login}", "path", "starts with a slash; write /login"),
        ("match: {cidr: 10.0.0.0/8}", "path", "is a path and never an address"),
        ("value: '/a?b=c'", "path", "comes without its query; write /a, or use the source header::path"),
        ("value: '/a*?b=*'", "path", "comes without its query; write /a*, or use the source header::path"),
        ("value: get", "method", "comes in capitals; write GET"),
        ("value: 'p*'", "method", "comes in capitals; write POST"),
        ("match: {regex: 'get|put'}", "method", "comes in capitals; write GET"),
        ("value: HTTP", "scheme", "comes as 'http' or 'https' only"),
        ("value: grpc", "scheme", "comes as 'http' or 'https' only"),
        ("match: {regex: 'wss?'}", "scheme", "comes as 'http' or 'https' only"),
        ("value: Example.com", "host", "comes in lower case; write example.com"),
        ("match: {prefix: API.}", "host", "comes in lower case; write api."),
        ("value: 'example.com:80'", "host", "comes without a port and a dot at its end; write example.com"),
        ("value: '*.example.com.'", "host", "comes without a port and a dot at its end; write *.example.com"),
        ("value: internal", "remote_address", "is an IP address"),
        (
            "value: 10.0.0.0/8",
            "remote_address",
            "is one IP address and never a network; write match: {cidr: 10.0.0.0/8}",
        ),
        ("value: '2001:DB8:0::1'", "remote_address", "comes as Envoy writes it; write 2001:db8::1"),
        ("value: 'host-*'", "remote_address", "is an IP address, in lower case"),
        ("match: {prefix: '2001:DB8:'}", "remote_address", "is an IP address, in lower case"),
        ("value: 10.0.0.0/8", MASKED, f"{LENGTHS}; write e.g. 10.0.0.0/24"),
        ("value: 10.1.2.3", MASKED, f"{LENGTHS}; write e.g. 10.1.2.0/24"),
        ("value: '2001:db8::/32'", MASKED, f"{LENGTHS}; write e.g. 2001:db8::/64"),
        ("value: 10.1.2.3/24", MASKED, "comes as Envoy writes it; write 10.1.2.0/24"),
        ("value: office", MASKED, LENGTHS),
        ("match: {prefix: office}", MASKED, LENGTHS),
        (
            "match: {cidr: 10.0.0.0/8}",
            MASKED,
            f"{LENGTHS}, and cidr compares addresses; give the network as 'value', or match remote_address",
        ),
    ],
)
def test_unreachable_value_is_explained(value: str, source: str, reason: str) -> None:
    assert reason_for(value, source) == reason


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("shadow_mode: false", "path"),
        ("value: /login", "path"),
        ("value: '*/health'", "path"),
        ("match: {prefix: /v1}", "path"),
        ("match: {regex: '/v[0-9]+/.*'}", "path"),
        ("value: '/a?b=c'", "header::path"),
        ("value: GET", "method"),
        ("value: 'P*'", "method"),
        ("value: purge", "method"),
        ("match: {regex: '(?i)get'}", "method"),
        ("value: https", "scheme"),
        ("value: 'http*'", "scheme"),
        ("value: example.com", "host"),
        ("value: '[2001:db8::1]'", "host"),
        ("value: 'api.*'", "host"),
        ("match: {prefix: api.}", "host"),
        ("match: {cidr: 10.0.0.0/8}", "host"),
        ("value: 10.1.2.3", "remote_address"),
        ("value: '2001:db8::1'", "remote_address"),
        ("value: '::ffff:10.1.2.3'", "remote_address"),
        ("value: '10.*'", "remote_address"),
        ("match: {cidr: 10.0.0.0/8}", "remote_address"),
        ("value: 10.1.2.0/24", MASKED),
        ("value: '2001:db8::/64'", MASKED),
        ("value: '10.*/24'", MASKED),
        ("match: {prefix: '10.'}", MASKED),
        ("shadow_mode: false", MASKED),
        ("value: Anything at all?", "header:x-user"),
        ("match: {cidr: 10.0.0.0/8}", "header:x-real-ip"),
    ],
)
def test_reachable_value_has_no_warning(value: str, source: str) -> None:
    assert reason_for(value, source) == ""
