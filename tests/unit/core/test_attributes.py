"""Descriptors made from the attributes of a request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from ipaddress import ip_network

import pytest

from ratelimit_rls.core.attributes import (
    AttributeMapping,
    Attributes,
    ClientIpSource,
    ContextSource,
    FixedSource,
    HeaderSource,
    HostSource,
    MappedDescriptor,
    MappedEntry,
    MetadataSource,
    MethodSource,
    PathSegmentSource,
    PathSource,
    PathTemplateSource,
    QueryParameterSource,
    SchemeSource,
    ValueSource,
)
from ratelimit_rls.core.client_ip import ClientIp
from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.core.path_template import PathTemplate

REQUEST = Attributes(
    method="GET",
    scheme="https",
    host="Shop.Example:8443",
    path="/users/J%C3%B6rg%2F7/orders",
    query="page=2&page=3&q=a+b%26c&empty=&flag&%6eame=x",
    peer="192.0.2.1",
    headers={"x-api": "v2", "x-forwarded-for": "6.6.6.6"},
    context={"name": "route"},
    metadata={("jwt", "payload", "sub"): "ann"},
)
ORDERS = PathTemplate.parse("/users/{id}/orders")


@pytest.mark.parametrize(
    ("sent", "host"),
    [
        ("Example.COM.", "example.com"),
        ("example.com..", "example.com"),
        ("example.com.:8443", "example.com:8443"),
        ("example.com.:", "example.com:"),
        ("example.com:8443", "example.com:8443"),
        ("[2001:DB8::1]:80", "[2001:db8::1]:80"),
        ("192.0.2.1.", "192.0.2.1"),
        ("a.:b.c", "a.:b.c"),
        (".", "."),
        ("", ""),
    ],
)
def test_host_is_normalized(sent: str, host: str) -> None:
    assert HostSource().value(Attributes(host=sent)) == host


@pytest.mark.parametrize("control", ["\r", "\n", "\0"])
def test_control_characters_in_path_are_detected(control: str) -> None:
    assert not Attributes(path="/a%0d%0a%00", query="b=\tc").has_control_in_path
    assert Attributes(path=f"/a{control}").has_control_in_path
    assert Attributes(path="/a", query=f"b={control}c").has_control_in_path


@pytest.mark.parametrize(
    ("source", "value"),
    [
        (MethodSource(), "GET"),
        (SchemeSource(), "https"),
        (HostSource(), "shop.example:8443"),
        (PathSource(), "/users/J%C3%B6rg%2F7/orders"),
        (ClientIpSource(ClientIp()), "192.0.2.1"),
        (ClientIpSource(ClientIp(trusted_proxies=1)), "6.6.6.6"),
        (ClientIpSource(ClientIp(trusted_networks=(ip_network("192.0.2.0/24"),))), "6.6.6.6"),
        (HeaderSource("x-api"), "v2"),
        (HeaderSource("x-none"), None),
        (QueryParameterSource("page"), "2"),
        (QueryParameterSource("q"), "a b&c"),
        (QueryParameterSource("name"), "x"),
        (QueryParameterSource("empty"), ""),
        (QueryParameterSource("flag"), ""),
        (QueryParameterSource("pag"), None),
        (ContextSource("name"), "route"),
        (ContextSource("none"), None),
        (MetadataSource(("jwt", "payload", "sub")), "ann"),
        (MetadataSource(("jwt", "payload", "aud")), None),
        (FixedSource("x"), "x"),
        (
            PathTemplateSource.of((PathTemplate.parse("/users"), ORDERS, PathTemplate.parse("/**"))),
            "/users/{id}/orders",
        ),
        (
            PathTemplateSource.of(
                (PathTemplate.parse("/users/{id}/orders/{order}/items"), PathTemplate.parse("/{a}/**"))
            ),
            "/{a}/**",
        ),
        (PathTemplateSource.of((PathTemplate.parse("/users"),)), None),
        (PathSegmentSource(ORDERS, 1), "Jörg/7"),
        (PathSegmentSource(PathTemplate.parse("/users/{id}"), 1), None),
    ],
)
def test_each_source_reads_its_attribute(source: ValueSource, value: str | None) -> None:
    assert source.value(REQUEST) == value


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        ("a%20b", "a b"),
        ("%zz", "%zz"),
        ("%", "%"),
        ("100%", "100%"),
        ("%ff", "%ff"),
        ("%C3%B6%ff", "%C3%B6%ff"),
        ("+", "+"),
    ],
)
def test_path_segment_is_percent_decoded_if_utf8(sent: str, value: str) -> None:
    source = PathSegmentSource(PathTemplate.parse("/{id}"), 0)
    assert source.value(Attributes(path="/" + sent)) == value


def mapping(*descriptors: list[MappedEntry], hits: int | None = None) -> AttributeMapping:
    return AttributeMapping.of(tuple(MappedDescriptor(tuple(entries), hits) for entries in descriptors))


def test_descriptor_with_missing_value_is_omitted() -> None:
    made = mapping(
        [MappedEntry("api", HeaderSource("x-api")), MappedEntry("user", HeaderSource("x-user"))],
        [MappedEntry("method", MethodSource()), MappedEntry("kind", FixedSource("web"))],
        [MappedEntry("page", QueryParameterSource("empty"))],
        hits=3,
    )
    assert made.request("edge", REQUEST) == Request(
        "edge", (Descriptor((Entry("method", "GET"), Entry("kind", "web")), hits=3),)
    )


def test_default_replaces_missing_or_empty_value() -> None:
    made = mapping(
        [
            MappedEntry("user", HeaderSource("x-user"), "nobody"),
            MappedEntry("page", QueryParameterSource("empty"), "1"),
        ],
    )
    request = made.request("edge", REQUEST)
    assert request is not None
    assert request.descriptors[0].entries == (("user", "nobody"), ("page", "1"))


def test_no_request_without_descriptors() -> None:
    assert mapping([MappedEntry("user", HeaderSource("x-user"))]).request("edge", REQUEST) is None


def test_requests_are_equal_iff_their_descriptors_are() -> None:
    made = mapping([MappedEntry("api", HeaderSource("x-api"))])
    one, same = (made.request("edge", REQUEST._replace(path=path)) for path in ("/a", "/b"))
    other = made.request("edge", REQUEST._replace(headers={"x-api": "v3"}))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_mapping_lists_the_metadata_it_reads() -> None:
    sub = MetadataSource(("jwt", "payload", "sub"))
    made = mapping([MappedEntry("a", sub), MappedEntry("b", MethodSource())], [MappedEntry("c", sub)])
    assert made.metadata == (("jwt", "payload", "sub"),)


def test_long_values_are_not_truncated() -> None:
    value = "v" * 100_000
    assert HeaderSource("x").value(Attributes(headers={"x": value})) == value
    assert QueryParameterSource("x").value(Attributes(query="&" * 100_000 + f"x={value}")) == value


def calls_made(work: Callable[[], object]) -> int:
    """Count Python function calls. Calls into C are not counted, and take negligible time."""
    made = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made


HOSTILE = ["%61&", "&", "+&", "x", "%78%79&", "%", "%zz", "a%61", "ö%61", "%ff"]


@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.parametrize("before", ["", "x="])
def test_query_lookup_takes_linear_time(before: str, unit: str) -> None:
    source = QueryParameterSource("x")
    assert calls_made(lambda: source.value(Attributes(query=before + unit * 10_000))) < 50


@pytest.mark.parametrize("unit", HOSTILE)
def test_segment_decoding_takes_linear_time(unit: str) -> None:
    source = PathSegmentSource(PathTemplate.parse("/{id}"), 0)
    assert calls_made(lambda: source.value(Attributes(path="/" + unit * 10_000))) < 50
