"""Hears which counters were given something back anywhere, and has refusals forgotten.

Whatever was remembered while nobody listened may be over, unheard of: all is forgotten when the connection is lost, and
nothing remembered until it is back.
"""

from __future__ import annotations

from ratelimit_rls.store.denials import Denials
from ratelimit_rls.store.redis.commands import bulk
from ratelimit_rls.store.redis.line import Connect
from ratelimit_rls.store.redis.listener import Listener


class News(Listener):
    def __init__(
        self, name: str, connect: Connect, channel: bytes, denials: Denials, *, timeout_s: float = 1.0
    ) -> None:
        super().__init__(
            f"{name}, for news",
            connect,
            channel,
            lambda told: denials.forget(map(bulk, told.split(b"\n"))),
            in_vain="refusals are not remembered",
            on_connection=denials.listening,
            timeout_s=timeout_s,
        )
