"""The mapping: what it says in few words, and what is said about mistakes in it."""

from __future__ import annotations

import re

import pytest

from ratelimit_rls.envoy_config.mapping import from_file, from_flags
from ratelimit_rls.envoy_config.source import (
    DestinationCluster,
    Header,
    Host,
    MaskedRemoteAddress,
    Metadata,
    PathAlone,
    PathTemplates,
    Query,
    RemoteAddress,
    Source,
    SourceCluster,
    Value,
    parse_source,
)
from ratelimit_rls.errors import RulesError, SettingsError
from ratelimit_rls.rules.load import Source as File


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("header:X-User", Header("x-user")),
        ("header::path", Header(":path")),
        ("method", Header(":method")),
        ("host", Host()),
        ("scheme", Header(":scheme")),
        ("path", PathAlone()),
        ("query:page:size", Query("page:size")),
        ("value:a:b", Value("a:b")),
        ("remote_address", RemoteAddress()),
        ("masked_remote_address:24,64", MaskedRemoteAddress(24, 64)),
        ("metadata:envoy.jwt:payload:sub", Metadata("envoy.jwt", ("payload", "sub"))),
        ("source_cluster", SourceCluster()),
        ("destination_cluster", DestinationCluster()),
    ],
)
def test_a_source_is_a_short_text(text: str, source: Source) -> None:
    assert parse_source(text) == source


def test_templates_stand_in_a_list() -> None:
    source = parse_source("path:/users/{id},/users/{id}/orders/**")
    assert isinstance(source, PathTemplates)
    assert [template.text for template in source.templates] == ["/users/{id}", "/users/{id}/orders/**"]


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("user", "is not KEY=SOURCE"),
        ("=method", "is not KEY=SOURCE"),
        ("user=cookie:a", "is no source; there are destination_cluster, header, "),
        ("user=header", "does not say which; write e.g. header:x-user"),
        ("user=header:a b", "is no header's name"),
        ("user=method:GET", "has something after 'method', which stands alone"),
        ("masked_remote_address=masked_remote_address", "does not say which"),
        ("masked_remote_address=masked_remote_address:33,64", "needs the lengths of the prefixes"),
        ("sub=metadata:envoy.jwt", "names no value"),
        ("p=path:users", "has the template 'users', which does not start with '/'"),
        ("p=path:/a/**,/a/b", "has '/a/b' after '/a/**', which takes all of its paths"),
        ("client=remote_address", "Envoy calls that entry 'remote_address' whatever you want"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_with_the_reason(flag: str, told: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(told)):
        from_flags([flag])


def test_all_that_is_wrong_with_flags_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        from_flags(["user=method", "user=host", "page=query"])
    assert str(refused.value).splitlines() == [
        "--from 'user=host' is the second of 'user'",
        "--from 'page=query' does not say which; write e.g. query:page",
    ]


def test_a_file_says_the_same_and_what_no_short_text_can() -> None:
    text = """\
user: header:x-user
sub: {metadata: {namespace: envoy.jwt, path: [payload, "https://example.com/sub"]}}
shape: {path: ["/a,b/{x}"]}
"""
    read = from_file(File("map.yaml", text.encode()))
    assert read["user"].source == Header("x-user")
    assert read["user"].place == "map.yaml:1:1"
    assert read["sub"].source == Metadata("envoy.jwt", ("payload", "https://example.com/sub"))
    shape = read["shape"].source
    assert isinstance(shape, PathTemplates)
    assert shape.templates[0].text == "/a,b/{x}"


def test_every_mistake_in_a_file_has_its_place() -> None:
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
    with pytest.raises(RulesError) as refused:
        from_file(File("map.yaml", text.encode()))
    assert [str(problem).partition(";")[0] for problem in refused.value.problems] == [
        "map.yaml:1:7: error: user: cookie:a is no source",
        "map.yaml:2:9: error: client cannot be: Envoy calls that entry 'remote_address' whatever you want",
        "map.yaml:3:8: error: config error, unknown key 'query'",
        "map.yaml:4:7: error: both: a mapping is either {metadata: {namespace: …, path: […]}} or {path: […]}",
        "map.yaml:5:6: error: sub: a mapping names no value",
        "map.yaml:6:7: error: a list is not a mapping",
        "map.yaml:8:1: error: 'user' is written twice",
    ]


@pytest.mark.parametrize("text", ["", "[]", "user"])
def test_a_file_without_a_mapping_is_refused(text: str) -> None:
    with pytest.raises(RulesError, match=re.escape("there is no mapping; write e.g. 'user: header:x-user'")):
        from_file(File("map.yaml", text.encode()))
