"""Sources of descriptor values: the parts of a request that Envoy's route actions can read.

Each has a short text form, the same on the command line and in a mapping file:

    header:x-user     query:page     method     host     scheme     value:free
    path              path:/users/{id},/users/{id}/orders/**
    remote_address    masked_remote_address:24,64
    metadata:envoy.filters.http.jwt_authn:payload:sub
    source_cluster    destination_cluster
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ratelimit_rls.core.path_template import PathTemplate

_HEADER_NAME = re.compile(r":?[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True)
class HeaderAction:
    name: str  # in lower case; includes pseudo-headers such as `:method`


@dataclass(frozen=True, slots=True)
class HostAction:
    """The host in lower case and without a port, so that all spellings of a name share a counter."""


@dataclass(frozen=True, slots=True)
class PathAction:
    """The path without its query, which the header `:path` includes."""


@dataclass(frozen=True, slots=True)
class PathTemplateAction:
    """The text of the first matching template, so that all paths of one shape share a counter."""

    templates: tuple[PathTemplate, ...]


@dataclass(frozen=True, slots=True)
class QueryAction:
    name: str


@dataclass(frozen=True, slots=True)
class RemoteAddressAction:
    """The client's address, depending on Envoy's trust in X-Forwarded-For."""


@dataclass(frozen=True, slots=True)
class MaskedAddressAction:
    v4_prefix: int
    v6_prefix: int


@dataclass(frozen=True, slots=True)
class MetadataAction:
    """Dynamic metadata set by an earlier filter, e.g. a token's claim."""

    namespace: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FixedValueAction:
    """A constant."""

    text: str


@dataclass(frozen=True, slots=True)
class SourceClusterAction:
    """`--service-cluster` of the Envoy that sends the request."""


@dataclass(frozen=True, slots=True)
class DestinationClusterAction:
    """The cluster selected by the route."""


ActionSource = (
    HeaderAction
    | HostAction
    | PathAction
    | PathTemplateAction
    | QueryAction
    | RemoteAddressAction
    | MaskedAddressAction
    | MetadataAction
    | FixedValueAction
    | SourceClusterAction
    | DestinationClusterAction
)

FIXED_KEYS: dict[type, str] = {
    RemoteAddressAction: "remote_address",
    MaskedAddressAction: "masked_remote_address",
    SourceClusterAction: "source_cluster",
    DestinationClusterAction: "destination_cluster",
}
"""Keys of actions that Envoy names; the configuration cannot change them."""

DEFAULT_SOURCES: dict[str, ActionSource] = {
    "remote_address": RemoteAddressAction(),
    "source_cluster": SourceClusterAction(),
    "destination_cluster": DestinationClusterAction(),
}
"""Sources of keys that need no mapping, since the key is unambiguous."""


def parse_source(text: str) -> ActionSource:
    """Parse the text form of a source.

    Raise ValueError with a message that completes a sentence starting with the text.
    """
    kind, colon, detail = text.partition(":")
    if kind in _SIMPLE_SOURCES:
        if colon:
            raise ValueError(f"has text after '{kind}', which takes no argument")
        return _SIMPLE_SOURCES[kind]
    if kind == "path" and not colon:
        return PathAction()
    if kind not in _PARSED_SOURCES:
        raise ValueError(f"is not a source; use one of {', '.join(sorted({*_SIMPLE_SOURCES, *_PARSED_SOURCES}))}")
    parse, example = _PARSED_SOURCES[kind]
    if not detail:
        raise ValueError(f"has no argument; write e.g. {example}")
    return parse(detail)


def check_key(key: str, source: ActionSource) -> None:
    """Check that Envoy can use the key.

    Raise ValueError with a message that completes a sentence starting with the key.
    """
    named = FIXED_KEYS.get(type(source))
    if named is not None and key != named:
        raise ValueError(f"cannot be used: Envoy always names that entry '{named}'; use that key in the rules")


def path_template_source(texts: tuple[str, ...]) -> PathTemplateAction:
    """Parse path templates. A template that an earlier one covers completely is an error, as in `ext_authz`.

    Raise ValueError with a message that completes a sentence starting with the text.
    """
    templates: list[PathTemplate] = []
    for text in texts:
        try:
            template = PathTemplate.parse(text)
        except ValueError as error:
            raise ValueError(f"has the template {text!r}, which {error}") from None
        for earlier in templates:
            if earlier.covers(template):
                raise ValueError(f"has {text!r} after {earlier.text!r}, which matches all of its paths")
        templates.append(template)
    return PathTemplateAction(tuple(templates))


def metadata_source(namespace: str, path: tuple[str, ...]) -> MetadataAction:
    """Return a metadata source. Raise ValueError with a message that completes a sentence starting with the text."""
    if not namespace or not path or not all(path):
        raise ValueError("has no namespace or path; write e.g. metadata:envoy.filters.http.jwt_authn:payload:sub")
    return MetadataAction(namespace, path)


def _header(detail: str) -> HeaderAction:
    if not _HEADER_NAME.fullmatch(detail):
        raise ValueError("is not a header name")
    return HeaderAction(detail.lower())


def _masked(detail: str) -> MaskedAddressAction:
    v4, comma, v6 = detail.partition(",")
    if not (comma and v4.isdecimal() and v6.isdecimal() and int(v4) <= 32 and int(v6) <= 128):
        raise ValueError("needs the lengths of the prefixes of IPv4 and IPv6; write e.g. masked_remote_address:24,64")
    return MaskedAddressAction(int(v4), int(v6))


def _metadata(detail: str) -> MetadataAction:
    namespace, *path = detail.split(":")
    return metadata_source(namespace, tuple(path))


_SIMPLE_SOURCES: dict[str, ActionSource] = {
    "method": HeaderAction(":method"),
    "host": HostAction(),
    "scheme": HeaderAction(":scheme"),
    **DEFAULT_SOURCES,
}

_PARSED_SOURCES: dict[str, tuple[Callable[[str], ActionSource], str]] = {
    "header": (_header, "header:x-user"),
    "path": (lambda detail: path_template_source(tuple(detail.split(","))), "path:/users/{id},/users/{id}/**"),
    "query": (QueryAction, "query:page"),
    "masked_remote_address": (_masked, "masked_remote_address:24,64"),
    "metadata": (_metadata, "metadata:envoy.filters.http.jwt_authn:payload:sub"),
    "value": (FixedValueAction, "value:free"),
}
