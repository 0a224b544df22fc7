"""Descriptors by a pattern, among the keys in Redis and without rules: what `reset --match` finds.

    user=*              one entry, any user
    plan=free,user=a*   two entries, in this order
    tenant=acme,**      the tenant's own counter, and whatever has more entries after it

In an entry `*`, `?` and `[…]` mean what they mean in a shell. `**` stands for any number of further entries.
"""

from __future__ import annotations

import re
from fnmatch import translate
from typing import NamedTuple

from ratelimit_rls.core.key_text import KeyText
from ratelimit_rls.core.keys import encode_tag
from ratelimit_rls.core.model import Entry

_GLOB = re.compile(rb"([*?\[\]\\])")


class EntryPattern(NamedTuple):
    key: re.Pattern[str]
    value: re.Pattern[str]

    def matches(self, entry: Entry) -> bool:
        return self.key.match(entry.key) is not None and self.value.match(entry.value) is not None


class DescriptorPattern(NamedTuple):
    entries: tuple[EntryPattern, ...]
    has_more: bool  # ends in `**`

    def matches(self, key: KeyText) -> bool:
        """Nobody knows how a descriptor ends that is cut: only `**` matches what it may be."""
        known = len(key.entries)
        if not self.has_more and (key.is_cut or known != len(self.entries)):
            return False
        return known >= len(self.entries) and all(map(EntryPattern.matches, self.entries, key.entries))


def parse_pattern(text: str) -> DescriptorPattern:
    """Raises ValueError with the second half of a sentence."""
    parts = text.split(",")
    has_more = parts[-1] == "**"
    return DescriptorPattern(tuple(map(_entry_pattern, parts[:-1] if has_more else parts)), has_more)


def _entry_pattern(text: str) -> EntryPattern:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"has {text!r} where key=value belongs, such as user=* (or ** at its end, for any entries)")
    return EntryPattern(re.compile(translate(key)), re.compile(translate(value)))


def scanned(prefix: str, domain: str) -> bytes:
    """What SCAN is asked for: every key of the domain, in both forms of a tag, and few others."""
    opened = encode_tag(domain, ())[:-1]  # `{edge`, before the brace that ends it
    return _GLOB.sub(rb"\\\1", prefix.encode() + b"rl:" + opened) + b"[/}]*"
