"""Headers of our own making, a mapping of names to templates: nothing that HTTP has no place for gets through."""

from __future__ import annotations

import re

from ratelimit_rls.core.template import Template
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import YamlMap, YamlNode, YamlScalar, excerpt, is_null

TOKEN_CHARACTERS = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - of RFC 9110, 5.6.2; no password

_NAME = re.compile(TOKEN_CHARACTERS)
_OF_THE_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
_OF_THE_MESSAGE = frozenset({"host", "content-length"})  # whoever sends it knows them


def compile_headers(node: YamlNode | None, found: Findings) -> tuple[tuple[str, Template], ...]:
    """Those that can be used; what is wrong with the others goes to `found`."""
    if node is None:
        return ()
    if not isinstance(node, YamlMap):
        found.error(node, offences.headers_not_a_mapping(excerpt(node)))
        return ()
    headers: dict[str, tuple[str, Template]] = {}
    for key, value in node.fields():
        header = _header(key, value, found)
        if header is None:
            continue
        name = header[0].lower()
        if name in headers:
            found.error(key, offences.header_twice(header[0]))
        headers[name] = header
    if len(headers) > offences.MOST_HEADERS:
        found.error(node, offences.too_many_headers(len(headers)))
    return tuple(headers.values())


def _header(key: YamlNode, value: YamlNode, found: Findings) -> tuple[str, Template] | None:
    name = key.text if isinstance(key, YamlScalar) else ""
    if not _NAME.fullmatch(name):
        found.error(key, offences.bad_header_name(excerpt(key)))
        return None
    if name.lower() == "content-type":
        found.error(key, offences.content_type_among_headers())
    elif name.lower() in _OF_THE_CONNECTION | _OF_THE_MESSAGE:
        found.error(key, offences.header_not_ours(name))
    what = f"header '{excerpt(key)}'"
    if not isinstance(value, YamlScalar) or is_null(value):
        found.error(value, offences.not_a_template(what, excerpt(value)))
        return None
    if not value.text.isprintable() or value.text != value.text.strip():
        found.error(value, offences.bad_header_text(what))
    if len(value.text.encode()) > offences.LONGEST_HEADER:
        found.error(value, offences.header_too_long(what))
        return None
    template = compile_template(value, what, found)
    return None if template is None else (name, template)


def compile_template(node: YamlScalar, what: str, found: Findings) -> Template | None:
    """None after an error."""
    try:
        return Template.parse(node.text)
    except ValueError as error:
        found.error(node, offences.bad_template(what, str(error)))
        return None
