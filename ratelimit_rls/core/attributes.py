"""Attributes of an ext_authz check, and the compiled `ext_authz` mapping that makes descriptors from them.

    GET /users/7/orders?page=2  ─►  [remote_address=192.0.2.7, path=/users/{id}/**]   [user=7]

With RLS, Envoy's route configuration builds the descriptors; here the rules do. As in RLS, an entry without a value
omits its whole descriptor. Values are never truncated: long ones are hashed in the storage key (core/storage_keys.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from ratelimit_rls.core.client_ip import DIRECT, ClientIp
from ratelimit_rls.core.identity import ANONYMOUS, Identity
from ratelimit_rls.core.model import Descriptor, Entry, Request, construct
from ratelimit_rls.core.path_template import PathTemplate
from ratelimit_rls.core.percent_encoding import form_decode, parameter_pattern, percent_decode
from ratelimit_rls.core.template import Template

_FINAL_DOTS = re.compile(r"\.+(?=(?::\d*)?$)")  # trailing dots of the host name, optionally before a port

MetadataPath = tuple[str, ...]
"""Path of a dynamic metadata value: the namespace, then the keys."""


_NONE: Mapping[Any, str] = MappingProxyType({})


class Attributes(NamedTuple):
    """Attributes of one HTTP request. Missing ones are empty."""

    method: str = ""
    scheme: str = ""
    host: str = ""
    path: str = ""  # as sent, without the query
    query: str = ""
    peer: str = ""  # address of the downstream connection; empty on a Unix socket
    headers: Mapping[str, str] = _NONE  # by lower-case name
    context: Mapping[str, str] = _NONE
    metadata: Mapping[MetadataPath, str] = _NONE  # only the paths that the mapping uses
    caller: Identity = ANONYMOUS  # the last field

    def of(self, caller: Identity) -> Attributes:
        """Return the attributes with the identity of an authenticated caller."""
        return construct(Attributes, (*self[:-1], caller))  # `_replace` takes four times as long

    @property
    def has_control_in_path(self) -> bool:
        """True if the path or query contains CR, LF or NUL. HTTP allows none of them, so such requests are rejected."""
        path, query = self.path, self.query
        return (
            "\n" in path or "\r" in path or "\0" in path or "\n" in query or "\r" in query or "\0" in query
        )  # six memchr calls are faster than one regular expression


def client_address(client_ip: ClientIp, attributes: Attributes) -> str | None:
    """Return the client address of a request. X-Forwarded-For is read only if proxies are trusted."""
    forwarded_for = attributes.headers.get("x-forwarded-for", "") if client_ip.is_behind_proxies else ""
    return client_ip.of(attributes.peer, forwarded_for)


def metadata_text(value: str | bool | float) -> str:
    """Return a metadata value as text: a string, true or false, or a number as in JSON.

    Every number is a double in Envoy's message, so whole numbers are written without a decimal point.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    number = float(value)
    return str(int(number)) if number.is_integer() else repr(number)


class ValueSource(Protocol):
    def value(self, attributes: Attributes) -> str | None:
        """Return the value for an entry; None or empty if the request has none."""


@dataclass(frozen=True, slots=True)
class MethodSource:
    def value(self, attributes: Attributes) -> str:
        return attributes.method


@dataclass(frozen=True, slots=True)
class SchemeSource:
    def value(self, attributes: Attributes) -> str:
        return attributes.scheme


@dataclass(frozen=True, slots=True)
class HostSource:
    def value(self, attributes: Attributes) -> str:
        """Return the host in lower case and without a trailing dot, so that spelling variants share a counter."""
        host = attributes.host.lower()
        if host[-1:] == "." or ".:" in host:
            return _FINAL_DOTS.sub("", host) or host
        return host


@dataclass(frozen=True, slots=True)
class PathSource:
    def value(self, attributes: Attributes) -> str:
        return attributes.path


@dataclass(frozen=True, slots=True)
class PathTemplateSource:
    """Source that returns the first matching path template, so that all paths of one shape share a counter."""

    templates: tuple[PathTemplate, ...]
    longest: PathTemplate

    @classmethod
    def of(cls, templates: tuple[PathTemplate, ...]) -> PathTemplateSource:
        return cls(templates, max(templates, key=lambda template: len(template.segments)))

    def value(self, attributes: Attributes) -> str | None:
        pieces = self.longest.split(attributes.path)
        for template in self.templates:
            if template.fits(pieces):
                return template.text
        return None


