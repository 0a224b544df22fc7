"""Why nothing came of traffic: the fields that no line had, seen while lines go by, since they are read once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ratelimit_rls.trial.mapping import Mapping
from ratelimit_rls.trial.traffic import BadLines, Line


class Absent:
    """Passes chunks of lines on as they are. A field is looked for until a line has it: mostly in the first."""

    def __init__(self, chunks: Iterable[Sequence[Line]], mapping: Mapping) -> None:
        self._chunks = chunks
        self._places = {name: mapping.place(name) for name in mapping.names}
        self._has_lines = False

    @property
    def names(self) -> tuple[str, ...]:
        """Those that no line had so far."""
        return tuple(self._places)

    def __iter__(self) -> Iterator[Sequence[Line]]:
        for chunk in self._chunks:
            self._has_lines = True
            for name, place in tuple(self._places.items()):
                if any(values[place] is not None for _, _, values in chunk):
                    del self._places[name]
            yield chunk

    def why_nothing(self, bad: BadLines) -> str:
        """The end of a sentence, for traffic of which no request came."""
        if not self._has_lines:
            if not bad.first:
                return "there is no line of traffic"
            line, why = bad.first[0]
            return f"no line could be read; line {line}: {why}"
        if self.names:
            fields = ", ".join(f"%{name}%" for name in self.names)
            return f"no line has {fields}; fields are named by --domain, --descriptor and --hits"
        if bad.first:
            line, why = bad.first[0]
            return f"no line makes sense; line {line}: {why}"
        return "no line has all the fields of a descriptor"
