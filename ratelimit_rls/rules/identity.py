"""`identity` to the terms it describes: where credentials are, and what becomes of callers that have none."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from ratelimit_rls.core.identity import (
    BLOCKED_STATUS,
    CredentialEntry,
    CredentialKind,
    CredentialPlace,
    Identity,
    IdentityTerms,
    Otherwise,
)
from ratelimit_rls.rules.ext_authz import header_name, query_name, some_text
from ratelimit_rls.rules.fields import Fields
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import YamlNode, YamlScalar, excerpt

IDENTITY_KEYS = ("credentials", "entries", "on_invalid", "on_missing", "blocked_status", "hide_credentials")
PLACE_KEYS = ("kind", "header", "query", "scheme")
ENTRY_KEYS = ("key", "kind", "becomes")
BECOMES = Identity._fields
DEFAULT_BECOMES = ("user",)
BLOCKED_STATUSES = ("403", "429")

# What is done for every request is bounded by the rules alone.
MOST_PLACES = 8

_Word = TypeVar("_Word", bound=Enum)


def compile_identity(node: YamlNode, found: Findings) -> IdentityTerms | None:
    """None after an error."""
    before = len(found.errors)
    fields = Fields(node, IDENTITY_KEYS, found)
    places = [_place(item, found) for item in _at_most(fields, "credentials", found)]
    entries = [_entry(item, found) for item in _at_most(fields, "entries", found)]
    if not (fields.has("credentials") or fields.has("entries")) and len(found.errors) == before:
        found.error(
            node,
            "'identity' does not say where credentials are; write 'credentials: [{kind: api_key, header: x-api-key}]' "
            "for ext_authz, 'entries: [{key: api_key, kind: api_key}]' for RLS, or both",
        )
    keys = [entry.key for entry in entries if entry is not None]
    for twice in sorted({key for key in keys if keys.count(key) > 1}):
        found.error(node, f"the entry '{twice}' is written twice; an entry carries one kind of credential")
    on_invalid = fields.read("on_invalid", _one_of(Otherwise))
    on_missing = fields.read("on_missing", _one_of(Otherwise))
    blocked_status = fields.read("blocked_status", _blocked_status)
    hide = fields.truth("hide_credentials")
    if len(found.errors) > before:
        return None
    known_places = tuple(place for place in places if place is not None)
    return IdentityTerms(
        places=known_places,
        entries=tuple(entry for entry in entries if entry is not None),
        on_invalid=on_invalid or Otherwise.IP,
        on_missing=on_missing or Otherwise.IP,
        blocked_status=blocked_status or BLOCKED_STATUS,
        hidden=tuple(dict.fromkeys(place.header for place in known_places if place.header)) if hide else (),
    )


def _place(node: YamlNode, found: Findings) -> CredentialPlace | None:
    fields = Fields(node, PLACE_KEYS, found)
    kind = _kind(fields)
    header, query = fields.read("header", header_name), fields.read("query", query_name)
    scheme = fields.read("scheme", _scheme)
    if fields.has("header") == fields.has("query"):
        found.error(node, "a credential stands in one place; write either 'header' or 'query'")
        return None
    if scheme and query:
        found.error(node, "'scheme' is what stands before a credential in a header; it has no meaning beside 'query'")
        return None
    if header == "authorization" and kind is CredentialKind.JWT and scheme is None:
        scheme = "bearer"
    return None if kind is None else CredentialPlace(kind, header or "", query or "", scheme or "")


def _entry(node: YamlNode, found: Findings) -> CredentialEntry | None:
    fields = Fields(node, ENTRY_KEYS, found)
    fields.required("key", "key: x-api-key")
    key, kind = fields.read("key", some_text), _kind(fields)
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


def _kind(fields: Fields) -> CredentialKind | None:
    fields.required("kind", "kind: api_key")
    return fields.read("kind", _one_of(CredentialKind))


def _at_most(fields: Fields, key: str, found: Findings) -> tuple[YamlNode, ...]:
    items = fields.items(key)
    if len(items) > MOST_PLACES:
        found.error(items[MOST_PLACES], f"'{key}' has {len(items)} elements; at most {MOST_PLACES} are looked at")
    return items[:MOST_PLACES]


def _one_of(words: type[_Word]) -> Callable[[str], _Word]:
    known = {word.value: word for word in words}

    def parse(text: str) -> _Word:
        if text not in known:
            raise ValueError(f"is not one of {', '.join(known)}")
        return known[text]

    return parse


def _blocked_status(text: str) -> int:
    if text not in BLOCKED_STATUSES:
        raise ValueError(f"is not one of {', '.join(BLOCKED_STATUSES)}")
    return int(text)


def _scheme(text: str) -> str:
    if not text.isalnum():
        raise ValueError("is not the name of a scheme, such as bearer")
    return text.lower()
