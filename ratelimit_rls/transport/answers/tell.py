"""Answers: what a door says of a decision, in headers, in a body and in dynamic metadata."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from ratelimit_rls.core.model import Code, Decision
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.core.style import Deny, Family
from ratelimit_rls.core.template import Hole
from ratelimit_rls.transport.answers.bodies import body, values
from ratelimit_rls.transport.answers.fired import fired
from ratelimit_rls.transport.answers.headers import Line, families, state
from ratelimit_rls.transport.answers.options import AnswerOptions
from ratelimit_rls.transport.answers.subject import blamed, retry_after_s, subject
from ratelimit_rls.transport.answers.telling import Telling
from ratelimit_rls.transport.answers.vocabulary import Vocabulary
from ratelimit_rls.transport.answers.words import printable, seconds

PASSED, REFUSED = 200, 429


class Told(NamedTuple):
    headers: tuple[Line, ...]
    body: bytes  # of refusals only
    status: int  # of HTTP, for doors that may choose it


class Answers:
    def __init__(self, options: AnswerOptions, draw: Callable[[int], int] = random.randrange) -> None:
        """`draw(n)` gives a number from 0 to n - 1, another each time."""
        self._families = families(options)
        self._default = (Family.REFERENCE,) if options.headers_enabled else ()
        self._draw = draw
        self._vocabulary = per_outline(Vocabulary)

    def tell(self, decision: Decision, request_id: str = "") -> Told:
        """`request_id` is the caller's own, for bodies that repeat it."""
        telling = self._telling(decision)
        if telling is None:  # no limit applied, so nothing can have refused
            return Told((), b"", PASSED)
        lines = self._lines(telling)
        if decision.code is not Code.OVER_LIMIT:
            return Told(tuple(lines), b"", PASSED)
        deny = telling.rule.deny
        return Told(tuple(lines), b"", REFUSED) if deny is None else _denied(deny, telling, lines, request_id)

    def fired(self, decision: Decision) -> dict[str, Any]:
        """Dynamic metadata: `{"rule": {"path": …, "window": …}}`, with `limit`, `retry_after`, … where it has them."""
        return fired(decision)

    def holes(self, decision: Decision) -> dict[Hole, str] | None:
        """What templates can tell of a decision; None if no limit applied."""
        telling = self._telling(decision)
        return None if telling is None else values(telling)

    def _telling(self, decision: Decision) -> Telling | None:
        refusals = blamed(decision)
        status = subject(decision, refusals)
        if status is None or status.step is None or status.slot.rule is None:
            return None
        rule = status.slot.rule
        retry_s = 0
        if decision.code is Code.OVER_LIMIT:
            retry_s = retry_after_s(refusals)
            if rule.style.retry_jitter_us:
                retry_s += self._draw(seconds(rule.style.retry_jitter_us) + 1)
        return Telling(decision, status, status.step, rule, refusals, retry_s, self._vocabulary(decision.outline))

    def _lines(self, telling: Telling) -> list[Line]:
        chosen = telling.rule.style.headers
        lines = [
            line for family in (self._default if chosen is None else chosen) for line in self._families[family](telling)
        ]
        lines.extend(state(telling.status))
        return lines


def _denied(deny: Deny, telling: Telling, lines: list[Line], request_id: str) -> Told:
    said = body(deny, telling, request_id)
    if said is not None:
        lines.append(("Content-Type", printable(said.content_type)))
    if deny.headers:
        holes = values(telling)
        own = [(name, printable(template.render(holes))) for name, template in deny.headers]
        # What the rule writes itself stands in place of a line of the same name, not beside it.
        names = {name.lower() for name, _ in own}
        lines = [line for line in lines if line[0].lower() not in names] + own
    return Told(tuple(lines), said.content if said is not None else b"", deny.status)
