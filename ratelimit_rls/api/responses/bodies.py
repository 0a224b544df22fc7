"""Bodies of denied calls."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ratelimit_rls.api.responses.formatting import seconds, timestamp, used, window
from ratelimit_rls.api.responses.response_context import ResponseContext
from ratelimit_rls.api.responses.status_selection import denying_limits
from ratelimit_rls.core.response_policy import BodyFormat, DenyResponse
from ratelimit_rls.core.template import Placeholder

MAX_REQUEST_ID_LENGTH = 128
"""Characters of the client's request id that a body repeats."""

_PROBLEM_TYPES = "https://iana.org/assignments/http-problem-types#"


class Body(NamedTuple):
    """Body of a response with its content type."""

    content_type: str
    content: bytes


def deny_body(deny: DenyResponse, context: ResponseContext, request_id: str = "") -> Body | None:
    match deny.format:
        case None:
            return None
        case BodyFormat.JSON:
            body = Body("application/json", _dump(_json_body(deny, context, request_id)))
        case BodyFormat.PROBLEM:
            body = Body("application/problem+json", _dump(_problem_body(deny, context)))
        case BodyFormat.TEXT:
            body = Body("text/plain; charset=utf-8", _text_body(deny, context))
    return body._replace(content_type=deny.content_type) if deny.content_type else body


def placeholder_values(context: ResponseContext) -> dict[Placeholder, str]:
    """Return the values of all template placeholders."""
    limit = context.step.limit
    return {
        Placeholder.DOMAIN: context.decision.template.domain,
        Placeholder.RULE: context.path,
        Placeholder.NAME: limit.name or window(limit),
        Placeholder.LIMIT: str(limit.requests_per_unit),
        Placeholder.WINDOW: window(limit),
        Placeholder.RETRY_AFTER: str(context.retry_after_s),
        Placeholder.RESET_AFTER: str(seconds(context.until_us)),
        Placeholder.RESET_AT: timestamp(context.reset_at_us),
        Placeholder.NOW: _now(context),
    }


def _json_body(deny: DenyResponse, context: ResponseContext, request_id: str) -> dict[str, Any]:
    descriptor_plan = context.status.descriptor_plan
    keys = [label.lower().replace("-", "_") for label in context.limit_labels.labels(descriptor_plan)]
    limits = zip(keys, descriptor_plan.steps, context.status.readings, strict=True)
    body: dict[str, Any] = {
        "error": {
            "code": deny.status,
            "message": f"Rate limit exceeded: {_describe_limit(context)}",
            "details": {
                "limit_type": keys[descriptor_plan.steps.index(context.step)],
                **{f"{key}_used": used(step.limit, reading) for key, step, reading in limits},
                "reset_at": timestamp(context.reset_at_us),
                "retry_after": context.retry_after_s,
            },
        },
        "timestamp": _now(context),
    }
    if request_id:
        body["request_id"] = request_id[:MAX_REQUEST_ID_LENGTH]
    return body


def _problem_body(deny: DenyResponse, context: ResponseContext) -> dict[str, Any]:
    """Return a problem of one of the two types of draft-11 that fit a denial, with their registered titles."""
    cooldown = context.status.cooldown is not None
    names = context.limit_labels.policies.names
    wait_s = context.retry_after_s
    return {
        "type": _PROBLEM_TYPES + ("abnormal-usage-detected" if cooldown else "quota-exceeded"),
        "title": "Abnormal Usage Detected" if cooldown else "Quota Exceeded",
        "status": deny.status,
        "detail": f"Rate limit exceeded: {_describe_limit(context)}. "
        f"Retry in {wait_s} second{'s' if wait_s > 1 else ''}.",
        "violated-policies": [names[id(step)] for step, _ in denying_limits(context.denying)],
    }


def _text_body(deny: DenyResponse, context: ResponseContext) -> bytes:
    assert deny.body is not None, "a text body has a template"
    return deny.body.render(placeholder_values(context), _escape(deny.content_type)).encode(errors="replace")


def _escape(content_type: str) -> Callable[[str], str]:
    """Return the escape function for a content type: the path of a rule may contain any character."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type.endswith(("/json", "+json")):
        return lambda text: json.dumps(text)[1:-1]
    if media_type.endswith(("/html", "/xml", "+xml")):
        return html.escape
    return str


def _describe_limit(context: ResponseContext) -> str:
    if context.status.cooldown is not None:
        return "too many violations"
    limit = context.step.limit
    unit = limit.unit.name.lower()
    return f"{unit if limit.unit_multiplier == 1 else f'{limit.unit_multiplier}-{unit}'} limit reached"


def _now(context: ResponseContext) -> str:
    now_us = context.decision.now_us
    return timestamp(now_us - now_us % 1_000_000)


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
