"""A storage key read back: whose state it holds, and which (core/keys.py writes them).

For people who look at counters, never for deciding: a tag that was too long is cut, and what was cut off is not known.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ratelimit_rls.core.escapes import unescaped
from ratelimit_rls.core.model import Algorithm, Entry

# Limits and watchers; what else may be under a tag (the record of a call that counts once) is nobody's counter.
_STATE = "|".join([*(f"{algorithm.value}:[^:]+" for algorithm in Algorithm), "penalty", "warning"])
_KEY = re.compile(rf"rl:\{{([^{{}}]*)\}}(/[^:]*)?:({_STATE})")
_DIGEST = re.compile(r"~[0-9a-f]{40}")


class KeyText(NamedTuple):
    domain: str
    entries: tuple[Entry, ...]
    is_cut: bool  # only its beginning is known, up to somewhere in the last entry, or even in the domain
    state: str  # e.g. `gcra:60` or `penalty`

    @property
    def descriptor(self) -> str:
        """As --descriptor takes it, but for values with a comma: `plan=free,user=alice`, `user=aaaa…` if it is cut."""
        return ",".join(f"{key}={value}" for key, value in self.entries) + "…" * self.is_cut


def parse_key(key: str, prefix: str | None = None) -> KeyText | None:
    """None if it is no key of a counter, or not one with that prefix. With None, any prefix will do."""
    if prefix is None:
        prefix = key[: max(0, key.find("rl:{"))]
    if not key.startswith(prefix):
        return None
    found = _KEY.fullmatch(key, len(prefix))
    if found is None:
        return None
    braced, behind, state = found.groups(default="")
    tag = braced + behind  # the same, whether the domain stands alone in the braces or all of it
    uncut = _DIGEST.sub("", tag)
    domain, *texts = uncut.split("/")
    return KeyText(unescaped(domain), tuple(map(_entry, texts)), uncut != tag, state)


def _entry(text: str) -> Entry:
    key, _, value = text.partition("=")
    return Entry(unescaped(key), unescaped(value))
