"""Which hits of one limit were handed out, by what each admitted caller was told to be left.

One server hands out every number once, from the limit down to nothing. A number that is told twice was handed out by
two servers: the first one took the hit, and the second, which took over, has never seen it. A number that nobody was
told was counted, and its answer lost. Numbers below `share` may also be from the counters of `local`, which begin
there; so whatever befalls the servers must be over before theirs come so low.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ratelimit_rls.core.model import Code
from tests.paced import Told


class HandedOut(NamedTuple):
    admitted: int
    twice: int  # what a server took and its successor never saw
    unheard: int  # what was counted without an answer in time


def handed_out(calls: Iterable[Told], limit: int, share: int, descriptor: int = 0) -> HandedOut:
    """Of calls with one hit each, which all ask for the same limit in their descriptor of that number."""
    left = [call.left[descriptor] for call in calls if call.outcome == Code.OK]
    told = Counter(number for number in left if number >= share)
    return HandedOut(len(left), twice=told.total() - len(told), unheard=limit - share - len(told))
