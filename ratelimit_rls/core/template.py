"""Texts with holes, for bodies and headers of refusals: `try again in ${retry_after} s`.

Only what the service itself knows can be put in, never a value of the request: nothing a client sends can end up in a
header or a body. What stands in the holes is checked when the rules load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


class Hole(Enum):
    """What a template can tell. The value is the name in YAML."""

    DOMAIN = "domain"
    RULE = "rule"  # the path of the rule that refuses
    NAME = "name"  # of the limit; its window's where it has none
    LIMIT = "limit"  # requests_per_unit
    WINDOW = "window"  # in words: minute, 5 minutes, month
    RETRY_AFTER = "retry_after"  # whole seconds, as in the header: until the call passes, jitter included
    RESET_AFTER = "reset_after"  # whole seconds until this limit lets one more pass
    RESET_AT = "reset_at"  # that moment, as RFC 3339 writes it
    NOW = "now"


@dataclass(frozen=True, slots=True)
class Template:
    parts: tuple[str | Hole, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises ValueError with the end of a sentence that starts with the template. `$${` is a plain `${`."""
        parts: list[str | Hole] = []
        plain, rest = "", text
        while "${" in rest:
            before, rest = rest.split("${", 1)
            if before.endswith("$"):
                plain += before[:-1] + "${"
                continue
            if "}" not in rest:
                raise ValueError("has a '${' without its '}'; '$${' writes a plain '${'")
            name, rest = rest.split("}", 1)
            if name not in _HOLES:
                raise ValueError(f"asks for '${{{name[:60]}}}'; it can ask for {', '.join(_HOLES)}")
            if plain + before:
                parts.append(plain + before)
            parts.append(_HOLES[name])
            plain = ""
        if plain + rest:
            parts.append(plain + rest)
        return cls(tuple(parts))

    @property
    def text(self) -> str:
        """What it is parsed from."""
        written = (part.replace("${", "$${") if isinstance(part, str) else f"${{{part.value}}}" for part in self.parts)
        return "".join(written)

    def render(self, values: Mapping[Hole, str], escape: Callable[[str], str] = str) -> str:
        return "".join([part if isinstance(part, str) else escape(values[part]) for part in self.parts])


_HOLES = {hole.value: hole for hole in Hole}
