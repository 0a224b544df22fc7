"""Mapping from the fields of a line of traffic to the request that Envoy would have sent for it.

    --domain edge --descriptor 'plan=%plan%,user=%headers.x-user%' --hits '%tokens%'

Text between percent signs is the name of a field (dots denote nesting), %% is a percent sign, everything else is
literal. As with Envoy's actions, a descriptor with a missing field is not sent; without any descriptor there is no
request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Fields
from collections.abc import Sequence
from typing import Any

from ratelimit_rls.core.model import MAX_HITS, Descriptor, Entry, Request
from ratelimit_rls.errors import SettingsError

Values = tuple[str | None, ...]
"""Values of a line's relevant fields. Lines with equal values make equal requests."""

DEFAULT_DOMAIN = "%domain%"
DEFAULT_HITS = "%hits%"
DESCRIPTOR_FIELD = "descriptor"
"""Field with the line's own descriptor, as key=value,key=value, if no descriptor template is given."""

_FIELD = re.compile(r"%([^%]*)%")
_ABSENT = "-"  # Envoy's notation for a missing value


class InvalidLine(Exception):
    """A line that cannot be used; the message has the reason."""


class FieldMapping:
    def __init__(self, domain: str = DEFAULT_DOMAIN, descriptors: Sequence[str] = (), hits: str = DEFAULT_HITS) -> None:
        self._names: list[str] = []
        self._domain = self._template(domain)
        self._hits = self._template(hits)
        self._descriptors = [self._entries(text) for text in descriptors]
        self._written = None if descriptors else self._field(DESCRIPTOR_FIELD)
        self._paths = [(name, name.split(".") if "." in name else None) for name in self._names]

    @property
    def names(self) -> tuple[str, ...]:
        """Fields that are required for a line to make a request."""
        optional = {"hits"}
        return tuple(name for name in self._names if name not in optional)

    def place(self, name: str) -> int:
        """Return the index of a field in the values of a line."""
        return self._names.index(name)

    def values(self, fields: Fields[str, Any]) -> Values:
        found = []
        for name, path in self._paths:
            value = fields.get(name)
            if path is not None and value is None:
                value = _nested(fields, path)
            found.append(_text(value) if value.__class__ is not str else None if value == _ABSENT else value)
        return tuple(found)

    def request(self, values: Values) -> Request | None:
        """Build the request; None if there is no descriptor. Raise InvalidLine if a value is invalid."""
        domain = _fill(self._domain, values)
        if not domain:
            raise InvalidLine("no domain: name it with --domain, or the field that has it with --domain %field%")
        hits = _hits(_fill(self._hits, values))
        if self._written is not None:
            written = values[self._written]
            texts = [] if written is None else [_parse(written)]
        else:
            texts = [
                entries for template in self._descriptors if (entries := _fill_entries(template, values)) is not None
            ]
        return Request(domain, tuple([Descriptor(entries, None, hits) for entries in texts])) if texts else None

    def _field(self, name: str) -> int:
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    def _template(self, text: str) -> _Template:
        literals, fields, at = [""], [], 0
        for found in _FIELD.finditer(text):
            literals[-1] += text[at : found.start()]
            at = found.end()
            if found[1]:
                fields.append(self._field(found[1]))
                literals.append("")
            else:
                literals[-1] += "%"
        if "%" in text[at:]:
            raise SettingsError(f"{text!r} has an unmatched %: a field is written %name%, a percent sign %%")
        literals[-1] += text[at:]
        if not fields:
            return literals[0]
        return fields[0] if literals == ["", ""] else (tuple(literals), tuple(fields))

    def _entries(self, text: str) -> list[tuple[str, _Template]]:
        entries = []
        for part in text.split(","):
            key, equals, value = part.partition("=")
            if not key or not equals:
                raise SettingsError(f"{part!r} in {text!r} is not key=value; use e.g. user=%x_user%")
            entries.append((key, self._template(value)))
        return entries


_Template = str | int | tuple[tuple[str, ...], tuple[int, ...]]
"""A text without fields; the index of the only field; or literals, and the indexes of the fields between them."""


def _fill(template: _Template, values: Values) -> str | None:
    if isinstance(template, int):
        return values[template]
    if isinstance(template, str):
        return template
    literals, fields = template
    filled = literals[0]
    for field, literal in zip(fields, literals[1:], strict=True):
        value = values[field]
        if value is None:
            return None
        filled += value + literal
    return filled


def _fill_entries(template: list[tuple[str, _Template]], values: Values) -> tuple[Entry, ...] | None:
    entries = []
    for key, value in template:
        filled = _fill(value, values)
        if filled is None:
            return None
        entries.append(Entry(key, filled))
    return tuple(entries)


def _parse(written: str) -> tuple[Entry, ...]:
    entries = []
    for part in written.split(","):
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise InvalidLine(f"descriptor {written[:60]!r} is not key=value,key=value")
        entries.append(Entry(key, value))
    return tuple(entries)


def _hits(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= MAX_HITS):
        raise InvalidLine(f"hits {text[:60]!r} is not a whole number up to {MAX_HITS}")
    return int(text)


def _nested(fields: Fields[str, Any], path: list[str]) -> Any:
    found: Any = fields
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _text(value: Any) -> str | None:
    """Convert a JSON value to text, as a header would have it. Raise InvalidLine for a list or an object."""
    if value is None or isinstance(value, str):
        return None if value == _ABSENT else value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    raise InvalidLine(f"a field is {'a list' if isinstance(value, list) else 'an object'}; it must be text or a number")
