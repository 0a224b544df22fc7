"""Envoy's `rate_limits` for descriptors: one element per descriptor, with one action per entry.

Envoy drops the whole descriptor if one of its actions has no value. The rules rely on that: they match all of their
keys or nothing.
"""

from __future__ import annotations

import re

from ratelimit_rls.core.path_template import PathTemplate
from ratelimit_rls.envoy_config.api import (
    Any,
    Descriptor,
    HeaderMatcher,
    MetadataKey,
    MetadataKeyPathSegment,
    RateLimit,
    RateLimitAction,
    RateLimitActionDestinationCluster,
    RateLimitActionGenericKey,
    RateLimitActionHeaderValueMatch,
    RateLimitActionMaskedRemoteAddress,
    RateLimitActionMetaData,
    RateLimitActionQueryParameters,
    RateLimitActionRemoteAddress,
    RateLimitActionRequestHeaders,
    RateLimitActionSourceCluster,
    RegexMatcher,
    StringMatcher,
    TypedExtensionConfig,
)
from ratelimit_rls.envoy_config.descriptors import DomainDescriptors, SentDescriptor, SentEntry
from ratelimit_rls.envoy_config.host_normalization import HOST_METADATA
from ratelimit_rls.envoy_config.value_sources import (
    DestinationClusterAction,
    FixedValueAction,
    HeaderAction,
    HostAction,
    MaskedAddressAction,
    MetadataAction,
    PathAction,
    PathTemplateAction,
    QueryAction,
    RemoteAddressAction,
    SourceClusterAction,
)


def rate_limits(plan: DomainDescriptors, stage: int = 0) -> list[RateLimit]:
    """Return one rate limit per descriptor. `stage` separates several domains on one virtual host."""
    return [_rate_limit(descriptor, stage) for descriptor in plan.descriptors]


def _rate_limit(descriptor: SentDescriptor, stage: int) -> RateLimit:
    actions = [_action(entry) for entry in descriptor]
    return RateLimit(stage=stage, actions=actions) if stage else RateLimit(actions=actions)


def _action(entry: SentEntry) -> RateLimitAction:
    key = entry.key
    match entry.source:
        case HeaderAction(name):
            return RateLimitAction(request_headers=RateLimitActionRequestHeaders(header_name=name, descriptor_key=key))
        case HostAction():
            return _metadata(key, HOST_METADATA)
        case QueryAction(name):
            parameter = RateLimitActionQueryParameters(query_parameter_name=name, descriptor_key=key)
            return RateLimitAction(query_parameters=parameter)
        case PathAction():
            return RateLimitAction(extension=_expression(key, "request.url_path"))
        case PathTemplateAction(templates):
            return RateLimitAction(header_value_match=_path_match(key, templates, entry.template))
        case RemoteAddressAction():
            return RateLimitAction(remote_address=RateLimitActionRemoteAddress())
        case MaskedAddressAction(v4_prefix, v6_prefix):
            masked = RateLimitActionMaskedRemoteAddress(v4_prefix_mask_len=v4_prefix, v6_prefix_mask_len=v6_prefix)
            return RateLimitAction(masked_remote_address=masked)
        case MetadataAction():
            return _metadata(key, entry.source)
        case FixedValueAction(text):
            return RateLimitAction(generic_key=RateLimitActionGenericKey(descriptor_key=key, descriptor_value=text))
        case SourceClusterAction():
            return RateLimitAction(source_cluster=RateLimitActionSourceCluster())
        case DestinationClusterAction():
            return RateLimitAction(destination_cluster=RateLimitActionDestinationCluster())


def _metadata(key: str, source: MetadataAction) -> RateLimitAction:
    segments = [MetadataKeyPathSegment(key=segment) for segment in source.path]
    where = MetadataKey(key=source.namespace, path=segments)
    return RateLimitAction(metadata=RateLimitActionMetaData(descriptor_key=key, metadata_key=where))


def _expression(key: str, text: str) -> TypedExtensionConfig:
    """Return a CEL extension: no built-in action provides the path without its query."""
    # Type checkers find another class of the same name, imported by its module.
    config = Any.pack(Descriptor(descriptor_key=key, text=text))  # type: ignore[arg-type, call-arg]
    return TypedExtensionConfig(name="envoy.rate_limit_descriptors.expr", typed_config=config)


def _path_match(key: str, templates: tuple[PathTemplate, ...], number: int) -> RateLimitActionHeaderValueMatch:
    """Return the action of one template.

    An action has a single value, so it must exclude earlier templates that match the same paths.
    """
    own = templates[number]
    earlier = [template for template in templates[:number] if _overlap(template, own)]
    headers = [_path_matcher(own, invert=False), *(_path_matcher(template, invert=True) for template in earlier)]
    return RateLimitActionHeaderValueMatch(descriptor_key=key, descriptor_value=own.text, headers=headers)


def _path_matcher(template: PathTemplate, *, invert: bool) -> HeaderMatcher:
    fits = StringMatcher(safe_regex=RegexMatcher(regex=path_regex(template)))
    return HeaderMatcher(name=":path", string_match=fits, invert_match=invert)


def path_regex(template: PathTemplate) -> str:
    """Return a regex for the header `:path` of matching requests, with its query. Envoy anchors it at both ends."""
    path = "".join("/[^/?]+" if one is None else f"/{re.escape(one)}" for one in template.segments)
    if template.is_open:
        path += "(?:/[^?]*)?" if template.segments else "/[^?]*"
    return path + r"(?:\?.*)?"


def _overlap(one: PathTemplate, other: PathTemplate) -> bool:
    """Return whether a path may match both templates."""
    short, long = sorted((one, other), key=lambda template: len(template.segments))
    if len(short.segments) < len(long.segments) and not short.is_open:
        return False
    pairs = zip(short.segments, long.segments, strict=False)
    return all(a == b or (a is None and b != "") or (b is None and a != "") for a, b in pairs)
