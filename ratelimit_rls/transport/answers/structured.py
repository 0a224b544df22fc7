"""RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-11) as Structured Fields (RFC 9651).

Both are lists of strings with parameters. A field that breaks the grammar is ignored as a whole by those who read it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ratelimit_rls.core.model import Limit


def string(text: str) -> str:
    """`text` is printable ASCII."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def policy_field(limits: Iterable[tuple[str, Limit]]) -> str:
    """Each as (name as a Structured Field's string, limit)."""
    return ", ".join([f"{name};q={limit.requests_per_unit}{_window(limit)}" for name, limit in limits])


def limit_field(limits: Iterable[tuple[str, int, int]]) -> str:
    """Each as (name as a Structured Field's string, remaining, seconds until reset)."""
    return ", ".join([f"{name};r={remaining};t={seconds}" for name, remaining, seconds in limits])


def _window(limit: Limit) -> str:
    """Its length in seconds; nothing for a calendar's window, whose length is another each time."""
    seconds = limit.window_us // 1_000_000
    return f";w={seconds}" if seconds and not limit.timezone else ""
