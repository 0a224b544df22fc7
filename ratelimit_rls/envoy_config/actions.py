"""Descriptors as Envoy is told to make them: one `rate_limits` entry each, one action for each of its entries.

Envoy drops the whole descriptor if one of its actions has no value, which is what the rules want: they are met by all
of their keys or not at all.
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
from ratelimit_rls.envoy_config.descriptors import Made, MadeEntry, Plan
from ratelimit_rls.envoy_config.host import HOST_METADATA
from ratelimit_rls.envoy_config.source import (
    DestinationCluster,
    Header,
    Host,
    MaskedRemoteAddress,
    Metadata,
    PathAlone,
    PathTemplates,
    Query,
    RemoteAddress,
    SourceCluster,
    Value,
)


def rate_limits(plan: Plan, stage: int = 0) -> list[RateLimit]:
    """One for each descriptor. `stage` keeps the descriptors of several domains apart on one virtual host."""
    return [_rate_limit(made, stage) for made in plan.descriptors]


def _rate_limit(made: Made, stage: int) -> RateLimit:
    actions = [_action(entry) for entry in made]
    return RateLimit(stage=stage, actions=actions) if stage else RateLimit(actions=actions)


def _action(entry: MadeEntry) -> RateLimitAction:
    key = entry.key
    match entry.source:
        case Header(name):
            return RateLimitAction(request_headers=RateLimitActionRequestHeaders(header_name=name, descriptor_key=key))
        case Host():
            return _metadata(key, HOST_METADATA)
        case Query(name):
            parameter = RateLimitActionQueryParameters(query_parameter_name=name, descriptor_key=key)
            return RateLimitAction(query_parameters=parameter)
        case PathAlone():
            return RateLimitAction(extension=_expression(key, "request.url_path"))
        case PathTemplates(templates):
            return RateLimitAction(header_value_match=_path_match(key, templates, entry.template))
        case RemoteAddress():
            return RateLimitAction(remote_address=RateLimitActionRemoteAddress())
        case MaskedRemoteAddress(v4_prefix, v6_prefix):
            masked = RateLimitActionMaskedRemoteAddress(v4_prefix_mask_len=v4_prefix, v6_prefix_mask_len=v6_prefix)
            return RateLimitAction(masked_remote_address=masked)
        case Metadata():
            return _metadata(key, entry.source)
        case Value(text):
            return RateLimitAction(generic_key=RateLimitActionGenericKey(descriptor_key=key, descriptor_value=text))
        case SourceCluster():
            return RateLimitAction(source_cluster=RateLimitActionSourceCluster())
        case DestinationCluster():
            return RateLimitAction(destination_cluster=RateLimitActionDestinationCluster())


def _metadata(key: str, source: Metadata) -> RateLimitAction:
    segments = [MetadataKeyPathSegment(key=segment) for segment in source.path]
    where = MetadataKey(key=source.namespace, path=segments)
    return RateLimitAction(metadata=RateLimitActionMetaData(descriptor_key=key, metadata_key=where))


def _expression(key: str, text: str) -> TypedExtensionConfig:
    """In CEL: no plain action knows the path without its query."""
    # Type checkers see the class of the same name that its module also imports.
    config = Any.pack(Descriptor(descriptor_key=key, text=text))  # type: ignore[arg-type, call-arg]
    return TypedExtensionConfig(name="envoy.rate_limit_descriptors.expr", typed_config=config)


def _path_match(key: str, templates: tuple[PathTemplate, ...], number: int) -> RateLimitActionHeaderValueMatch:
    """An action has one value to give, so each template has its own, which an earlier one that fits must not have."""
    mine = templates[number]
    earlier = [template for template in templates[:number] if _overlap(template, mine)]
    headers = [_path_matcher(mine, invert=False), *(_path_matcher(template, invert=True) for template in earlier)]
    return RateLimitActionHeaderValueMatch(descriptor_key=key, descriptor_value=mine.text, headers=headers)


def _path_matcher(template: PathTemplate, *, invert: bool) -> HeaderMatcher:
    fits = StringMatcher(safe_regex=RegexMatcher(regex=path_regex(template)))
    return HeaderMatcher(name=":path", string_match=fits, invert_match=invert)


def path_regex(template: PathTemplate) -> str:
    """What the header `:path` of a request that fits is, its query included; anchored at both ends by Envoy."""
    path = "".join("/[^/?]+" if one is None else f"/{re.escape(one)}" for one in template.segments)
    if template.is_open:
        path += "(?:/[^?]*)?" if template.segments else "/[^?]*"
    return path + r"(?:\?.*)?"


def _overlap(one: PathTemplate, other: PathTemplate) -> bool:
    """Whether some path may fit both."""
    short, long = sorted((one, other), key=lambda template: len(template.segments))
    if len(short.segments) < len(long.segments) and not short.is_open:
        return False
    pairs = zip(short.segments, long.segments, strict=False)
    return all(a == b or (a is None and b != "") or (b is None and a != "") for a, b in pairs)
