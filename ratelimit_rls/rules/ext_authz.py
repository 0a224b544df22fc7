"""Compile `ext_authz` to an attribute mapping.

Everything is validated here, so that applying it to a request cannot fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from ipaddress import ip_network

from ratelimit_rls.core.attributes import (
    AnonymousIpSource,
    AttributeMapping,
    CallerIdSource,
    CallerSource,
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
from ratelimit_rls.core.client_ip import MAX_TRUSTED_NETWORKS, MAX_TRUSTED_PROXIES, ClientIp, Network
from ratelimit_rls.core.model import MAX_HITS
from ratelimit_rls.core.path_template import PathTemplate
from ratelimit_rls.rules.responses import TOKEN_CHARACTERS, compile_headers
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlNode, YamlScalar, excerpt
from ratelimit_rls.yaml.strict_mapping import StrictMapping

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

# Bounds of the work per request.
MAX_DESCRIPTORS = 32
MAX_ENTRIES = 16
MAX_TEMPLATES = 256
MAX_METADATA_DEPTH = 16
MAX_QUERY_NAME_LENGTH = 256

_TEMPLATE_HELP = (
    "a template is segments between slashes: plain text, '{name}' for any one, and '**' at the end for the rest"
)
_HEADER_NAME = re.compile(f":?{TOKEN_CHARACTERS}")  # includes pseudo-headers such as ':authority'

_SIMPLE_SOURCES: dict[str, Callable[[], ValueSource]] = {
    "method": MethodSource,
    "path": PathSource,
    "host": HostSource,
    "scheme": SchemeSource,
    "user": partial(CallerSource, "user"),
    "tier": partial(CallerSource, "tier"),
    "org": partial(CallerSource, "org"),
    "api_key": partial(CallerSource, "api_key"),
}
_ADDRESS_SOURCES: dict[str, Callable[[ClientIp], ValueSource]] = {
    "client_ip": ClientIpSource,
    "caller": CallerIdSource,
    "anonymous_ip": AnonymousIpSource,
}
_FROM_NAMES = {name: name for name in (*_SIMPLE_SOURCES, *_ADDRESS_SOURCES)}


def compile_mapping(node: YamlNode, found: Findings) -> AttributeMapping | None:
    """Return the compiled mapping; None after an error."""
    before = len(found.errors)
    fields = StrictMapping(node, MAPPING_KEYS, found)
    client_ip = _client_ip(fields, found)
    reader = _DescriptorReader(client_ip, found)
    descriptors = reader.descriptors(fields)
    headers = compile_headers(fields.value("upstream_headers"), found)
    if len(found.errors) > before:
        return None
    # Header names are case-insensitive; Envoy and HTTP/2 use lower case.
    upstream = tuple((name.lower(), template) for name, template in headers)
    return AttributeMapping.of(descriptors, upstream, client_ip)


def _client_ip(fields: StrictMapping, found: Findings) -> ClientIp:
    read = fields.integer("trusted_proxies", 0, MAX_TRUSTED_PROXIES)
    depth = read or 0
    remote_address = fields.value("use_remote_address")
    is_wrong = read is None and fields.has("trusted_proxies")  # already reported
    if remote_address is not None and not depth and not is_wrong:
        found.error(
            remote_address,
            "'use_remote_address' says how to read X-Forwarded-For; it needs 'trusted_proxies: 1' or more",
        )
    elif remote_address is None and depth:
        found.error(
            fields.node,
            "'trusted_proxies' needs 'use_remote_address: true' or 'false' beside it, as in Envoy's connection "
            "manager: whether the last address of X-Forwarded-For is Envoy's own",
        )
    networks = _networks(fields, found)
    if networks and fields.has("trusted_proxies"):
        found.error(
            fields.node,
            "'trusted_networks' and 'trusted_proxies' both define the trusted proxies; keep one of them",
        )
    return ClientIp(
        trusted_networks=networks,
        trusted_proxies=depth,
        use_remote_address=fields.boolean("use_remote_address"),
        ipv6_prefix=fields.integer("ipv6_prefix", 1, 128) or 128,
    )


def _networks(fields: StrictMapping, found: Findings) -> tuple[Network, ...]:
    items = fields.items("trusted_networks")
    if len(items) > MAX_TRUSTED_NETWORKS:
        found.error(items[MAX_TRUSTED_NETWORKS], f"at most {MAX_TRUSTED_NETWORKS} trusted_networks are allowed")
    networks: list[Network] = []
    for item in items[:MAX_TRUSTED_NETWORKS]:
        try:
            networks.append(ip_network(item.text if isinstance(item, YamlScalar) else ""))
        except ValueError:
            found.error(item, f"trusted_networks: {excerpt(item)} is not a network such as 10.0.0.0/8")
    return tuple(networks)


class _DescriptorReader:
    """Reads the descriptors of a mapping. The mapping's client address settings apply to all entries."""

    def __init__(self, client_ip: ClientIp, found: Findings) -> None:
        self._client_ip = client_ip
        self._found = found

    def descriptors(self, fields: StrictMapping) -> tuple[MappedDescriptor, ...]:
        fields.required_list("descriptors", "descriptors: [{entries: [{key: remote_address, from: client_ip}]}]")
        items = fields.items("descriptors", MAX_DESCRIPTORS)
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
        fields = StrictMapping(node, DESCRIPTOR_KEYS, self._found)
        fields.required_list("entries", "entries: [{key: remote_address, from: client_ip}]")
        entries: dict[MappedEntry, None] = {}
        complete = fields.has("entries")
        for item in fields.items("entries", MAX_ENTRIES):
            entry = self._entry(item)
            if entry is None:
                complete = False
            elif entry in entries:
                self._found.error(item, f"the entry '{entry.key}' is written twice")
            else:
                entries[entry] = None
        hits = fields.integer("hits", 0, MAX_HITS)
        return MappedDescriptor(tuple(entries), hits) if complete else None

    def _entry(self, node: YamlNode) -> MappedEntry | None:
        before = len(self._found.errors)
        fields = StrictMapping(node, ENTRY_KEYS, self._found)
        if len(self._found.errors) > before:
            return None  # an unknown key may be a misspelt one: do not report that as missing
        fields.required("key", "key: remote_address")
        key = fields.read("key", non_empty)
        default = fields.read("default", non_empty)
        source = self._source(fields)
        return None if key is None or source is None else MappedEntry(key, source, default)

    def _source(self, fields: StrictMapping) -> ValueSource | None:
        written = [key for key in SOURCE_KEYS if fields.has(key)]
        if len(written) != 1:
            clause = f"says {' and '.join(written)}" if written else "does not say"
            self._found.error(
                fields.node, f"the entry {clause} where its value comes from; write one of {', '.join(SOURCE_KEYS)}"
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
                return None if name is None else HeaderSource(name)
            case "query":
                name = fields.read("query", query_name)
                return None if name is None else QueryParameterSource(name)
            case "context":
                name = fields.read("context", non_empty)
                return None if name is None else ContextSource(name)
            case "metadata":
                return self._metadata(fields)
            case _:
                text = fields.read("value", non_empty)
                return None if text is None else FixedSource(text)

    def _from(self, fields: StrictMapping) -> ValueSource | None:
        name = fields.choice("from", _FROM_NAMES)
        if fields.has("templates"):
            if name == "path":
                return self._shape(fields)
            if name is not None:
                self._found.error(
                    fields.value("templates") or fields.node,
                    f"'templates' are of paths; write 'from: path', not '{name}'",
                )
        if name in _ADDRESS_SOURCES:
            return _ADDRESS_SOURCES[name](self._client_ip)
        return None if name is None else _SIMPLE_SOURCES[name]()

    def _shape(self, fields: StrictMapping) -> ValueSource | None:
        fields.required_list("templates", "templates: ['/users/{id}', '/**']")
        templates: list[PathTemplate] = []
        for item in fields.items("templates", MAX_TEMPLATES):
            template = self._template(item)
            if template is None:
                continue
            by = next((earlier for earlier in templates if earlier.covers(template)), None)
            if by is not None:
                self._found.error(
                    item, f"'{template.text}' is never matched: '{by.text}' before it matches every such path"
                )
            templates.append(template)
        return PathTemplateSource.of(tuple(templates)) if templates else None

    def _segment(self, fields: StrictMapping) -> ValueSource | None:
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
        return PathSegmentSource(template, names[taken.text])

    def _template(self, node: YamlNode) -> PathTemplate | None:
        if not isinstance(node, YamlScalar):
            self._found.error(node, f"{excerpt(node)} is not a template; {_TEMPLATE_HELP}")
            return None
        try:
            return PathTemplate.parse(node.text)
        except ValueError as error:
            self._found.error(node, f"the template '{excerpt(node)}' {error}; {_TEMPLATE_HELP}")
            return None

    def _metadata(self, fields: StrictMapping) -> ValueSource | None:
        node = fields.value("metadata")
        assert node is not None
        inside = StrictMapping(node, METADATA_KEYS, self._found)
        inside.required("namespace", "namespace: envoy.filters.http.jwt_authn")
        inside.required_list("path", "path: [payload, sub]")
        namespace = inside.read("namespace", non_empty)
        keys = []
        for item in inside.items("path", MAX_METADATA_DEPTH):
            if isinstance(item, YamlScalar) and item.text:
                keys.append(item.text)
            else:
                self._found.error(item, f"path: {excerpt(item) or 'an empty text'} is not a key")
        return MetadataSource((namespace, *keys)) if namespace and keys else None


def non_empty(text: str) -> str:
    if not text:
        raise ValueError("is empty; write a value")
    return text


def query_name(name: str) -> str:
    if len(name) > MAX_QUERY_NAME_LENGTH:
        raise ValueError(f"is longer than {MAX_QUERY_NAME_LENGTH} characters; must be the name of one parameter")
    return non_empty(name)


def header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError("is not the name of a header")
    return name.lower()