@dataclass(frozen=True, slots=True)
class PathSegmentSource:
    """Source that returns one segment of a path that matches a template."""

    template: PathTemplate
    number: int

    def value(self, attributes: Attributes) -> str | None:
        pieces = self.template.split(attributes.path)
        return percent_decode(pieces[self.number]) if self.template.fits(pieces) else None


@dataclass(frozen=True, slots=True)
class ClientIpSource:
    client_ip: ClientIp

    def value(self, attributes: Attributes) -> str | None:
        return client_address(self.client_ip, attributes)


@dataclass(frozen=True, slots=True)
class CallerSource:
    """Source that returns one field of the authenticated identity."""

    field: Literal["user", "tier", "org", "api_key"]

    def value(self, attributes: Attributes) -> str:
        field_value: str = getattr(attributes.caller, self.field)
        return field_value


@dataclass(frozen=True, slots=True)
class CallerIdSource:
    """Source that returns one identifier for any caller: `user:alice`, or `ip:192.0.2.1` if unauthenticated."""

    client_ip: ClientIp

    def value(self, attributes: Attributes) -> str | None:
        if attributes.caller.user:
            return f"user:{attributes.caller.user}"
        address = client_address(self.client_ip, attributes)
        return None if address is None else f"ip:{address}"


@dataclass(frozen=True, slots=True)
class AnonymousIpSource:
    """Source that returns the address of unauthenticated callers only. Others omit the descriptor."""

    client_ip: ClientIp

    def value(self, attributes: Attributes) -> str | None:
        return None if attributes.caller.user else client_address(self.client_ip, attributes)


@dataclass(frozen=True, slots=True)
class HeaderSource:
    name: str  # lower case

    def value(self, attributes: Attributes) -> str | None:
        return attributes.headers.get(self.name)


@dataclass(frozen=True, slots=True)
class QueryParameterSource:
    name: str
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", parameter_pattern(self.name))

    def value(self, attributes: Attributes) -> str | None:
        """Return the first parameter of that name, form-decoded: `+` is a space. Other parameters are not decoded."""
        found = self.pattern.search("&" + attributes.query)
        return form_decode(found[1] or "") if found else None


@dataclass(frozen=True, slots=True)
class ContextSource:
    """Source that returns one of the filter's `context_extensions`, which a route can set."""

    name: str

    def value(self, attributes: Attributes) -> str | None:
        return attributes.context.get(self.name)


@dataclass(frozen=True, slots=True)
class MetadataSource:
    """Source that returns dynamic metadata of an earlier filter, e.g. a claim of a token."""

    path: MetadataPath

    def value(self, attributes: Attributes) -> str | None:
        return attributes.metadata.get(self.path)


@dataclass(frozen=True, slots=True)
class FixedSource:
    text: str

    def value(self, attributes: Attributes) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class MappedEntry:
    key: str
    source: ValueSource
    default: str | None = None  # used instead of omitting the descriptor


@dataclass(frozen=True, slots=True)
class MappedDescriptor:
    entries: tuple[MappedEntry, ...]
    hits: int | None = None

    def descriptor(self, attributes: Attributes) -> Descriptor | None:
        entries = []
        for entry in self.entries:
            value = entry.source.value(attributes) or entry.default
            if value is None:
                return None
            entries.append(Entry(entry.key, value))
        return Descriptor(tuple(entries), hits=self.hits)


@dataclass(frozen=True, slots=True)
class AttributeMapping:
    """The `ext_authz` section of one domain."""

    descriptors: tuple[MappedDescriptor, ...]
    metadata: tuple[MetadataPath, ...]  # paths to read from the request
    upstream_headers: tuple[tuple[str, Template], ...]  # added to requests that pass
    client_ip: ClientIp = DIRECT

    @classmethod
    def of(
        cls,
        descriptors: tuple[MappedDescriptor, ...],
        upstream_headers: tuple[tuple[str, Template], ...] = (),
        client_ip: ClientIp = DIRECT,
    ) -> AttributeMapping:
        sources = (entry.source for descriptor in descriptors for entry in descriptor.entries)
        metadata = {source.path: None for source in sources if isinstance(source, MetadataSource)}
        return cls(descriptors, tuple(metadata), upstream_headers, client_ip)

    def request(self, domain: str, attributes: Attributes) -> Request | None:
        """Return the rate limit request; None if every descriptor was omitted, so that no limit applies."""
        made = [descriptor.descriptor(attributes) for descriptor in self.descriptors]
        descriptors = tuple([descriptor for descriptor in made if descriptor is not None])
        return Request(domain, descriptors) if descriptors else None
