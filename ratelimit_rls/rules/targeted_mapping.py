"""The descriptors that targeted rules wait for, made of every request without anybody writing `ext_authz`.

Over RLS, Envoy's route configuration has to send them; docs/stored_rules.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from ratelimit_rls.core.attributes import (
    AttributeMapping,
    Caller,
    Client,
    Fixed,
    MappedDescriptor,
    MappedEntry,
    Method,
    Path,
    Source,
)
from ratelimit_rls.core.client_ip import ClientIp
from ratelimit_rls.rules.document import DescriptorDocument, Document, exact
from ratelimit_rls.rules.targeting import EVERYBODY

MOST_SHAPES = 32
"""Of one domain, as many as `ext_authz` may have descriptors."""

Shape = tuple[str, ...]
"""The keys of a descriptor's entries."""

_SCOPE, _GLOBAL = EVERYBODY

_SOURCES: Mapping[str, Callable[[ClientIp], Source]] = {
    "tier": lambda client_ip: Caller("tier"),
    "user": lambda client_ip: Caller("user"),
    "org": lambda client_ip: Caller("org"),
    "api_key": lambda client_ip: Caller("api_key"),
    "path": lambda client_ip: Path(),
    "method": lambda client_ip: Method(),
    "ip": Client,
    _SCOPE: lambda client_ip: Fixed(_GLOBAL),
}


def shapes(document: Document) -> Iterator[Shape]:
    """Of all descriptors that say something and consist of what is known of any request; one may come several times."""
    waiting: list[tuple[Shape, DescriptorDocument]] = [((), exact(one)) for one in document.descriptors]
    while waiting:
        above, descriptor = waiting.pop()
        key = descriptor.key.value if descriptor.key else ""
        if key not in _SOURCES or (key == _SCOPE and (descriptor.value is None or descriptor.value.value != _GLOBAL)):
            continue
        shape = (*above, key)
        if descriptor.rate_limits or descriptor.limits_of or descriptor.action:
            yield shape
        waiting.extend((shape, exact(one)) for one in descriptor.descriptors)


def completed(mapping: AttributeMapping | None, wanted: Iterable[Shape]) -> AttributeMapping | None:
    """`mapping` with a descriptor for every shape it has none for: one of those keys, however it is made, is enough."""
    client_ip = mapping.client_ip if mapping else ClientIp()
    written = mapping.descriptors if mapping else ()
    present = {tuple(entry.key for entry in descriptor.entries) for descriptor in written}
    missing = sorted(set(wanted) - present)
    if not missing:
        return mapping
    made = tuple(
        MappedDescriptor(tuple(MappedEntry(key, _SOURCES[key](client_ip)) for key in shape)) for shape in missing
    )
    return replace(mapping, descriptors=written + made) if mapping else AttributeMapping.of(made)
