"""What a refusal says besides its headers."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ratelimit_rls.core.style import BodyFormat, Deny
from ratelimit_rls.core.template import Hole
from ratelimit_rls.transport.answers.subject import refusing
from ratelimit_rls.transport.answers.telling import Telling
from ratelimit_rls.transport.answers.words import moment, seconds, used, window

LONGEST_REQUEST_ID = 128
"""Characters of a caller's own that a body repeats."""

_PROBLEM_TYPES = "https://iana.org/assignments/http-problem-types#"


class Body(NamedTuple):
    content_type: str
    content: bytes


def body(deny: Deny, telling: Telling, request_id: str = "") -> Body | None:
    match deny.format:
        case None:
            return None
        case BodyFormat.JSON:
            made = Body("application/json", _dumped(_json(deny, telling, request_id)))
        case BodyFormat.PROBLEM:
            made = Body("application/problem+json", _dumped(_problem(deny, telling)))
        case BodyFormat.TEXT:
            made = Body("text/plain; charset=utf-8", _text(deny, telling))
    return made._replace(content_type=deny.content_type) if deny.content_type else made


def values(telling: Telling) -> dict[Hole, str]:
    """What stands in the holes of templates."""
    limit = telling.step.limit
    return {
        Hole.DOMAIN: telling.decision.outline.domain,
        Hole.RULE: telling.path,
        Hole.NAME: limit.name or window(limit),
        Hole.LIMIT: str(limit.requests_per_unit),
        Hole.WINDOW: window(limit),
        Hole.RETRY_AFTER: str(telling.retry_after_s),
        Hole.RESET_AFTER: str(seconds(telling.until_us)),
        Hole.RESET_AT: moment(telling.reset_at_us),
        Hole.NOW: _now(telling),
    }


def _json(deny: Deny, telling: Telling, request_id: str) -> dict[str, Any]:
    slot = telling.status.slot
    keys = [label.lower().replace("-", "_") for label in telling.vocabulary.labels(slot)]
    limits = zip(keys, slot.steps, telling.status.readings, strict=True)
    body: dict[str, Any] = {
        "error": {
            "code": deny.status,
            "message": f"Rate limit exceeded: {_reason(telling)}",
            "details": {
                "limit_type": keys[slot.steps.index(telling.step)],
                **{f"{key}_used": used(step.limit, reading) for key, step, reading in limits},
                "reset_at": moment(telling.reset_at_us),
                "retry_after": telling.retry_after_s,
            },
        },
        "timestamp": _now(telling),
    }
    if request_id:
        body["request_id"] = request_id[:LONGEST_REQUEST_ID]
    return body


def _problem(deny: Deny, telling: Telling) -> dict[str, Any]:
    """The two problem types of draft-11 that a refusal can be, with their registered titles."""
    cooldown = telling.status.cooldown is not None
    names = telling.vocabulary.policies.names
    wait_s = telling.retry_after_s
    return {
        "type": _PROBLEM_TYPES + ("abnormal-usage-detected" if cooldown else "quota-exceeded"),
        "title": "Abnormal Usage Detected" if cooldown else "Quota Exceeded",
        "status": deny.status,
        "detail": f"Rate limit exceeded: {_reason(telling)}. Retry in {wait_s} second{'s' if wait_s > 1 else ''}.",
        "violated-policies": [names[id(step)] for step, _ in refusing(telling.blamed)],
    }


def _text(deny: Deny, telling: Telling) -> bytes:
    assert deny.body is not None, "a text body has a template"
    return deny.body.render(values(telling), _escape(deny.content_type)).encode(errors="replace")


def _escape(content_type: str) -> Callable[[str], str]:
    """What makes a value harmless where it stands: a rule's path may hold any character."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type.endswith(("/json", "+json")):
        return lambda text: json.dumps(text)[1:-1]
    if media_type.endswith(("/html", "/xml", "+xml")):
        return html.escape
    return str


def _reason(telling: Telling) -> str:
    if telling.status.cooldown is not None:
        return "too many violations"
    limit = telling.step.limit
    unit = limit.unit.name.lower()
    return f"{unit if limit.unit_multiplier == 1 else f'{limit.unit_multiplier}-{unit}'} limit reached"


def _now(telling: Telling) -> str:
    now_us = telling.decision.now_us
    return moment(now_us - now_us % 1_000_000)


def _dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
