"""The versions of the API, and what answers of an old one say: since when it is deprecated, and when it ends.

A version that ages is told so in every answer (Deprecation: RFC 9745, Sunset: RFC 8594), half a year ahead at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime


@dataclass(frozen=True, slots=True)
class Version:
    name: str  # as in the path
    deprecated_at: datetime | None = None  # with a time zone, as the next
    sunset_at: datetime | None = None
    successor: str = ""  # the name of the version to use instead

    @property
    def prefix(self) -> str:
        return f"/api/{self.name}"

    def headers(self) -> dict[str, str]:
        """Of every answer under its path; none, as long as it does not age."""
        headers: dict[str, str] = {}
        if self.deprecated_at is not None:
            headers["Deprecation"] = f"@{int(self.deprecated_at.timestamp())}"
        if self.sunset_at is not None:
            headers["Sunset"] = format_datetime(self.sunset_at, usegmt=True)
        if headers and self.successor:
            headers["Link"] = f'</api/{self.successor}>; rel="successor-version"'
        return headers


VERSIONS = (Version("v1"),)


def aging_headers(path: str, versions: Sequence[Version]) -> dict[str, str]:
    for version in versions:
        if path == version.prefix or path.startswith(f"{version.prefix}/"):
            return version.headers()
    return {}
