"""Recently verified tokens."""

from __future__ import annotations

from ratelimit_rls.admin.auth import MAX_RECENT_TOKENS, RECENT_S, RecentTokens

NOW_S = 1_800_000_000.0


def test_recent_tokens_are_bounded_and_keep_the_newest() -> None:
    now_s = NOW_S
    known = RecentTokens(lambda: now_s)
    for number in range(MAX_RECENT_TOKENS + 1):
        known.add(number.to_bytes(32))
        known.add((1).to_bytes(32))
    assert [number for number in range(MAX_RECENT_TOKENS + 1) if number.to_bytes(32) not in known] == [0]
    known.discard((1).to_bytes(32))
    assert (1).to_bytes(32) not in known
    now_s += RECENT_S
    assert (2).to_bytes(32) not in known
