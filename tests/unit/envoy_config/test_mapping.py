"""Parsing of the mapping from flags and files, and its errors."""

from __future__ import annotations

import re

import pytest

from ratelimit_rls.envoy_config.mapping import from_file, from_flags
from ratelimit_rls.envoy_config.value_sources import (
    ActionSource,
    DestinationClusterAction,
    FixedValueAction,
    HeaderAction,
    HostAction,
    MaskedAddressAction,
    MetadataAction,
    PathAction,
    PathTemplateAction,
    QueryAction,
    RemoteAddressAction,
    SourceClusterAction,
    parse_source,
)
from ratelimit_rls.errors import RulesError, SettingsError
from ratelimit_rls.rules.source_document import SourceDocument as File


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("header:X-User", HeaderAction("x-user")),
        ("header::path", HeaderAction(":path")),
        ("method", HeaderAction(":method")),
        ("host", HostAction()),
        ("scheme", HeaderAction(":scheme")),
        ("path", PathAction()),
        ("query:page:size", QueryAction("page:size")),
        ("value:a:b", FixedValueAction("a:b")),
        ("remote_address", RemoteAddressAction()),
        ("masked_remote_address:24,64", MaskedAddressAction(24, 64)),
        ("metadata:envoy.jwt:payload:sub", MetadataAction("envoy.jwt", ("payload", "sub"))),
        ("source_cluster", SourceClusterAction()),
        ("destination_cluster", DestinationClusterAction()),
    ],
)
def test_source_text_is_parsed(text: str, source: ActionSource) -> None:
    assert parse_source(text) == source


def test_path_templates_are_parsed_from_a_list() -> None:
    source = parse_source("path:/users/{id},/users/{id}/orders/**")
    assert isinstance(source, PathTemplateAction)
    assert [template.text for template in source.templates] == ["/users/{id}", "/users/{id}/orders/**"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("user", "is not KEY=SOURCE"),
        ("=method", "is not KEY=SOURCE"),
        ("user=cookie:a", "is not a source; use one of destination_cluster, header, "),
        ("user=header", "has no argument; write e.g. header:x-user"),
        ("user=header:a b", "is not a header name"),
        ("user=method:GET", "has text after 'method', which takes no argument"),
        ("masked_remote_address=masked_remote_address", "has no argument"),
        ("masked_remote_address=masked_remote_address:33,64", "needs the lengths of the prefixes"),
        ("sub=metadata:envoy.jwt", "has no namespace or path"),
        ("p=path:users", "has the template 'users', which does not start with '/'"),
        ("p=path:/a/**,/a/b", "has '/a/b' after '/a/**', which matches all of its paths"),
        ("client=remote_address", "Envoy always names that entry 'remote_address'"),
    ],
)
def test_invalid_flag_is_rejected_with_the_reason(flag: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        from_flags([flag])


def test_all_flag_errors_are_reported_at_once() -> None:
    with pytest.raises(SettingsError) as raised:
        from_flags(["user=method", "user=host", "page=query"])
    assert str(raised.value).splitlines() == [
        "--from 'user=host' repeats the key 'user'",
        "--from 'page=query' has no argument; write e.g. query:page",
    ]


def test_mapping_file_accepts_short_and_structured_sources() -> None:
    text = """\
user: header:x-user
sub: {metadata: {namespace: envoy.jwt, path: [payload, "https://example.com/sub"]}}
shape: {path: ["/a,b/{x}"]}
"""
    read = from_file(File("map.yaml", text.encode()))
    assert read["user"].source == HeaderAction("x-user")
    assert read["user"].place == "map.yaml:1:1"
    assert read["sub"].source == MetadataAction("envoy.jwt", ("payload", "https://example.com/sub"))
    shape = read["shape"].source
    assert isinstance(shape, PathTemplateAction)
    assert shape.templates[0].text == "/a,b/{x}"


def test_mapping_file_errors_have_positions() -> None:
    text = """\
user: cookie:a
client: remote_address
page: {query: page}
both: {metadata: {namespace: a, path: [b]}, path: [/a]}
sub: {metadata: {namespace: envoy.jwt}}
list: [a]
user: method
user: method
"""
    with pytest.raises(RulesError) as raised:
        from_file(File("map.yaml", text.encode()))
    assert [str(problem).partition(";")[0] for problem in raised.value.problems] == [
        "map.yaml:1:7: error: user: cookie:a is not a source",
        "map.yaml:2:9: error: client cannot be used: Envoy always names that entry 'remote_address'",
        "map.yaml:3:8: error: config error, unknown key 'query'",
        "map.yaml:4:7: error: both: a mapping is either {metadata: {namespace: …, path: […]}} or {path: […]}",
        "map.yaml:5:6: error: sub: a mapping has no namespace or path",
        "map.yaml:6:7: error: a list is not a mapping",
        "map.yaml:8:1: error: 'user' is written twice",
    ]


@pytest.mark.parametrize("text", ["", "[]", "user"])
def test_file_without_a_mapping_is_rejected(text: str) -> None:
    with pytest.raises(RulesError, match=re.escape("there is no mapping; write e.g. 'user: header:x-user'")):
        from_file(File("map.yaml", text.encode()))
