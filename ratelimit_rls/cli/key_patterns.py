"""Patterns of `reset --match`, which select descriptors among the keys in Redis, without rules.

    user=*              one entry, any user
    plan=free,user=a*   two entries, in this order
    tenant=acme,**      the tenant's own counter, and those with further entries

In an entry `*`, `?` and `[…]` mean what they mean in a shell. `**` stands for any number of further entries.
"""

from __future__ import annotations

import re
from fnmatch import translate
from typing import NamedTuple

from ratelimit_rls.core.model import Entry
from ratelimit_rls.core.storage_key_parser import ParsedKey
from ratelimit_rls.core.storage_keys import encode_tag

_GLOB = re.compile(rb"([*?\[\]\\])")


class EntryPattern(NamedTuple):
    key: re.Pattern[str]
    value: re.Pattern[str]

    def matches(self, entry: Entry) -> bool:
        return self.key.match(entry.key) is not None and self.value.match(entry.value) is not None


class DescriptorPattern(NamedTuple):
    entries: tuple[EntryPattern, ...]
    has_more: bool  # ends in `**`

    def matches(self, key: ParsedKey) -> bool:
        """Return True if the descriptor matches. The end of a truncated descriptor is unknown: only `**` matches it."""
        known = len(key.entries)
        if not self.has_more and (key.is_cut or known != len(self.entries)):
            return False
        return known >= len(self.entries) and all(map(EntryPattern.matches, self.entries, key.entries))


def parse_pattern(text: str) -> DescriptorPattern:
    """Parse a pattern. The message of the ValueError is the predicate of a sentence about the text."""
    parts = text.split(",")
    has_more = parts[-1] == "**"
    return DescriptorPattern(tuple(map(_entry_pattern, parts[:-1] if has_more else parts)), has_more)


def _entry_pattern(text: str) -> EntryPattern:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"contains {text!r}; must be key=value, e.g. user=*, or ** at the end for any further entries")
    return EntryPattern(re.compile(translate(key)), re.compile(translate(value)))


def scan_pattern(prefix: str, domain: str) -> bytes:
    """Return the glob for SCAN: it matches every key of the domain, in both forms of a hash tag, and few others."""
    opened = encode_tag(domain, ())[:-1]  # `{edge`, before the brace that ends it
    return _GLOB.sub(rb"\\\1", prefix.encode() + b"rl:" + opened) + b"[/}]*"
