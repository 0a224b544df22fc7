"""What Envoy tells of a request, and how descriptors are made of it: the compiled form of `ext_authz` in the rules.

    GET /users/7/orders?page=2  ─►  [remote_address=192.0.2.7, path=/users/{id}/**]   [user=7]

With RLS, Envoy's route configuration builds the descriptors; here the rules do. An entry without a value leaves its
whole descriptor out, as there. A value is never cut: what is long is kept as a digest in the storage key (core/keys).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ratelimit_rls.core.client_ip import DIRECT, ClientIp
from ratelimit_rls.core.escapes import of_a_form, parameter_pattern, unescaped
from ratelimit_rls.core.identity import ANONYMOUS, Identity
from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.core.path_template import PathTemplate
from ratelimit_rls.core.template import Template

MetadataPath = tuple[str, ...]
"""The namespace, then the keys that lead to the value."""


@dataclass(slots=True)
class Attributes:
    """One request. What is missing is empty."""

    method: str = ""
    scheme: str = ""
    host: str = ""
    path: str = ""  # as sent, without the query
    query: str = ""
    peer: str = ""  # the address the connection comes from; empty on a Unix socket
    headers: Mapping[str, str] = field(default_factory=dict)  # by lower-case name
    context: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[MetadataPath, str] = field(default_factory=dict)  # only what the mapping asks for
    caller: Identity = ANONYMOUS  # until a credential that is found among the others proves who it is


def client_address(client_ip: ClientIp, attributes: Attributes) -> str | None:
    """Where a request comes from. What proxies say of it is looked for only where one is trusted."""
    forwarded_for = attributes.headers.get("x-forwarded-for", "") if client_ip.is_behind_proxies else ""
    return client_ip.of(attributes.peer, forwarded_for)


def metadata_text(value: str | bool | float) -> str:
    """A value of metadata as an entry has it: a text, true or false, or a number as JSON writes it.

    Every number is a double in Envoy's message, so whole ones are written without a point.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    number = float(value)
    return str(int(number)) if number.is_integer() else repr(number)


class Source(Protocol):
    def value(self, attributes: Attributes) -> str | None:
        """None or empty: there is none."""


@dataclass(frozen=True, slots=True)
class Method:
    def value(self, attributes: Attributes) -> str:
        return attributes.method


@dataclass(frozen=True, slots=True)
class Scheme:
    def value(self, attributes: Attributes) -> str:
        return attributes.scheme


@dataclass(frozen=True, slots=True)
class Host:
    def value(self, attributes: Attributes) -> str:
        """Hosts are the same in either case, so nobody gets a second counter by shouting."""
        return attributes.host.lower()


@dataclass(frozen=True, slots=True)
class Path:
    def value(self, attributes: Attributes) -> str:
        return attributes.path


@dataclass(frozen=True, slots=True)
class PathShape:
    """The first template that fits, so that all paths of one shape share a counter."""

    templates: tuple[PathTemplate, ...]
    longest: PathTemplate

    @classmethod
    def of(cls, templates: tuple[PathTemplate, ...]) -> PathShape:
        return cls(templates, max(templates, key=lambda template: len(template.segments)))

    def value(self, attributes: Attributes) -> str | None:
        pieces = self.longest.split(attributes.path)
        for template in self.templates:
            if template.fits(pieces):
                return template.text
        return None


@dataclass(frozen=True, slots=True)
class PathSegment:
    """The text of one segment of a path that fits."""

    template: PathTemplate
    number: int

    def value(self, attributes: Attributes) -> str | None:
        pieces = self.template.split(attributes.path)
        return unescaped(pieces[self.number]) if self.template.fits(pieces) else None


@dataclass(frozen=True, slots=True)
class Client:
    client_ip: ClientIp

    def value(self, attributes: Attributes) -> str | None:
        return client_address(self.client_ip, attributes)


@dataclass(frozen=True, slots=True)
class Caller:
    """What the caller's credential proves."""

    field: Literal["user", "tier", "org", "api_key"]

    def value(self, attributes: Attributes) -> str:
        proved: str = getattr(attributes.caller, self.field)
        return proved


@dataclass(frozen=True, slots=True)
class CallerId:
    """The caller by one name, whoever it is: `user:alice`, or `ip:192.0.2.1` where nothing is proved."""

    client_ip: ClientIp

    def value(self, attributes: Attributes) -> str | None:
        if attributes.caller.user:
            return f"user:{attributes.caller.user}"
        address = client_address(self.client_ip, attributes)
        return None if address is None else f"ip:{address}"


@dataclass(frozen=True, slots=True)
class AnonymousIp:
    """The address of a caller that proves nothing; of any other there is none, and its descriptor is left out."""

    client_ip: ClientIp

    def value(self, attributes: Attributes) -> str | None:
        return None if attributes.caller.user else client_address(self.client_ip, attributes)


@dataclass(frozen=True, slots=True)
class Header:
    name: str  # in lower case

    def value(self, attributes: Attributes) -> str | None:
        return attributes.headers.get(self.name)


@dataclass(frozen=True, slots=True)
class QueryParameter:
    name: str
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", parameter_pattern(self.name))

    def value(self, attributes: Attributes) -> str | None:
        """The first of that name, as forms escape it: `+` is a space. The other parameters are only passed over."""
        found = self.pattern.search("&" + attributes.query)
        return of_a_form(found[1] or "") if found else None


@dataclass(frozen=True, slots=True)
class Context:
    """One of the filter's `context_extensions`, which a route can set."""

    name: str

    def value(self, attributes: Attributes) -> str | None:
        return attributes.context.get(self.name)


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a filter before ours found out, e.g. a claim of a token."""

    path: MetadataPath

    def value(self, attributes: Attributes) -> str | None:
        return attributes.metadata.get(self.path)


@dataclass(frozen=True, slots=True)
class Fixed:
    text: str

    def value(self, attributes: Attributes) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class MappedEntry:
    key: str
    source: Source
    default: str | None = None  # in place of leaving the descriptor out


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
    """`ext_authz` of one domain."""

    descriptors: tuple[MappedDescriptor, ...]
    metadata: tuple[MetadataPath, ...]  # what is to be read of the request's
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
        metadata = {source.path: None for source in sources if isinstance(source, Metadata)}
        return cls(descriptors, tuple(metadata), upstream_headers, client_ip)

    def request(self, domain: str, attributes: Attributes) -> Request | None:
        """None: every descriptor was left out, and no limit applies."""
        made = [descriptor.descriptor(attributes) for descriptor in self.descriptors]
        descriptors = tuple([descriptor for descriptor in made if descriptor is not None])
        return Request(domain, descriptors) if descriptors else None
