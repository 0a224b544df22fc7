"""Audit of the admissions of one limit, from the remaining hits that each admitted caller received.

One server assigns every number once, from the limit down to 0. A number that occurs twice was assigned by two servers:
the first counted the hit, and its successor never saw it. A missing number was counted, but its response was lost.
Numbers below `share` may also come from the counters of `local`, which start there; so faults must end before the
counters get that low.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ratelimit_rls.core.model import Code
from tests.support.open_loop_clients import CallRecord


class Admissions(NamedTuple):
    admitted: int
    twice: int  # hits a server counted and its successor never saw
    unheard: int  # hits counted without a response in time


def audit_admissions(calls: Iterable[CallRecord], limit: int, share: int, descriptor: int = 0) -> Admissions:
    """Audit calls with one hit each, whose descriptor of that index has the same limit."""
    left = [call.left[descriptor] for call in calls if call.outcome == Code.OK]
    result = Counter(number for number in left if number >= share)
    return Admissions(len(left), twice=result.total() - len(result), unheard=limit - share - len(result))
