"""The mapping: the source of the value of each descriptor key.

It is read from flags (`--from user=header:x-user`) and from a file with the same texts, whose errors have positions:

    user: header:x-user
    path: path:/users/{id},/users/{id}/orders/**
    sub: {metadata: {namespace: envoy.filters.http.jwt_authn, path: [payload, sub]}}

Flags override the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratelimit_rls.envoy_config.value_sources import (
    DEFAULT_SOURCES,
    ActionSource,
    check_key,
    metadata_source,
    parse_source,
    path_template_source,
)
from ratelimit_rls.errors import Problem, RulesError, SettingsError
from ratelimit_rls.rules.source_document import SourceDocument as File
from ratelimit_rls.rules.source_document import load
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlMap, YamlNode, YamlScalar, excerpt
from ratelimit_rls.yaml.strict_mapping import StrictMapping


@dataclass(frozen=True, slots=True)
class MappedKey:
    source: ActionSource
    place: str  # where it was defined: a flag, or file:line:column; "" for defaults


KeyMapping = Mapping[str, MappedKey]
"""Mapping by entry key, in the order written."""


def default_mapping() -> dict[str, MappedKey]:
    return {key: MappedKey(source, "") for key, source in DEFAULT_SOURCES.items()}


def from_flags(flags: Sequence[str]) -> dict[str, MappedKey]:
    """Parse `--from` flags. Raise SettingsError with all errors."""
    read: dict[str, MappedKey] = {}
    errors = []
    for flag in flags:
        key, equals, text = flag.partition("=")
        try:
            if not key or not equals:
                raise ValueError("is not KEY=SOURCE; write e.g. user=header:x-user")
            if key in read:
                raise ValueError(f"repeats the key '{key}'")
            source = parse_source(text)
            check_key(key, source)
            read[key] = MappedKey(source, f"--from {flag}")
        except ValueError as error:
            errors.append(f"--from {flag!r} {error}")
    if errors:
        raise SettingsError("\n".join(errors))
    return read


def from_file(file: File) -> dict[str, MappedKey]:
    """Parse a mapping file. Raise RulesError with all errors."""
    found = Findings(file.name)
    root = load(file)
    read: dict[str, MappedKey] = {}
    if not isinstance(root, YamlMap):
        raise RulesError([Problem(file.name, 1, 1, "there is no mapping; write e.g. 'user: header:x-user'")])
    for key, node in root.fields():
        if not isinstance(key, YamlScalar) or not key.text:
            found.error(key, f"{excerpt(key)} is not a descriptor key")
        elif key.text in read:
            found.error(key, f"'{key.text}' is written twice")
        elif (source := _source(key.text, node, found)) is not None:
            read[key.text] = MappedKey(source, str(found.position(key)))
    if found.errors:
        raise RulesError(found.errors)
    return read


def _source(key: str, node: YamlNode, found: Findings) -> ActionSource | None:
    try:
        source = parse_source(node.text) if isinstance(node, YamlScalar) else _structured_source(node, found)
    except ValueError as error:
        found.error(node, f"{key}: {excerpt(node)} {error}")
        return None
    if source is not None:
        try:
            check_key(key, source)
        except ValueError as error:
            found.error(node, f"{key} {error}")
            return None
    return source


def _structured_source(node: YamlNode, found: Findings) -> ActionSource | None:
    """Read the structured form, for keys with colons and templates with commas. Return None after an error."""
    before = len(found.errors)
    fields = StrictMapping(node, ("metadata", "path"), found)
    if len(found.errors) > before:
        return None
    if fields.has("metadata") == fields.has("path"):
        raise ValueError("is either {metadata: {namespace: …, path: […]}} or {path: […]}")
    value = fields.value("metadata")
    if value is None:
        return path_template_source(fields.texts("path"))
    inner = StrictMapping(value, ("namespace", "path"), found)
    namespace, path = inner.text("namespace"), inner.texts("path")
    return metadata_source(namespace or "", path) if len(found.errors) == before else None
