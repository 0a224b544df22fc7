"""Compile the form of responses: `answer` (header families), `deny` (body and status of a denial), custom headers."""

from __future__ import annotations

import re

from ratelimit_rls.core.duration import duration_parser
from ratelimit_rls.core.response_policy import BodyFormat, DenyResponse, HeaderFamily, ResponsePolicy
from ratelimit_rls.core.template import Template
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.positioned_fields import Positioned
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlMap, YamlNode, YamlScalar, excerpt, is_null
from ratelimit_rls.yaml.strict_mapping import StrictMapping

ANSWER_KEYS = ("headers", "retry_jitter")
DENY_KEYS = ("format", "body", "content_type", "headers", "status")

TOKEN_CHARACTERS = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - of RFC 9110, 5.6.2; no password

_JITTER = duration_parser(0, 3_600_000_000)
_FAMILIES = {family.value: family for family in HeaderFamily}
_FORMATS = {form.value: form for form in (BodyFormat.JSON, BodyFormat.PROBLEM)}
_PARAMETER = rf'{TOKEN_CHARACTERS}=({TOKEN_CHARACTERS}|"[ !#-\[\]-~]*")'
_MEDIA_TYPE = re.compile(rf"{TOKEN_CHARACTERS}/{TOKEN_CHARACTERS}( *; *{_PARAMETER})*")
_PLAIN_TEXT = "text/plain; charset=utf-8"
_STATUS = DenyResponse().status
_NAME = re.compile(TOKEN_CHARACTERS)
_CONNECTION_HEADERS = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
_MESSAGE_HEADERS = frozenset({"host", "content-length"})  # set by the sender


def compile_response_policy(written: Positioned[YamlNode] | None, found: Findings) -> ResponsePolicy | None:
    """Return the compiled policy; None if `answer` is absent."""
    if written is None:
        return None
    fields = StrictMapping(written.value, ANSWER_KEYS, found)
    headers = _families(fields, found) if fields.has("headers") else None
    return ResponsePolicy(headers, fields.read("retry_jitter", _JITTER) or 0)


def _families(fields: StrictMapping, found: Findings) -> tuple[HeaderFamily, ...]:
    families: list[HeaderFamily] = []
    # There are len(_FAMILIES) valid elements, so one more is enough to report an error, even in a list of a hundred
    # thousand.
    for item in fields.items("headers")[: len(_FAMILIES) + 1]:
        family = _FAMILIES.get(item.text) if isinstance(item, YamlScalar) else None
        if family is None:
            found.error(item, diagnostics.unknown_family(excerpt(item), _FAMILIES))
        elif family in families:
            found.error(item, diagnostics.family_twice(family))
        else:
            if {family, *families} >= {HeaderFamily.LEGACY, HeaderFamily.LEGACY_EPOCH}:
                found.error(item, diagnostics.conflicting_reset_headers())
            families.append(family)
    return tuple(families)


def compile_deny(written: Positioned[YamlNode] | None, found: Findings) -> DenyResponse | None:
    """Return the compiled response; None if `deny` is absent."""
    if written is None:
        return None
    fields = StrictMapping(written.value, DENY_KEYS, found)
    form, body = _format(fields, found), _body(fields, found)
    return DenyResponse(
        format=form if body is None else BodyFormat.TEXT,
        body=body,
        content_type=_content_type(fields, found),
        headers=compile_headers(fields.value("headers"), found),
        status=_status(fields, found),
    )


def _format(fields: StrictMapping, found: Findings) -> BodyFormat | None:
    node = fields.value("format")
    if node is None:
        return None
    form = _FORMATS.get(node.text) if isinstance(node, YamlScalar) else None
    if form is None:
        found.error(node, diagnostics.unknown_format(excerpt(node), _FORMATS))
    elif fields.has("body"):
        found.error(node, diagnostics.format_beside_body())
    return form


def _body(fields: StrictMapping, found: Findings) -> Template | None:
    node = fields.value("body")
    if node is None:
        return None
    if not isinstance(node, YamlScalar):
        found.error(node, diagnostics.not_a_template("body", excerpt(node)))
        return None
    if len(node.text.encode()) > diagnostics.MAX_BODY_BYTES:
        found.error(node, diagnostics.body_too_long())
        return None
    return compile_template(node, "body", found)


def _content_type(fields: StrictMapping, found: Findings) -> str:
    text, node = fields.text("content_type"), fields.value("content_type")
    if text is None or node is None:
        return _PLAIN_TEXT if fields.has("body") else ""
    if not fields.has("body"):
        found.error(node, diagnostics.content_type_without_body())
    elif not _MEDIA_TYPE.fullmatch(text):
        found.error(node, diagnostics.bad_content_type(text))
    return text


def _status(fields: StrictMapping, found: Findings) -> int:
    node = fields.value("status")
    if node is None:
        return _STATUS
    if isinstance(node, YamlScalar) and isinstance(node.value, int) and 400 <= node.value <= 599:
        return node.value
    found.error(node, diagnostics.bad_status(excerpt(node)))
    return _STATUS


def compile_headers(node: YamlNode | None, found: Findings) -> tuple[tuple[str, Template], ...]:
    """Return the valid headers; report the others to `found`."""
    if node is None:
        return ()
    if not isinstance(node, YamlMap):
        found.error(node, diagnostics.headers_not_a_mapping(excerpt(node)))
        return ()
    headers: dict[str, tuple[str, Template]] = {}
    for key, value in node.fields():
        header = _header(key, value, found)
        if header is None:
            continue
        name = header[0].lower()
        if name in headers:
            found.error(key, diagnostics.header_twice(header[0]))
        headers[name] = header
    if len(headers) > diagnostics.MAX_HEADERS:
        found.error(node, diagnostics.too_many_headers(len(headers)))
    return tuple(headers.values())


def _header(key: YamlNode, value: YamlNode, found: Findings) -> tuple[str, Template] | None:
    name = key.text if isinstance(key, YamlScalar) else ""
    if not _NAME.fullmatch(name):
        found.error(key, diagnostics.bad_header_name(excerpt(key)))
        return None
    if name.lower() == "content-type":
        found.error(key, diagnostics.content_type_among_headers())
    elif name.lower() in _CONNECTION_HEADERS | _MESSAGE_HEADERS:
        found.error(key, diagnostics.reserved_header(name))
    what = f"header '{excerpt(key)}'"
    if not isinstance(value, YamlScalar) or is_null(value):
        found.error(value, diagnostics.not_a_template(what, excerpt(value)))
        return None
    if not value.text.isprintable() or value.text != value.text.strip():
        found.error(value, diagnostics.bad_header_text(what))
    if len(value.text.encode()) > diagnostics.MAX_HEADER_BYTES:
        found.error(value, diagnostics.header_too_long(what))
        return None
    template = compile_template(value, what, found)
    return None if template is None else (name, template)


def compile_template(node: YamlScalar, what: str, found: Findings) -> Template | None:
    """Return the parsed template; None after an error."""
    try:
        return Template.parse(node.text)
    except ValueError as error:
        found.error(node, diagnostics.bad_template(what, str(error)))
        return None
