"""`ext_authz` to the mapping it describes, checked here so that no request can find it wanting."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from ipaddress import ip_network

from ratelimit_rls.core.attributes import (
    AnonymousIp,
    AttributeMapping,
    Caller,
    CallerId,
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
from ratelimit_rls.core.client_ip import MOST_TRUSTED_NETWORKS, MOST_TRUSTED_PROXIES, ClientIp, Network
from ratelimit_rls.core.model import MAX_HITS
from ratelimit_rls.core.path_template import PathTemplate
from ratelimit_rls.rules.fields import Fields
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.headers import TOKEN_CHARACTERS, compile_headers
from ratelimit_rls.rules.node import YamlNode, YamlScalar, excerpt

MAPPING_KEYS = (
    "trusted_proxies",
    "trusted_networks",
    "use_remote_address",
    "ipv6_prefix",
    "descriptors",
    "upstream_headers",
)
DESCRIPTOR_KEYS = ("entries", "hits")
SOURCE_KEYS = ("from", "template", "header", "query", "context", "metadata", "value")
ENTRY_KEYS = ("key", *SOURCE_KEYS, "templates", "take", "default")
METADATA_KEYS = ("namespace", "path")

# What is done for every request is bounded by the rules alone.
MOST_DESCRIPTORS = 32
MOST_ENTRIES = 16
MOST_TEMPLATES = 256
DEEPEST_METADATA = 16
LONGEST_QUERY_NAME = 256

_WHAT_A_TEMPLATE_IS = (
    "a template is segments between slashes: plain text, '{name}' for any one, and '**' at the end for the rest"
)
_HEADER_NAME = re.compile(f":?{TOKEN_CHARACTERS}")  # Envoy's own, such as ':authority', included

_PLAIN: dict[str, Callable[[], Source]] = {
    "method": Method,
    "path": Path,
    "host": Host,
    "scheme": Scheme,
    "user": partial(Caller, "user"),
    "tier": partial(Caller, "tier"),
    "org": partial(Caller, "org"),
    "api_key": partial(Caller, "api_key"),
}
_OF_ADDRESS: dict[str, Callable[[ClientIp], Source]] = {
    "client_ip": Client,
    "caller": CallerId,
    "anonymous_ip": AnonymousIp,
}
_FROM = (*_PLAIN, *_OF_ADDRESS)


def compile_mapping(node: YamlNode, found: Findings) -> AttributeMapping | None:
    """None after an error."""
    before = len(found.errors)
    fields = Fields(node, MAPPING_KEYS, found)
    client_ip = _client_ip(fields, found)
    reader = _Reader(client_ip, found)
    descriptors = reader.descriptors(fields)
    headers = compile_headers(fields.value("upstream_headers"), found)
    if len(found.errors) > before:
        return None
    # A header that rules write in any case is one header; Envoy and HTTP/2 know it in lower case.
    upstream = tuple((name.lower(), template) for name, template in headers)
    return AttributeMapping.of(descriptors, upstream, client_ip)


def _client_ip(fields: Fields, found: Findings) -> ClientIp:
    read = _within(fields, "trusted_proxies", 0, MOST_TRUSTED_PROXIES, found)
    depth = read or 0
    told = fields.value("use_remote_address")
    is_wrong = read is None and fields.has("trusted_proxies")  # which was reported
    if told is not None and not depth and not is_wrong:
        found.error(
            told, "'use_remote_address' says how to read X-Forwarded-For; it needs 'trusted_proxies: 1' or more"
        )
    elif told is None and depth:
        found.error(
            fields.node,
            "'trusted_proxies' needs 'use_remote_address: true' or 'false' beside it, as in Envoy's connection "
            "manager: whether the last address of X-Forwarded-For is Envoy's own",
        )
    networks = _networks(fields, found)
    if networks and fields.has("trusted_proxies"):
        found.error(
            fields.node,
            "'trusted_networks' and 'trusted_proxies' both say which proxies are believed; keep one of them",
        )
    return ClientIp(
        trusted_networks=networks,
        trusted_proxies=depth,
        use_remote_address=fields.truth("use_remote_address"),
        ipv6_prefix=_within(fields, "ipv6_prefix", 1, 128, found) or 128,
    )


def _networks(fields: Fields, found: Findings) -> tuple[Network, ...]:
    items = fields.items("trusted_networks")
    if len(items) > MOST_TRUSTED_NETWORKS:
        found.error(items[MOST_TRUSTED_NETWORKS], f"at most {MOST_TRUSTED_NETWORKS} trusted_networks are looked at")
    networks: list[Network] = []
    for item in items[:MOST_TRUSTED_NETWORKS]:
        try:
            networks.append(ip_network(item.text if isinstance(item, YamlScalar) else ""))
        except ValueError:
            found.error(item, f"trusted_networks: {excerpt(item)} is not a network such as 10.0.0.0/8")
    return tuple(networks)


class _Reader:
    """Reads descriptors; what an entry can be made from depends on the mapping it stands in."""

    def __init__(self, client_ip: ClientIp, found: Findings) -> None:
        self._client_ip = client_ip
        self._found = found

    def descriptors(self, fields: Fields) -> tuple[MappedDescriptor, ...]:
        fields.required_list("descriptors", "descriptors: [{entries: [{key: remote_address, from: client_ip}]}]")
        items = self._at_most(MOST_DESCRIPTORS, fields, "descriptors")
        read: dict[MappedDescriptor, YamlNode] = {}
        for item in items:
            descriptor = self._descriptor(item)
            if descriptor is not None and descriptor in read:
                self._found.error(
                    item,
                    f"line {read[descriptor].line} has the same descriptor; it would be counted twice",
                )
            elif descriptor is not None:
                read[descriptor] = item
        return tuple(read)

    def _descriptor(self, node: YamlNode) -> MappedDescriptor | None:
        fields = Fields(node, DESCRIPTOR_KEYS, self._found)
        fields.required_list("entries", "entries: [{key: remote_address, from: client_ip}]")
        entries: dict[MappedEntry, None] = {}
        complete = fields.has("entries")
        for item in self._at_most(MOST_ENTRIES, fields, "entries"):
            entry = self._entry(item)
            if entry is None:
                complete = False
            elif entry in entries:
                self._found.error(item, f"the entry '{entry.key}' is written twice")
            else:
                entries[entry] = None
        hits = _within(fields, "hits", 0, MAX_HITS, self._found)
        return MappedDescriptor(tuple(entries), hits) if complete else None

    def _entry(self, node: YamlNode) -> MappedEntry | None:
        before = len(self._found.errors)
        fields = Fields(node, ENTRY_KEYS, self._found)
        if len(self._found.errors) > before:
            return None  # what a key that is not known was meant to be must not be reported as missing
        fields.required("key", "key: remote_address")
        key = fields.read("key", some_text)
        default = fields.read("default", some_text)
        source = self._source(fields)
        return None if key is None or source is None else MappedEntry(key, source, default)

    def _source(self, fields: Fields) -> Source | None:
        written = [key for key in SOURCE_KEYS if fields.has(key)]
        if len(written) != 1:
            says = f"says {' and '.join(written)}" if written else "does not say"
            self._found.error(
                fields.node, f"the entry {says} where its value comes from; write one of {', '.join(SOURCE_KEYS)}"
            )
            return None
        (kind,) = written
        for beside, wanted in (("templates", "from"), ("take", "template")):
            if kind != wanted and (misplaced := fields.value(beside)) is not None:
                self._found.error(misplaced, f"'{beside}' has no meaning beside '{kind}'; it goes with '{wanted}'")
        match kind:
            case "from":
                return self._from(fields)
            case "template":
                return self._segment(fields)
            case "header":
                name = fields.read("header", header_name)
                return None if name is None else Header(name)
            case "query":
                name = fields.read("query", query_name)
                return None if name is None else QueryParameter(name)
            case "context":
                name = fields.read("context", some_text)
                return None if name is None else Context(name)
            case "metadata":
                return self._metadata(fields)
            case _:
                text = fields.read("value", some_text)
                return None if text is None else Fixed(text)

    def _from(self, fields: Fields) -> Source | None:
        name = fields.read("from", _known)
        if fields.has("templates"):
            if name == "path":
                return self._shape(fields)
            if name is not None:
                self._found.error(
                    fields.value("templates") or fields.node,
                    f"'templates' are of paths; write 'from: path', not '{name}'",
                )
        if name in _OF_ADDRESS:
            return _OF_ADDRESS[name](self._client_ip)
        return None if name is None else _PLAIN[name]()

    def _shape(self, fields: Fields) -> Source | None:
        fields.required_list("templates", "templates: ['/users/{id}', '/**']")
        templates: list[PathTemplate] = []
        for item in self._at_most(MOST_TEMPLATES, fields, "templates"):
            template = self._template(item)
            if template is None:
                continue
            by = next((earlier for earlier in templates if earlier.covers(template)), None)
            if by is not None:
                self._found.error(item, f"'{template.text}' is never met: '{by.text}' before it takes every such path")
            templates.append(template)
        return PathShape.of(tuple(templates)) if templates else None

    def _segment(self, fields: Fields) -> Source | None:
        node = fields.value("template")
        template = None if node is None else self._template(node)
        taken = fields.required("take", "take: id")
        if template is None or taken is None:
            return None
        names = dict(template.names)
        if not isinstance(taken, YamlScalar) or taken.text not in names:
            known = ", ".join(names) or "nothing: write one segment as '{name}'"
            self._found.error(taken, f"take: {excerpt(taken)} is not named in '{template.text}', which names {known}")
            return None
        return PathSegment(template, names[taken.text])

    def _template(self, node: YamlNode) -> PathTemplate | None:
        if not isinstance(node, YamlScalar):
            self._found.error(node, f"{excerpt(node)} is not a template; {_WHAT_A_TEMPLATE_IS}")
            return None
        try:
            return PathTemplate.parse(node.text)
        except ValueError as fault:
            self._found.error(node, f"the template '{excerpt(node)}' {fault}; {_WHAT_A_TEMPLATE_IS}")
            return None

    def _metadata(self, fields: Fields) -> Source | None:
        node = fields.value("metadata")
        assert node is not None
        inside = Fields(node, METADATA_KEYS, self._found)
        inside.required("namespace", "namespace: envoy.filters.http.jwt_authn")
        inside.required_list("path", "path: [payload, sub]")
        namespace = inside.read("namespace", some_text)
        keys = []
        for item in self._at_most(DEEPEST_METADATA, inside, "path"):
            if isinstance(item, YamlScalar) and item.text:
                keys.append(item.text)
            else:
                self._found.error(item, f"path: {excerpt(item) or 'an empty text'} is not a key")
        return Metadata((namespace, *keys)) if namespace and keys else None

    def _at_most(self, most: int, fields: Fields, key: str) -> tuple[YamlNode, ...]:
        items = fields.items(key)
        if len(items) > most:
            self._found.error(
                items[most], f"'{key}' has {len(items)} elements; at most {most} are looked at for every request"
            )
        return items[:most]


def _within(fields: Fields, key: str, least: int, most: int, found: Findings) -> int | None:
    node = fields.value(key)
    number = fields.whole(key, least)
    if node is not None and number is not None and number > most:
        found.error(node, f"{key}: {number} is more than {most}")
        return None
    return number


def _known(name: str) -> str:
    if name not in _FROM:
        raise ValueError(f"is not one of {', '.join(_FROM)}")
    return name


def some_text(text: str) -> str:
    if not text:
        raise ValueError("is empty, which is as good as no value")
    return text


def query_name(name: str) -> str:
    if len(name) > LONGEST_QUERY_NAME:
        raise ValueError(f"is longer than {LONGEST_QUERY_NAME} characters; it is the name of one parameter")
    return some_text(name)


def header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError("is not the name of a header")
    return name.lower()
