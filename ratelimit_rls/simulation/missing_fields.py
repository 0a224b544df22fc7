"""Diagnosis of traffic without requests.

Tracks fields that no line had, while lines pass, since they are read only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ratelimit_rls.simulation.field_mapping import FieldMapping
from ratelimit_rls.simulation.traffic import InvalidLines, Line


class MissingFields:
    """Passes chunks of lines through unchanged. A field is looked up until a line has it, usually the first."""

    def __init__(self, chunks: Iterable[Sequence[Line]], mapping: FieldMapping) -> None:
        self._chunks = chunks
        self._places = {name: mapping.place(name) for name in mapping.names}
        self._has_lines = False

    @property
    def names(self) -> tuple[str, ...]:
        """Fields that no line had so far."""
        return tuple(self._places)

    def __iter__(self) -> Iterator[Sequence[Line]]:
        for chunk in self._chunks:
            self._has_lines = True
            for name, place in tuple(self._places.items()):
                if any(values[place] is not None for _, _, values in chunk):
                    del self._places[name]
            yield chunk

    def explain_no_requests(self, invalid: InvalidLines) -> str:
        """Return why the traffic had no requests, as the end of a sentence."""
        if not self._has_lines:
            if not invalid.first:
                return "there is no line of traffic"
            line, reason = invalid.first[0]
            return f"no line could be read; line {line}: {reason}"
        if self.names:
            fields = ", ".join(f"%{name}%" for name in self.names)
            return f"no line has {fields}; fields are named by --domain, --descriptor and --hits"
        if invalid.first:
            line, reason = invalid.first[0]
            return f"no line makes sense; line {line}: {reason}"
        return "no line has all the fields of a descriptor"
