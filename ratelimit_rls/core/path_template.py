"""Paths by their shape: `/users/{id}/orders/**` is met by the orders of every user.

A template is segments between slashes. `{name}` stands for one segment that is not empty, `**` at the end for the rest,
which may be nothing, and everything else for itself. What is compared is the path as it was sent: an escape, an empty
segment and `..` are what they are, since only Envoy can say what the upstream will make of them (`normalize_path`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

REST = "**"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class PathTemplate:
    text: str  # as written
    segments: tuple[str | None, ...]  # None stands for any one of them
    names: tuple[tuple[str, int], ...]  # with the number of the segment that they name
    is_open: bool  # whether the rest may follow

    @classmethod
    def parse(cls, text: str) -> PathTemplate:
        """Raises ValueError with the end of a sentence that starts with the template."""
        if not text.startswith("/"):
            raise ValueError("does not start with '/'")
        if "?" in text or "#" in text:
            raise ValueError("has a '?' or a '#'; it describes the path alone, and 'query' takes a parameter")
        *inner, last = text[1:].split("/")
        is_open = last == REST
        segments: list[str | None] = []
        names: dict[str, int] = {}
        for segment in inner if is_open else [*inner, last]:
            name = segment[1:-1] if segment.startswith("{") and segment.endswith("}") else None
            if name is None:
                _check_plain(segment)
            elif not _NAME.fullmatch(name):
                raise ValueError(f"has '{segment[:60]}'; between the braces is a name: letters, digits and '_'")
            elif name in names:
                raise ValueError(f"has '{segment[:60]}' twice")
            else:
                names[name] = len(segments)
            segments.append(segment if name is None else None)
        return cls(text, tuple(segments), tuple(names.items()), is_open)

    def split(self, path: str) -> list[str]:
        """The path in as many pieces as it takes to compare it: a path of a thousand slashes is not cut at each.

        None at all of what is no path (`*`, or the nothing of a CONNECT).
        """
        return path[1:].split("/", len(self.segments)) if path.startswith("/") else []

    def fits(self, pieces: list[str]) -> bool:
        """Whether the path that was split into `pieces`, by this template or one with more segments, is met."""
        segments = self.segments
        if not pieces or len(pieces) < len(segments) or (len(pieces) > len(segments) and not self.is_open):
            return False
        # zip stops at the template's end: what follows there is the rest.
        for wanted, piece in zip(segments, pieces, strict=False):
            if piece != wanted and (wanted is not None or not piece):
                return False
        return True

    def covers(self, other: PathTemplate) -> bool:
        """Whether every path that fits `other` fits this one too."""
        mine, theirs = self.segments, other.segments
        if len(theirs) < len(mine) or (not self.is_open and (other.is_open or len(theirs) > len(mine))):
            return False
        # A plain segment that is empty is no `{name}`.
        pairs = zip(mine, theirs, strict=False)
        return all(one == another or (one is None and another != "") for one, another in pairs)


def _check_plain(segment: str) -> None:
    if REST in segment:
        raise ValueError(f"has '{REST}' before its end; it stands for the rest, as the last segment and alone")
    if "{" in segment or "}" in segment or "*" in segment:
        raise ValueError(
            f"has '{segment[:60]}'; a segment is a plain text or '{{name}}', which stands for the whole of it"
        )
