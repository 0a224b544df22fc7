"""Implicit ext_authz mapping: builds the descriptors that targeted rules need, without an `ext_authz` block.

With RLS, Envoy's route configuration has to send them; docs/stored_rules.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from ratelimit_rls.core.attributes import (
    AttributeMapping,
    CallerSource,
    ClientIpSource,
    FixedSource,
    MappedDescriptor,
    MappedEntry,
    MethodSource,
    PathSource,
    ValueSource,
)
from ratelimit_rls.core.client_ip import ClientIp
from ratelimit_rls.rules.document import DescriptorDocument, Document, expand
from ratelimit_rls.rules.targeting import GLOBAL_ENTRY

MAX_SHAPES = 32
"""Shapes per domain: as many as `ext_authz` may have descriptors."""

DescriptorShape = tuple[str, ...]
"""Keys of a descriptor's entries."""

_SCOPE, _GLOBAL = GLOBAL_ENTRY

_SOURCES: Mapping[str, Callable[[ClientIp], ValueSource]] = {
    "tier": lambda client_ip: CallerSource("tier"),
    "user": lambda client_ip: CallerSource("user"),
    "org": lambda client_ip: CallerSource("org"),
    "api_key": lambda client_ip: CallerSource("api_key"),
    "path": lambda client_ip: PathSource(),
    "method": lambda client_ip: MethodSource(),
    "ip": ClientIpSource,
    _SCOPE: lambda client_ip: FixedSource(_GLOBAL),
}


def descriptor_shapes(document: Document) -> Iterator[DescriptorShape]:
    """Yield the shapes of all descriptors that have a rule and use only attributes known of every request.

    A shape may be yielded several times.
    """
    waiting: list[tuple[DescriptorShape, DescriptorDocument]] = [((), expand(one)) for one in document.descriptors]
    while waiting:
        above, descriptor = waiting.pop()
        key = descriptor.key.value if descriptor.key else ""
        if key not in _SOURCES or (key == _SCOPE and (descriptor.value is None or descriptor.value.value != _GLOBAL)):
            continue
        shape = (*above, key)
        if descriptor.rate_limits or descriptor.limits_of or descriptor.action:
            yield shape
        waiting.extend((shape, expand(one)) for one in descriptor.descriptors)


def complete_mapping(mapping: AttributeMapping | None, wanted: Iterable[DescriptorShape]) -> AttributeMapping | None:
    """Return `mapping` with a descriptor added for each missing shape.

    An existing descriptor with those keys, whatever its sources, counts.
    """
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
