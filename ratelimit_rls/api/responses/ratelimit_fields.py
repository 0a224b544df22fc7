"""RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers-11) as Structured Fields (RFC 9651).

Both are lists of strings with parameters. Clients ignore a field as a whole if it violates the grammar.
"""

from __future__ import annotations

from collections.abc import Iterable

from ratelimit_rls.core.model import Limit


def string(text: str) -> str:
    """Encode printable ASCII as a Structured Field string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def policy_field(limits: Iterable[tuple[str, Limit]]) -> str:
    """Format RateLimit-Policy from pairs (name as a Structured Field string, limit)."""
    return ", ".join([f"{name};q={limit.requests_per_unit}{_window(limit)}" for name, limit in limits])


def limit_field(limits: Iterable[tuple[str, int, int]]) -> str:
    """Format RateLimit from triples (name as a Structured Field string, remaining, seconds until reset)."""
    return ", ".join([f"{name};r={remaining};t={seconds}" for name, remaining, seconds in limits])


def _window(limit: Limit) -> str:
    """Format the window length in seconds; empty for a calendar window, whose length varies."""
    seconds = limit.window_us // 1_000_000
    return f";w={seconds}" if seconds and not limit.timezone else ""
