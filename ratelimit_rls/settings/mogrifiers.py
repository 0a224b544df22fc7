"""DOG_STATSD_MOGRIFIER_<NAME>_… variables, whose names are listed by USE_DOG_STATSD_MOGRIFIERS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import re2

from ratelimit_rls.settings.parse import parse_map

PREFIX = "DOG_STATSD_MOGRIFIER_"

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


class Mogrifier(NamedTuple):
    """Pattern that renames statsd names for DogStatsD and adds tags. `$1` in either is the first group."""

    pattern: Any  # compiled
    name: str
    tags: tuple[tuple[str, str], ...]


def parse_mogrifiers(names: Iterable[str], environ: Mapping[str, str]) -> tuple[Mogrifier, ...]:
    """Parse the listed mogrifiers. Raises ValueError with one sentence for each that is invalid."""
    found: list[Mogrifier] = []
    invalid: list[str] = []
    for name in names:
        try:
            found.append(_mogrifier(f"{PREFIX}{name.upper()}_", environ))
        except ValueError as error:
            invalid.append(str(error))
    if invalid:
        raise ValueError("\n".join(invalid))
    return tuple(found)


def _mogrifier(prefix: str, environ: Mapping[str, str]) -> Mogrifier:
    pattern, name, tags = (environ.get(prefix + part, "") for part in ("PATTERN", "NAME", "TAGS"))
    for part, value in ("PATTERN", pattern), ("NAME", name):
        if not value:
            raise ValueError(f"{prefix}{part} is not set, although USE_DOG_STATSD_MOGRIFIERS lists its name; set it")
    try:
        compiled = re2.compile(pattern, _OPTIONS)
    except re2.error as error:
        raise ValueError(f"{prefix}PATTERN={pattern!r} is not a regular expression: {_error_text(error)}") from None
    try:
        pairs = parse_map(tags)
        assert isinstance(pairs, dict)
        if not all(key and value for key, value in pairs.items()):
            raise ValueError("has a tag without a key or a value; use key:value,key:value")
    except ValueError as error:
        raise ValueError(f"{prefix}TAGS={tags!r} {error}") from None
    return Mogrifier(compiled, name, tuple(pairs.items()))


def _error_text(error: re2.error) -> str:
    (message,) = error.args
    return message.decode(errors="replace") if isinstance(message, bytes) else str(message)
