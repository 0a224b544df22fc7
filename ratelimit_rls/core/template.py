"""Text templates for the bodies and headers of denials: `try again in ${retry_after} s`.

Placeholders stand for values of the service only, never for values of the request: nothing sent by a client can end up
in a header or a body. Placeholders are checked when the rules are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


class Placeholder(Enum):
    """Placeholders of templates. The value is the name in YAML."""

    DOMAIN = "domain"
    RULE = "rule"  # path of the rule that denies the call
    NAME = "name"  # name of the limit, or of its window if it has none
    LIMIT = "limit"  # requests_per_unit
    WINDOW = "window"  # as text: minute, 5 minutes, month
    RETRY_AFTER = "retry_after"  # whole seconds until the call passes, including jitter, as in the header
    RESET_AFTER = "reset_after"  # whole seconds until this limit admits one more hit
    RESET_AT = "reset_at"  # that time, in RFC 3339 format
    NOW = "now"


@dataclass(frozen=True, slots=True)
class Template:
    parts: tuple[str | Placeholder, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template, in which `$${` is a literal `${`.

        Raises ValueError with the end of a sentence that starts with the template.
        """
        parts: list[str | Placeholder] = []
        plain, rest = "", text
        while "${" in rest:
            before, rest = rest.split("${", 1)
            if before.endswith("$"):
                plain += before[:-1] + "${"
                continue
            if "}" not in rest:
                raise ValueError("has a '${' without its '}'; write '$${' for a literal '${'")
            name, rest = rest.split("}", 1)
            if name not in _PLACEHOLDERS:
                raise ValueError(f"asks for '${{{name[:60]}}}'; it can ask for {', '.join(_PLACEHOLDERS)}")
            if plain + before:
                parts.append(plain + before)
            parts.append(_PLACEHOLDERS[name])
            plain = ""
        if plain + rest:
            parts.append(plain + rest)
        return cls(tuple(parts))

    @property
    def text(self) -> str:
        """Source text of the template."""
        written = (part.replace("${", "$${") if isinstance(part, str) else f"${{{part.value}}}" for part in self.parts)
        return "".join(written)

    def render(self, values: Mapping[Placeholder, str], escape: Callable[[str], str] = str) -> str:
        return "".join([part if isinstance(part, str) else escape(values[part]) for part in self.parts])


_PLACEHOLDERS = {hole.value: hole for hole in Placeholder}
