"""Compilation of `ext_authz`, and positions and messages of its errors."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from ratelimit_rls.core.attributes import (
    AttributeMapping,
    ClientIpSource,
    ContextSource,
    FixedSource,
    HeaderSource,
    HostSource,
    MappedEntry,
    MetadataSource,
    MethodSource,
    PathSegmentSource,
    PathTemplateSource,
    QueryParameterSource,
)
from ratelimit_rls.core.client_ip import ClientIp
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.ext_authz import MAX_DESCRIPTORS, MAX_ENTRIES, MAX_TEMPLATES, compile_mapping
from ratelimit_rls.rules.source_document import SourceDocument, load
from ratelimit_rls.simulation.runner import run_suite
from ratelimit_rls.simulation.suite import read_suite
from ratelimit_rls.yaml.findings import Findings

FULL = """\
trusted_proxies: 2
use_remote_address: true
ipv6_prefix: 64
descriptors:
  - entries:
      - {key: remote_address, from: client_ip}
      - {key: method, from: method}
      - {key: host, from: host, default: unknown}
      - {key: path, from: path, templates: ["/users/{id}", "/**"]}
    hits: 2
  - entries:
      - {key: user, template: "/users/{id}/**", take: id}
      - {key: api, header: X-API}
      - {key: page, query: page}
      - {key: route, context: name}
      - {key: sub, metadata: {namespace: jwt, path: [payload, sub]}}
      - {key: kind, value: fixed}
