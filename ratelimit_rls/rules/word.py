"""A key whose value is one of a few words: `charge`, `action` and the like."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from ratelimit_rls.rules import offences
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.written import Written

Words = TypeVar("Words", bound=Enum)


def read_word(key: str, written: Written[str] | None, words: type[Words], found: Findings) -> Words | None:
    """None without one, and after an error."""
    if written is None:
        return None
    known = {word.value: word for word in words}
    if written.value not in known:
        found.error(written.position, offences.unknown_word(key, written.value, known))
    return known.get(written.value)
