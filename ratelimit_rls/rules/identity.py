"""Compile `identity`: where requests carry credentials, and how to treat callers without valid ones."""

from __future__ import annotations

from ratelimit_rls.core.identity import (
    BLOCKED_STATUS,
    CredentialEntry,
    CredentialKind,
    CredentialLocation,
    Identity,
    IdentityConfig,
    UnauthenticatedPolicy,
)
from ratelimit_rls.rules.ext_authz import header_name, non_empty, query_name
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlNode, YamlScalar, excerpt
from ratelimit_rls.yaml.strict_mapping import StrictMapping

IDENTITY_KEYS = ("credentials", "entries", "on_invalid", "on_missing", "blocked_status", "hide_credentials")
LOCATION_KEYS = ("kind", "header", "query", "scheme")
ENTRY_KEYS = ("key", "kind", "becomes")
BECOMES = Identity._fields
DEFAULT_BECOMES = ("user",)
BLOCKED_STATUSES = {"403": 403, "429": 429}

# Bounds the work per request.
MAX_LOCATIONS = 8

_POLICIES = {policy.value: policy for policy in UnauthenticatedPolicy}
_KINDS = {kind.value: kind for kind in CredentialKind}


def compile_identity(node: YamlNode, found: Findings) -> IdentityConfig | None:
    """Return the compiled configuration; None after an error."""
    before = len(found.errors)
    fields = StrictMapping(node, IDENTITY_KEYS, found)
    places = [_location(item, found) for item in fields.items("credentials", MAX_LOCATIONS)]
    entries = [_entry(item, found) for item in fields.items("entries", MAX_LOCATIONS)]
    if not (fields.has("credentials") or fields.has("entries")) and len(found.errors) == before:
        found.error(
            node,
            "'identity' does not say where credentials are; write 'credentials: [{kind: api_key, header: x-api-key}]' "
            "for ext_authz, 'entries: [{key: api_key, kind: api_key}]' for RLS, or both",
        )
    keys = [entry.key for entry in entries if entry is not None]
    for twice in sorted({key for key in keys if keys.count(key) > 1}):
        found.error(node, f"the entry '{twice}' is written twice; an entry carries one kind of credential")
    on_invalid = fields.choice("on_invalid", _POLICIES)
    on_missing = fields.choice("on_missing", _POLICIES)
    blocked_status = fields.choice("blocked_status", BLOCKED_STATUSES)
    hide = fields.boolean("hide_credentials")
    if len(found.errors) > before:
        return None
    known_places = tuple(place for place in places if place is not None)
    return IdentityConfig(
        locations=known_places,
        entries=tuple(entry for entry in entries if entry is not None),
        on_invalid=on_invalid or UnauthenticatedPolicy.IP,
        on_missing=on_missing or UnauthenticatedPolicy.IP,
        blocked_status=blocked_status or BLOCKED_STATUS,
        hidden=tuple(dict.fromkeys(place.header for place in known_places if place.header)) if hide else (),
    )


def _location(node: YamlNode, found: Findings) -> CredentialLocation | None:
    fields = StrictMapping(node, LOCATION_KEYS, found)
    kind = _kind(fields)
    header, query = fields.read("header", header_name), fields.read("query", query_name)
    scheme = fields.read("scheme", _scheme)
    if fields.has("header") == fields.has("query"):
        found.error(node, "a credential has one location; write either 'header' or 'query'")
        return None
    if scheme and query:
        found.error(node, "'scheme' precedes a credential in a header; it has no meaning beside 'query'")
        return None
    if header == "authorization" and kind is CredentialKind.JWT and scheme is None:
        scheme = "bearer"
    return None if kind is None else CredentialLocation(kind, header or "", query or "", scheme or "")


def _entry(node: YamlNode, found: Findings) -> CredentialEntry | None:
    fields = StrictMapping(node, ENTRY_KEYS, found)
    fields.required("key", "key: x-api-key")
    key, kind = fields.read("key", non_empty), _kind(fields)
    becomes: list[str] = []
    for item in fields.items("becomes"):
        if not isinstance(item, YamlScalar) or item.text not in BECOMES:
            found.error(item, f"becomes: {excerpt(item)} is not one of {', '.join(BECOMES)}")
        elif item.text in becomes:
            found.error(item, f"becomes: '{item.text}' is written twice")
        else:
            becomes.append(item.text)
    if key is None or kind is None:
        return None
    return CredentialEntry(key, kind, tuple(becomes) or DEFAULT_BECOMES)


def _kind(fields: StrictMapping) -> CredentialKind | None:
    fields.required("kind", "kind: api_key")
    return fields.choice("kind", _KINDS)


def _scheme(text: str) -> str:
    if not text.isalnum():
        raise ValueError("is not the name of a scheme, such as bearer")
    return text.lower()
