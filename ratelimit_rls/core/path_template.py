"""Path templates: `/users/{id}/orders/**` matches the orders of every user.

A template consists of segments separated by slashes. `{name}` matches one non-empty segment, `**` at the end matches
the rest, which may be empty, and everything else matches itself. The path is compared as sent: escapes, empty segments
and `..` are not normalised, since only Envoy knows how the upstream treats them (`normalize_path`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

REST = "**"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class PathTemplate:
    text: str  # as written
    segments: tuple[str | None, ...]  # None: any non-empty segment
    names: tuple[tuple[str, int], ...]  # name and index of its segment
    is_open: bool  # ends with `**`

    @classmethod
    def parse(cls, text: str) -> PathTemplate:
        """Parse a template. Raises ValueError with the end of a sentence that starts with the template."""
        if not text.startswith("/"):
            raise ValueError("does not start with '/'")
        if "?" in text or "#" in text:
            raise ValueError("has a '?' or a '#'; it must be a path only; use 'query' for parameters")
        *inner, last = text[1:].split("/")
        is_open = last == REST
        segments: list[str | None] = []
        names: dict[str, int] = {}
        for segment in inner if is_open else [*inner, last]:
            name = segment[1:-1] if segment.startswith("{") and segment.endswith("}") else None
            if name is None:
                _check_plain(segment)
            elif not _NAME.fullmatch(name):
                raise ValueError(f"has '{segment[:60]}'; the name in braces must consist of letters, digits and '_'")
            elif name in names:
                raise ValueError(f"has '{segment[:60]}' twice")
            else:
                names[name] = len(segments)
            segments.append(segment if name is None else None)
        return cls(text, tuple(segments), tuple(names.items()), is_open)

    def split(self, path: str) -> list[str]:
        """Split a path into no more pieces than the comparison needs, even if it has a thousand slashes.

        Returns an empty list for what is not a path (`*`, or the empty path of a CONNECT).
        """
        return path[1:].split("/", len(self.segments)) if path.startswith("/") else []

    def fits(self, pieces: list[str]) -> bool:
        """Return whether the template matches a path split by this template or by one with more segments."""
        segments = self.segments
        if not pieces or len(pieces) < len(segments) or (len(pieces) > len(segments) and not self.is_open):
            return False
        # zip stops at the end of the template; what follows is the rest.
        for wanted, piece in zip(segments, pieces, strict=False):
            if piece != wanted and (wanted is not None or not piece):
                return False
        return True

    def covers(self, other: PathTemplate) -> bool:
        """Return whether every path that matches `other` also matches this template."""
        own, others = self.segments, other.segments
        if len(others) < len(own) or (not self.is_open and (other.is_open or len(others) > len(own))):
            return False
        # `{name}` does not match an empty segment.
        pairs = zip(own, others, strict=False)
        return all(one == another or (one is None and another != "") for one, another in pairs)


def _check_plain(segment: str) -> None:
    if REST in segment:
        raise ValueError(f"has '{REST}' before its end; it must be the last segment, and matches the rest")
    if "{" in segment or "}" in segment or "*" in segment:
        raise ValueError(
            f"has '{segment[:60]}'; a segment must be plain text or '{{name}}', which matches the whole segment"
        )
