"""The mapping: for each key of the rules' descriptors, where its value comes from.

Of flags (`--from user=header:x-user`) and of a file with the same texts, in which every mistake has its place:

    user: header:x-user
    path: path:/users/{id},/users/{id}/orders/**
    sub: {metadata: {namespace: envoy.filters.http.jwt_authn, path: [payload, sub]}}

A flag wins over the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratelimit_rls.envoy_config.source import OBVIOUS, Source, check_key, metadata, parse_source, path_templates
from ratelimit_rls.errors import Problem, RulesError, SettingsError
from ratelimit_rls.rules.fields import Fields
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.load import Source as File
from ratelimit_rls.rules.load import load
from ratelimit_rls.rules.node import YamlMap, YamlNode, YamlScalar, excerpt


@dataclass(frozen=True, slots=True)
class Mapped:
    source: Source
    place: str  # where it was written: a flag, or file:line:column; empty: nowhere, it goes without saying


KeyMapping = Mapping[str, Mapped]
"""By the key of the entry, in the order they were written."""


def obvious() -> dict[str, Mapped]:
    return {key: Mapped(source, "") for key, source in OBVIOUS.items()}


def from_flags(flags: Sequence[str]) -> dict[str, Mapped]:
    """Raises SettingsError with all that is wrong."""
    read: dict[str, Mapped] = {}
    faults = []
    for flag in flags:
        key, equals, text = flag.partition("=")
        try:
            if not key or not equals:
                raise ValueError("is not KEY=SOURCE; write e.g. user=header:x-user")
            if key in read:
                raise ValueError(f"is the second of '{key}'")
            source = parse_source(text)
            check_key(key, source)
            read[key] = Mapped(source, f"--from {flag}")
        except ValueError as fault:
            faults.append(f"--from {flag!r} {fault}")
    if faults:
        raise SettingsError("\n".join(faults))
    return read


def from_file(file: File) -> dict[str, Mapped]:
    """Raises RulesError with all that is wrong."""
    found = Findings(file.name)
    root = load(file)
    read: dict[str, Mapped] = {}
    if not isinstance(root, YamlMap):
        raise RulesError([Problem(file.name, 1, 1, "there is no mapping; write e.g. 'user: header:x-user'")])
    for key, node in root.fields():
        if not isinstance(key, YamlScalar) or not key.text:
            found.error(key, f"{excerpt(key)} is no key of a descriptor")
        elif key.text in read:
            found.error(key, f"'{key.text}' is written twice")
        elif (source := _source(key.text, node, found)) is not None:
            read[key.text] = Mapped(source, str(found.position(key)))
    if found.errors:
        raise RulesError(found.errors)
    return read


def _source(key: str, node: YamlNode, found: Findings) -> Source | None:
    try:
        source = parse_source(node.text) if isinstance(node, YamlScalar) else _written_out(node, found)
    except ValueError as fault:
        found.error(node, f"{key}: {excerpt(node)} {fault}")
        return None
    if source is not None:
        try:
            check_key(key, source)
        except ValueError as fault:
            found.error(node, f"{key} {fault}")
            return None
    return source


def _written_out(node: YamlNode, found: Findings) -> Source | None:
    """For what a short text cannot say: keys with colons, templates with commas. None after an error."""
    before = len(found.errors)
    fields = Fields(node, ("metadata", "path"), found)
    if len(found.errors) > before:
        return None
    if fields.has("metadata") == fields.has("path"):
        raise ValueError("is either {metadata: {namespace: …, path: […]}} or {path: […]}")
    value = fields.value("metadata")
    if value is None:
        return path_templates(_texts(fields, "path", found))
    inner = Fields(value, ("namespace", "path"), found)
    namespace, path = inner.text("namespace"), _texts(inner, "path", found)
    return metadata(namespace or "", path) if len(found.errors) == before else None


def _texts(fields: Fields, key: str, found: Findings) -> tuple[str, ...]:
    items = fields.items(key)
    for item in items:
        if not isinstance(item, YamlScalar):
            found.error(item, f"{key}: {excerpt(item)} is not text")
    return tuple(item.text for item in items if isinstance(item, YamlScalar))