upstream_headers: {X-Remaining-Rule: "${rule}"}
"""


def read(text: str) -> tuple[AttributeMapping | None, Findings]:
    found = Findings("edge.yaml")
    node = load(SourceDocument("edge.yaml", textwrap.dedent(text).encode()))
    assert node is not None
    return compile_mapping(node, found), found


def test_every_ext_authz_key_is_compiled() -> None:
    mapping, found = read(FULL)
    assert found.errors == found.warnings == []
    assert mapping is not None
    first, second = mapping.descriptors
    assert first.hits == 2
    assert second.hits is None
    client, method, host, path = first.entries
    assert client == MappedEntry("remote_address", ClientIpSource(ClientIp(2, True, 64)))
    assert method == MappedEntry("method", MethodSource())
    assert host == MappedEntry("host", HostSource(), "unknown")
    assert isinstance(path.source, PathTemplateSource)
    assert [template.text for template in path.source.templates] == ["/users/{id}", "/**"]
    user, *others = second.entries
    assert isinstance(user.source, PathSegmentSource)
    assert user.source.number == 1
    assert [entry.source for entry in others] == [
        HeaderSource("x-api"),
        QueryParameterSource("page"),
        ContextSource("name"),
        MetadataSource(("jwt", "payload", "sub")),
        FixedSource("fixed"),
    ]
    ((name, template),) = mapping.upstream_headers
    assert name == "x-remaining-rule"
    assert template.parts


def test_ext_authz_defaults_are_safe() -> None:
    mapping, _ = read("descriptors: [{entries: [{key: remote_address, from: client_ip}]}]")
    assert mapping is not None
    assert mapping.descriptors[0].entries[0].source == ClientIpSource(ClientIp(0, False, 128))
    assert mapping.upstream_headers == ()


def entry(text: str) -> str:
    return f"descriptors:\n  - entries:\n    - {text}\n"


CLIENT = "descriptors: [{entries: [{key: a, from: client_ip}]}]\n"

# YAML: (line, column, part of the message)
MISTAKES = {
    "[]": (1, 1, "a list is not a mapping; its keys are trusted_proxies"),
    "{}": (1, 1, "'descriptors' is missing; write 'descriptors: [{entries:"),
    "descriptors: []": (1, 14, "'descriptors' is empty"),
    "descriptors: {}": (1, 14, "descriptors: a mapping is not a list"),
    "descriptors: [x]": (1, 15, "x is not a mapping; its keys are entries, hits"),
    "descriptors: [{hits: 1}]": (1, 15, "'entries' is missing"),
    "descriptors: [{entries: []}]": (1, 25, "'entries' is empty"),
    "descriptors: [{entries: [x]}]": (1, 26, "x is not a mapping; its keys are key, from"),
    "descriptors: [{entries: [{key: a, from: method}], hits: -1}]": (1, 57, "hits: -1 is not a whole number from 0 on"),
    "descriptors: [{entries: [{key: a, from: method}], hits: 4294967296}]": (1, 57, "more than 4294967295"),
    CLIENT + "descriptor: []": (2, 1, "unknown key 'descriptor'"),
    CLIENT + "trusted_proxies: -1": (2, 18, "trusted_proxies: -1 is not a whole number from 0 on"),
    CLIENT + "trusted_proxies: 17": (2, 18, "trusted_proxies: 17 is more than 16"),
    CLIENT + "trusted_proxies: one": (2, 18, "trusted_proxies: one is not a whole number"),
    CLIENT + "trusted_proxies: '1'": (2, 18, "trusted_proxies: 1 is not a whole number"),
    CLIENT + "trusted_proxies: 99\nuse_remote_address: true": (2, 18, "trusted_proxies: 99 is more than 16"),
    CLIENT + "trusted_proxies: 0\nuse_remote_address: true": (3, 21, "it needs 'trusted_proxies: 1' or more"),
    CLIENT + "ipv6_prefix: 0": (2, 14, "ipv6_prefix: 0 is not a whole number from 1 on"),
    CLIENT + "ipv6_prefix: 129": (2, 14, "ipv6_prefix: 129 is more than 128"),
    CLIENT + "trusted_proxies: 1": (1, 1, "needs 'use_remote_address: true' or 'false' beside it"),
    CLIENT + "use_remote_address: true": (2, 21, "it needs 'trusted_proxies: 1' or more"),
    CLIENT + "trusted_proxies: 1\nuse_remote_address: maybe": (3, 21, "maybe is not true or false"),
    CLIENT + "upstream_headers: [x]": (2, 19, "is not a mapping of names to texts"),
    CLIENT + "upstream_headers: {'a b': x}": (2, 20, "is not the name of a header"),
    CLIENT + "upstream_headers: {':path': x}": (2, 20, "is not the name of a header"),
    CLIENT + "upstream_headers: {host: x}": (2, 20, "is set by the HTTP connection"),
    CLIENT + "upstream_headers: {x-a: '${who}'}": (2, 25, "asks for '${who}'; it can ask for domain, rule"),
    CLIENT + 'upstream_headers: {x-a: "a\\r\\nb"}': (2, 25, "a line break"),
    entry("{from: method}"): (3, 7, "'key' is missing; write 'key: remote_address'"),
    entry("{key: '', from: method}"): (3, 13, "is empty; write a value"),
    entry("{key: a}"): (3, 7, "does not say where its value comes from; write one of from, template, header"),
    entry("{key: a, from: method, header: x}"): (3, 7, "says from and header where its value comes from"),
    entry("{key: a, from: ip}"): (
        3,
        22,
        "from: ip is not one of method, path, host, scheme, user, tier, org, api_key, client_ip",
    ),
    entry("{key: a, header: 'x y'}"): (3, 24, "is not the name of a header"),
    entry("{key: a, header: [x]}"): (3, 24, "header: a list is not text"),
    entry("{key: a, headers: x}"): (3, 16, "unknown key 'headers'; did you mean 'header'?"),
    entry("{key: a, query: ''}"): (3, 23, "is empty"),
    entry(f"{{key: a, query: {'q' * 257}}}"): (
        3,
        23,
        "is longer than 256 characters; must be the name of one parameter",
    ),
    entry("{key: a, context: ''}"): (3, 25, "is empty"),
    entry("{key: a, value: ''}"): (3, 23, "is empty"),
    entry("{key: a, header: x, default: ''}"): (3, 36, "is empty"),
    entry("{key: a, header: x, templates: [/a]}"): (
        3,
        38,
        "'templates' has no meaning beside 'header'; it goes with 'from'",
    ),
    entry("{key: a, from: method, templates: [/a]}"): (3, 41, "'templates' are of paths; write 'from: path'"),
    entry("{key: a, from: path, templates: []}"): (3, 39, "'templates' is empty"),
    entry("{key: a, from: path, templates: /a}"): (3, 39, "templates: /a is not a list"),
    entry("{key: a, from: path, templates: [{}]}"): (3, 40, "a mapping is not a template; a template is segments"),
    entry("{key: a, from: path, templates: [a]}"): (
        3,
        40,
        "does not start with '/'; a template is segments between slashes",
    ),
    entry("{key: a, from: path, templates: [/a/**/b]}"): (3, 40, "'**' before its end"),
    entry("{key: a, from: path, templates: [/a, /a]}"): (3, 44, "'/a' is never matched: '/a' before it"),
    entry("{key: a, from: path, templates: ['/**', /a]}"): (3, 47, "'/a' is never matched: '/**' before it"),
    entry("{key: a, template: '/a/{b}'}"): (3, 7, "'take' is missing; write 'take: id'"),
    entry("{key: a, template: '/a/{b}', take: c}"): (3, 42, "take: c is not named in '/a/{b}', which names b"),
    entry("{key: a, template: /a, take: c}"): (3, 36, "which names nothing: write one segment as '{name}'"),
    entry("{key: a, template: '/{b', take: b}"): (3, 26, "the template '/{b' has '{b'"),
    entry("{key: a, from: path, take: b}"): (3, 34, "'take' has no meaning beside 'from'; it goes with 'template'"),
    entry("{key: a, metadata: x}"): (3, 26, "x is not a mapping; its keys are namespace, path"),
    entry("{key: a, metadata: {path: [b]}}"): (3, 26, "'namespace' is missing"),
    entry("{key: a, metadata: {namespace: n}}"): (3, 26, "'path' is missing; write 'path: [payload, sub]'"),
    entry("{key: a, metadata: {namespace: n, path: []}}"): (3, 47, "'path' is empty"),
    entry("{key: a, metadata: {namespace: n, path: [[b]]}}"): (3, 48, "path: a list is not a key"),
    entry("{key: a, metadata: {namespace: n, path: ['']}}"): (3, 48, "path: an empty text is not a key"),
    entry("{key: a, key: b, from: method}"): (3, 16, "'key' is written twice"),
    entry("{key: a, from: method}\n    - {key: a, from: method}"): (4, 7, "the entry 'a' is written twice"),
    entry("{key: a, from: method}\n  - {entries: [{key: a, from: method}]}"): (4, 5, "line 2 has the same descriptor"),
}


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_ext_authz_error_has_position_and_message(text: str) -> None:
    mapping, found = read(text)
    line, column, message = MISTAKES[text]
    assert mapping is None
    assert [(problem.line, problem.column) for problem in found.errors] == [(line, column)], found.errors
    assert message in found.errors[0].message


def test_all_ext_authz_errors_are_reported_at_once() -> None:
    _, found = read(
        entry("{key: '', from: ip}\n    - {key: b}\n    - {key: c, from: path, templates: [a, '{']}")
        + "trusted_proxies: 99\n"
    )
    assert len(found.errors) == 6


def test_ext_authz_sizes_are_bounded() -> None:
    entries = ", ".join(f"{{key: k{number}, from: method}}" for number in range(MAX_ENTRIES + 1))
    descriptors = ", ".join(f"{{entries: [{{key: k{number}, from: method}}]}}" for number in range(MAX_DESCRIPTORS + 1))
    templates = ", ".join(f"/{number}" for number in range(MAX_TEMPLATES + 1))
    for text, most in (
        (f"descriptors: [{{entries: [{entries}]}}]", MAX_ENTRIES),
        (f"descriptors: [{descriptors}]", MAX_DESCRIPTORS),
        (f"descriptors: [{{entries: [{{key: a, from: path, templates: [{templates}]}}]}}]", MAX_TEMPLATES),
    ):
        mapping, found = read(text)
        assert mapping is None
        assert [f"at most {most}" in problem.message for problem in found.errors] == [True]


REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "ext_authz.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- file: (\S+) -->\n```yaml\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize(
    "document",
    [
        EXAMPLES["edge.yaml"],
        (REPOSITORY / "envoy" / "ext-authz-only" / "rules.yaml").read_text(),
    ],
    ids=["page", "sandbox"],
)
def test_documented_ext_authz_loads_without_warnings(document: str) -> None:
    compiled = compile_documents({"edge.yaml": document.encode()})
    assert compiled.warnings == ()
    assert set(compiled.tree.mappings) == {"edge"}


async def test_documented_ext_authz_behaves_as_described(tmp_path: Path) -> None:
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)

    (outcome,) = await run_suite(read_suite(tmp_path / "edge.test.yaml"))

    assert outcome.differences == ()
    assert len(outcome.matched_rules) == 4
