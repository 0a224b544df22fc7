"""Reader of a step's `request`, as Envoy's ext_authz filter would send it, and of the descriptors built from it.

{method: GET, path: "/users/7?page=2", host: api.example.com, scheme: https, peer: 192.0.2.1,
 headers: {x-api: v2}, context: {name: a}, metadata: {envoy.filters.http.jwt_authn: {payload: {sub: alice}}}}

The descriptors are built by the same mapping as in the server, so that a step tests mapping and limits together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ratelimit_rls.core.attributes import Attributes, MetadataPath, metadata_text
from ratelimit_rls.core.client_ip import canonical
from ratelimit_rls.core.model import Descriptor
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.rules.responses import TOKEN_CHARACTERS
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlMap, YamlNode, YamlScalar, excerpt
from ratelimit_rls.yaml.scalars import ScalarKind
from ratelimit_rls.yaml.strict_mapping import StrictMapping

REQUEST_KEYS = ("method", "path", "host", "scheme", "headers", "peer", "context", "metadata")

_HEADER_NAME = re.compile(f":?{TOKEN_CHARACTERS}")


def read_descriptors(node: YamlNode, domain: str, tree: Tree | None, found: Findings) -> tuple[Descriptor, ...] | None:
    """Return the descriptors of the request, possibly (); None after an error, which is reported.

    Without a tree the rules are invalid, which was reported elsewhere; the request is still checked.
    """
    before = len(found.errors)
    mapping = tree.mappings.get(domain) if tree is not None else None
    if tree is not None and mapping is None:
        found.error(
            node,
            f"the rules of domain '{domain[:60]}' have no 'ext_authz', which defines the descriptors of a request; "
            "write 'descriptor: {…}'",
        )
    attributes = _attributes(node, mapping.metadata if mapping is not None else (), found)
    if mapping is None or len(found.errors) > before:
        return None
    request = mapping.request(domain, attributes)
    return () if request is None else request.descriptors


def _attributes(node: YamlNode, wanted: Sequence[MetadataPath], found: Findings) -> Attributes:
    fields = StrictMapping(node, REQUEST_KEYS, found)
    method, whole_path = fields.text("method") or "GET", fields.read("path", _path) or "/"
    host, scheme = fields.text("host") or "", fields.text("scheme") or ""
    path, _, query = whole_path.partition("?")
    # Envoy sends these as headers, too, and a mapping may read them from there.
    own = {":method": method, ":path": whole_path, ":authority": host, ":scheme": scheme}
    return Attributes(
        method=method,
        scheme=scheme,
        host=host,
        path=path,
        query=query,
        peer=fields.read("peer", _address) or "",
        headers={**{name: value for name, value in own.items() if value}, **_headers(fields.value("headers"), found)},
        context=_texts(fields.value("context"), "context", found),
        metadata=_metadata(fields.value("metadata"), wanted, found),
    )


def _path(text: str) -> str:
    if not text.startswith("/") and text != "*":
        raise ValueError("does not start with '/'; write the path as the client sends it, with its query")
    return text


def _address(text: str) -> str:
    if canonical(text) is None:
        raise ValueError("is not an address; write the address of the client, e.g. 192.0.2.1")
    return text


def _headers(node: YamlNode | None, found: Findings) -> dict[str, str]:
    """Read the headers by lower-case name, as Envoy sends them."""
    headers: dict[str, str] = {}
    for name, value in _texts(node, "headers", found).items():
        assert node is not None
        if not _HEADER_NAME.fullmatch(name):
            found.error(node, f"headers: '{name[:60]}' is not the name of a header")
        elif name.lower() in headers:
            found.error(node, f"headers: '{name}' is written twice; Envoy joins several with commas: 'a,b'")
        headers[name.lower()] = value
    return headers


def _texts(node: YamlNode | None, what: str, found: Findings) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, value in _inside(node, what, found).items():
        if isinstance(value, YamlScalar):
            texts[name] = value.text
        else:
            found.error(value, f"{what}: {excerpt(value)} is not text")
    return texts


def _metadata(node: YamlNode | None, wanted: Sequence[MetadataPath], found: Findings) -> dict[MetadataPath, str]:
    namespaces = {
        name: _inside(inside, "metadata of a namespace", found)
        for name, inside in _inside(node, "metadata", found).items()
    }
    values: dict[MetadataPath, str] = {}
    for path in wanted:
        namespace, *outer, last = path
        inside = namespaces.get(namespace, {})
        for key in outer:
            deeper = inside.get(key)
            inside = _inside(deeper, "metadata", found) if isinstance(deeper, YamlMap) else {}
        text = _value(inside.get(last))
        if text is not None:
            values[path] = text
    return values


def _value(node: YamlNode | None) -> str | None:
    """Convert a value as it would be read from Envoy's message."""
    if not isinstance(node, YamlScalar) or node.kind is ScalarKind.NULL:
        return None
    return metadata_text(node.text if node.kind is ScalarKind.STRING or node.value is None else node.value)


def _inside(node: YamlNode | None, what: str, found: Findings) -> Mapping[str, YamlNode]:
    """Read the values of a mapping with arbitrary keys, none of them twice."""
    inside: dict[str, YamlNode] = {}
    if node is None:
        return inside
    if not isinstance(node, YamlMap):
        found.error(node, f"{what}: {excerpt(node)} is not a mapping of names to values")
        return inside
    for key, value in node.fields():
        if not isinstance(key, YamlScalar):
            found.error(key, f"{what}: {excerpt(key)} is not a name")
        elif key.text in inside:
            found.error(key, f"{what}: '{excerpt(key)}' is written twice")
        else:
            inside[key.text] = value
    return inside
