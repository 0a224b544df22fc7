"""`deny` to what a refusal says besides the verdict."""

from __future__ import annotations

import re

from ratelimit_rls.core.style import BodyFormat, Deny
from ratelimit_rls.core.template import Template
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.fields import Fields
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.headers import TOKEN_CHARACTERS, compile_headers, compile_template
from ratelimit_rls.rules.node import YamlNode, YamlScalar, excerpt
from ratelimit_rls.rules.written import Written

DENY_KEYS = ("format", "body", "content_type", "headers", "status")

_FORMATS = {form.value: form for form in (BodyFormat.JSON, BodyFormat.PROBLEM)}
_PARAMETER = rf'{TOKEN_CHARACTERS}=({TOKEN_CHARACTERS}|"[ !#-\[\]-~]*")'
_MEDIA_TYPE = re.compile(rf"{TOKEN_CHARACTERS}/{TOKEN_CHARACTERS}( *; *{_PARAMETER})*")
_PLAIN_TEXT = "text/plain; charset=utf-8"
_STATUS = Deny().status


def compile_deny(written: Written[YamlNode] | None, found: Findings) -> Deny | None:
    """None without one."""
    if written is None:
        return None
    fields = Fields(written.value, DENY_KEYS, found)
    form, body = _format(fields, found), _body(fields, found)
    return Deny(
        format=form if body is None else BodyFormat.TEXT,
        body=body,
        content_type=_content_type(fields, found),
        headers=compile_headers(fields.value("headers"), found),
        status=_status(fields, found),
    )


def _format(fields: Fields, found: Findings) -> BodyFormat | None:
    node = fields.value("format")
    if node is None:
        return None
    form = _FORMATS.get(node.text) if isinstance(node, YamlScalar) else None
    if form is None:
        found.error(node, offences.unknown_format(excerpt(node), _FORMATS))
    elif fields.has("body"):
        found.error(node, offences.format_beside_body())
    return form


def _body(fields: Fields, found: Findings) -> Template | None:
    node = fields.value("body")
    if node is None:
        return None
    if not isinstance(node, YamlScalar):
        found.error(node, offences.not_a_template("body", excerpt(node)))
        return None
    if len(node.text.encode()) > offences.LONGEST_BODY:
        found.error(node, offences.body_too_long())
        return None
    return compile_template(node, "body", found)


def _content_type(fields: Fields, found: Findings) -> str:
    text, node = fields.text("content_type"), fields.value("content_type")
    if text is None or node is None:
        return _PLAIN_TEXT if fields.has("body") else ""
    if not fields.has("body"):
        found.error(node, offences.content_type_without_body())
    elif not _MEDIA_TYPE.fullmatch(text):
        found.error(node, offences.bad_content_type(text))
    return text


def _status(fields: Fields, found: Findings) -> int:
    node = fields.value("status")
    if node is None:
        return _STATUS
    if isinstance(node, YamlScalar) and isinstance(node.value, int) and 400 <= node.value <= 599:
        return node.value
    found.error(node, offences.bad_status(excerpt(node)))
    return _STATUS
