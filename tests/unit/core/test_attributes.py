"""Descriptors made from what Envoy tells of a request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_network

import pytest

from ratelimit_rls.core.attributes import (
    AttributeMapping,
    Attributes,
    Client,
    Context,
    Fixed,
    Header,
    Host,
    MappedDescriptor,
    MappedEntry,
    Metadata,
    Method,
    Path,
    PathSegment,
    PathShape,
    QueryParameter,
    Scheme,
    Source,
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
    ("source", "value"),
    [
        (Method(), "GET"),
        (Scheme(), "https"),
        (Host(), "shop.example:8443"),
        (Path(), "/users/J%C3%B6rg%2F7/orders"),
        (Client(ClientIp()), "192.0.2.1"),
        (Client(ClientIp(trusted_proxies=1)), "6.6.6.6"),
        (Client(ClientIp(trusted_networks=(ip_network("192.0.2.0/24"),))), "6.6.6.6"),
        (Header("x-api"), "v2"),
        (Header("x-none"), None),
        (QueryParameter("page"), "2"),
        (QueryParameter("q"), "a b&c"),
        (QueryParameter("name"), "x"),
        (QueryParameter("empty"), ""),
        (QueryParameter("flag"), ""),
        (QueryParameter("pag"), None),
        (Context("name"), "route"),
        (Context("none"), None),
        (Metadata(("jwt", "payload", "sub")), "ann"),
        (Metadata(("jwt", "payload", "aud")), None),
        (Fixed("x"), "x"),
        (PathShape.of((PathTemplate.parse("/users"), ORDERS, PathTemplate.parse("/**"))), "/users/{id}/orders"),
        (
            PathShape.of((PathTemplate.parse("/users/{id}/orders/{order}/items"), PathTemplate.parse("/{a}/**"))),
            "/{a}/**",
        ),
        (PathShape.of((PathTemplate.parse("/users"),)), None),
        (PathSegment(ORDERS, 1), "Jörg/7"),
        (PathSegment(PathTemplate.parse("/users/{id}"), 1), None),
    ],
)
def test_where_a_value_comes_from(source: Source, value: str | None) -> None:
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
def test_a_segment_is_unescaped_where_that_makes_text(sent: str, value: str) -> None:
    source = PathSegment(PathTemplate.parse("/{id}"), 0)
    assert source.value(Attributes(path="/" + sent)) == value


def mapping(*descriptors: list[MappedEntry], hits: int | None = None) -> AttributeMapping:
    return AttributeMapping.of(tuple(MappedDescriptor(tuple(entries), hits) for entries in descriptors))


def test_a_descriptor_without_one_of_its_values_is_left_out_and_the_others_stay() -> None:
    made = mapping(
        [MappedEntry("api", Header("x-api")), MappedEntry("user", Header("x-user"))],
        [MappedEntry("method", Method()), MappedEntry("kind", Fixed("web"))],
        [MappedEntry("page", QueryParameter("empty"))],
        hits=3,
    )
    assert made.request("edge", REQUEST) == Request(
        "edge", (Descriptor((Entry("method", "GET"), Entry("kind", "web")), hits=3),)
    )


def test_a_default_stands_in_for_a_missing_or_an_empty_value() -> None:
    made = mapping(
        [MappedEntry("user", Header("x-user"), "nobody"), MappedEntry("page", QueryParameter("empty"), "1")],
    )
    request = made.request("edge", REQUEST)
    assert request is not None
    assert request.descriptors[0].entries == (("user", "nobody"), ("page", "1"))


def test_without_any_descriptor_no_limit_applies() -> None:
    assert mapping([MappedEntry("user", Header("x-user"))]).request("edge", REQUEST) is None


def test_requests_are_equal_exactly_when_their_descriptors_are() -> None:
    made = mapping([MappedEntry("api", Header("x-api"))])
    one, same = (made.request("edge", replace(REQUEST, path=path)) for path in ("/a", "/b"))
    other = made.request("edge", replace(REQUEST, headers={"x-api": "v3"}))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_the_mapping_knows_what_metadata_it_asks_for() -> None:
    sub = Metadata(("jwt", "payload", "sub"))
    made = mapping([MappedEntry("a", sub), MappedEntry("b", Method())], [MappedEntry("c", sub)])
    assert made.metadata == (("jwt", "payload", "sub"),)


def test_values_of_any_length_pass_whole() -> None:
    value = "v" * 100_000
    assert Header("x").value(Attributes(headers={"x": value})) == value
    assert QueryParameter("x").value(Attributes(query="&" * 100_000 + f"x={value}")) == value


def calls_made(work: Callable[[], object]) -> int:
    """By the interpreter itself: what is left to the library's C is not counted, and takes no time to speak of."""
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
def test_no_query_costs_more_than_to_run_over_it(before: str, unit: str) -> None:
    source = QueryParameter("x")
    assert calls_made(lambda: source.value(Attributes(query=before + unit * 10_000))) < 50


@pytest.mark.parametrize("unit", HOSTILE)
def test_no_segment_costs_more_than_to_run_over_it(unit: str) -> None:
    source = PathSegment(PathTemplate.parse("/{id}"), 0)
    assert calls_made(lambda: source.value(Attributes(path="/" + unit * 10_000))) < 50
