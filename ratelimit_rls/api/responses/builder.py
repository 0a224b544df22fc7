"""ResponseBuilder: headers, body and dynamic metadata of the response to a decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from ratelimit_rls.api.responses.bodies import deny_body, placeholder_values
from ratelimit_rls.api.responses.formatting import printable, seconds
from ratelimit_rls.api.responses.headers import HeaderLine, header_families, state_header
from ratelimit_rls.api.responses.limit_labels import limit_labels
from ratelimit_rls.api.responses.options import ResponseOptions
from ratelimit_rls.api.responses.response_context import ResponseContext
from ratelimit_rls.api.responses.rule_metadata import describe_rule
from ratelimit_rls.api.responses.status_selection import denying_statuses, reported_status, retry_after_s
from ratelimit_rls.core.model import Code, Decision
from ratelimit_rls.core.response_policy import DenyResponse, HeaderFamily
from ratelimit_rls.core.template import Placeholder

OK_STATUS, DENIED_STATUS = 200, 429


class ResponseParts(NamedTuple):
    """Headers, body and HTTP status of a response."""

    headers: tuple[HeaderLine, ...]
    body: bytes  # empty unless the call is denied
    status: int  # HTTP status, for APIs that can set it


class ResponseBuilder:
    """Builds responses according to the rules and the operator's options."""

    def __init__(self, options: ResponseOptions, draw: Callable[[int], int] = random.randrange) -> None:
        """`draw(n)` returns a random number from 0 to n - 1."""
        self._families = header_families(options)
        self._default = (HeaderFamily.REFERENCE,) if options.headers_enabled else ()
        self._draw = draw

    def build(self, decision: Decision, request_id: str = "") -> ResponseParts:
        """Return headers, body and status. `request_id` is the client's, for bodies that repeat it."""
        context = self._context(decision)
        if context is None:  # no limit applied, so none can have denied the call
            return ResponseParts((), b"", OK_STATUS)
        headers = self._headers(context)
        if decision.code is not Code.OVER_LIMIT:
            return ResponseParts(tuple(headers), b"", OK_STATUS)
        deny = context.rule.deny
        return (
            ResponseParts(tuple(headers), b"", DENIED_STATUS)
            if deny is None
            else _apply_deny_policy(deny, context, headers, request_id)
        )

    def rule_metadata(self, decision: Decision) -> dict[str, Any]:
        """Return dynamic metadata: `{"rule": {"path": …, "window": …}}`, with `limit`, `retry_after`, … if present."""
        return describe_rule(decision)

    def placeholder_values(self, decision: Decision) -> dict[Placeholder, str] | None:
        """Return the values of template placeholders, or None if no limit applied."""
        context = self._context(decision)
        return None if context is None else placeholder_values(context)

    def _context(self, decision: Decision) -> ResponseContext | None:
        denying = denying_statuses(decision)
        status = reported_status(decision, denying)
        if status is None or status.step is None or status.descriptor_plan.rule is None:
            return None
        rule = status.descriptor_plan.rule
        retry_s = 0
        if decision.code is Code.OVER_LIMIT:
            retry_s = retry_after_s(denying)
            if rule.response_policy.retry_jitter_us:
                retry_s += self._draw(seconds(rule.response_policy.retry_jitter_us) + 1)
        return ResponseContext(decision, status, status.step, rule, denying, retry_s, limit_labels(decision.template))

    def _headers(self, context: ResponseContext) -> list[HeaderLine]:
        chosen = context.rule.response_policy.headers
        headers = [
            header
            for family in (self._default if chosen is None else chosen)
            for header in self._families[family](context)
        ]
        headers.extend(state_header(context.status))
        return headers


def _apply_deny_policy(
    deny: DenyResponse, context: ResponseContext, headers: list[HeaderLine], request_id: str
) -> ResponseParts:
    body = deny_body(deny, context, request_id)
    if body is not None:
        headers.append(("Content-Type", printable(body.content_type)))
    if deny.headers:
        values = placeholder_values(context)
        own_headers = [(name, printable(template.render(values))) for name, template in deny.headers]
        # A header of the rule's own replaces a header of the same name.
        names = {name.lower() for name, _ in own_headers}
        headers = [header for header in headers if header[0].lower() not in names] + own_headers
    return ResponseParts(tuple(headers), body.content if body is not None else b"", deny.status)
