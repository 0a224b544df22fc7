"""Parser for storage keys (core/storage_keys.py writes them), for tools that show counters.

It is not used for decisions: long tags are truncated, and what was cut off cannot be recovered.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ratelimit_rls.core.model import Algorithm, Entry
from ratelimit_rls.core.percent_encoding import percent_decode

# Limits and watchers. Anything else under a tag (the key of an idempotent call) is not a counter.
_STATE = "|".join([*(f"{algorithm.value}:[^:]+" for algorithm in Algorithm), "penalty", "warning"])
_KEY = re.compile(rf"rl:\{{([^{{}}]*)\}}(/[^:]*)?:({_STATE})")
_DIGEST = re.compile(r"~[0-9a-f]{40}")


class ParsedKey(NamedTuple):
    domain: str
    entries: tuple[Entry, ...]
    is_cut: bool  # the key was truncated, somewhere in the last entry or even in the domain
    state: str  # e.g. `gcra:60` or `penalty`

    @property
    def descriptor(self) -> str:
        """Text as --descriptor accepts it (except values with a comma): `plan=free,user=alice`; `user=aaaa…` if cut."""
        return ",".join(f"{key}={value}" for key, value in self.entries) + "…" * self.is_cut


def parse_key(key: str, prefix: str | None = None) -> ParsedKey | None:
    """Parse a storage key; None if it is not the key of a counter with that prefix. A prefix of None matches any."""
    if prefix is None:
        prefix = key[: max(0, key.find("rl:{"))]
    if not key.startswith(prefix):
        return None
    found = _KEY.fullmatch(key, len(prefix))
    if found is None:
        return None
    braced, after, state = found.groups(default="")
    domain, *texts = _DIGEST.sub("", braced).split("/")
    rest = _DIGEST.sub("", after)
    is_cut = _DIGEST.search(braced) is not None or rest != after
    if after:
        shared, texts = texts, rest.split("/")[1:]
        if "" in texts:
            # It stands for the entry in the braces. At the end of what was cut, it may be the beginning of any entry.
            at = texts.index("")
            texts[at : at + 1] = [] if rest != after and at == len(texts) - 1 else shared
    return ParsedKey(percent_decode(domain), tuple(map(_entry, texts)), is_cut, state)


def _entry(text: str) -> Entry:
    key, _, value = text.partition("=")
    return Entry(percent_decode(key), percent_decode(value))
