"""Where the value of a descriptor's entry comes from: what Envoy's route actions can make of a request.

One short text each, the same on the command line and in a mapping file:

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
class Header:
    name: str  # in lower case; Envoy's own, such as `:method`, included


@dataclass(frozen=True, slots=True)
class Host:
    """In lower case and without a port: names are the same however they are written, and so must counters be."""


@dataclass(frozen=True, slots=True)
class PathAlone:
    """The path without its query, which the header `:path` has at its end."""


@dataclass(frozen=True, slots=True)
class PathTemplates:
    """The text of the first template that fits, so that all paths of one shape share a counter."""

    templates: tuple[PathTemplate, ...]


@dataclass(frozen=True, slots=True)
class Query:
    name: str


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """The client's, as Envoy trusts X-Forwarded-For or not."""


@dataclass(frozen=True, slots=True)
class MaskedRemoteAddress:
    v4_prefix: int
    v6_prefix: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a filter before ours found out, e.g. a claim of a token."""

    namespace: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """The same for every request."""

    text: str


@dataclass(frozen=True, slots=True)
class SourceCluster:
    """`--service-cluster` of the Envoy that sends the request."""


@dataclass(frozen=True, slots=True)
class DestinationCluster:
    """The cluster that the route chose."""


Source = (
    Header
    | Host
    | PathAlone
    | PathTemplates
    | Query
    | RemoteAddress
    | MaskedRemoteAddress
    | Metadata
    | Value
    | SourceCluster
    | DestinationCluster
)

NAMED_BY_ENVOY: dict[type, str] = {
    RemoteAddress: "remote_address",
    MaskedRemoteAddress: "masked_remote_address",
    SourceCluster: "source_cluster",
    DestinationCluster: "destination_cluster",
}
"""Actions whose entry has a key that no configuration can change."""

OBVIOUS: dict[str, Source] = {
    "remote_address": RemoteAddress(),
    "source_cluster": SourceCluster(),
    "destination_cluster": DestinationCluster(),
}
"""By key: what needs no mapping, since nothing else could be meant."""


def parse_source(text: str) -> Source:
    """Raises ValueError with the end of a sentence that starts with the text."""
    kind, colon, detail = text.partition(":")
    if kind in _PLAIN:
        if colon:
            raise ValueError(f"has something after '{kind}', which stands alone")
        return _PLAIN[kind]
    if kind == "path" and not colon:
        return PathAlone()
    if kind not in _DETAILED:
        raise ValueError(f"is no source; there are {', '.join(sorted({*_PLAIN, *_DETAILED}))}")
    parse, example = _DETAILED[kind]
    if not detail:
        raise ValueError(f"does not say which; write e.g. {example}")
    return parse(detail)


def check_key(key: str, source: Source) -> None:
    """Raises ValueError with the end of a sentence that starts with the key."""
    named = NAMED_BY_ENVOY.get(type(source))
    if named is not None and key != named:
        raise ValueError(f"cannot be: Envoy calls that entry '{named}' whatever you want; call it so in the rules")


def path_templates(texts: tuple[str, ...]) -> PathTemplates:
    """Raises ValueError likewise; a template that an earlier one leaves nothing to is an error, as in `ext_authz`."""
    templates: list[PathTemplate] = []
    for text in texts:
        try:
            template = PathTemplate.parse(text)
        except ValueError as fault:
            raise ValueError(f"has the template {text!r}, which {fault}") from None
        for earlier in templates:
            if earlier.covers(template):
                raise ValueError(f"has {text!r} after {earlier.text!r}, which takes all of its paths")
        templates.append(template)
    return PathTemplates(tuple(templates))


def metadata(namespace: str, path: tuple[str, ...]) -> Metadata:
    """Raises ValueError likewise."""
    if not namespace or not path or not all(path):
        raise ValueError("names no value; write e.g. metadata:envoy.filters.http.jwt_authn:payload:sub")
    return Metadata(namespace, path)


def _header(detail: str) -> Header:
    if not _HEADER_NAME.fullmatch(detail):
        raise ValueError("is no header's name")
    return Header(detail.lower())


def _masked(detail: str) -> MaskedRemoteAddress:
    v4, comma, v6 = detail.partition(",")
    if not (comma and v4.isdecimal() and v6.isdecimal() and int(v4) <= 32 and int(v6) <= 128):
        raise ValueError("needs the lengths of the prefixes of IPv4 and IPv6; write e.g. masked_remote_address:24,64")
    return MaskedRemoteAddress(int(v4), int(v6))


def _metadata(detail: str) -> Metadata:
    namespace, *path = detail.split(":")
    return metadata(namespace, tuple(path))


_PLAIN: dict[str, Source] = {
    "method": Header(":method"),
    "host": Host(),
    "scheme": Header(":scheme"),
    **OBVIOUS,
}

_DETAILED: dict[str, tuple[Callable[[str], Source], str]] = {
    "header": (_header, "header:x-user"),
    "path": (lambda detail: path_templates(tuple(detail.split(","))), "path:/users/{id},/users/{id}/**"),
    "query": (Query, "query:page"),
    "masked_remote_address": (_masked, "masked_remote_address:24,64"),
    "metadata": (_metadata, "metadata:envoy.filters.http.jwt_authn:payload:sub"),
    "value": (Value, "value:free"),
}
