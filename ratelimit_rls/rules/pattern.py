"""Compile `match` to a pattern. Everything is validated here, so that matching a request cannot fail."""

from __future__ import annotations

import re2

from ratelimit_rls.core.pattern import Pattern, PatternKind, parse_network
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.document import DescriptorDocument
from ratelimit_rls.yaml.findings import Findings

MAX_REGEX_MEMORY_BYTES = 8 * 2**20
"""Memory for one compiled expression and its states; RE2 rejects expressions that need more."""

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = MAX_REGEX_MEMORY_BYTES


def compile_pattern(document: DescriptorDocument, found: Findings) -> Pattern | None:
    """Return the compiled pattern; None if `match` is absent or invalid."""
    match = document.match
    if match is None:
        return None
    if document.value is not None and document.value.value:
        found.error(match.position, diagnostics.value_beside_match())
    if len(match.patterns) != 1:
        if not match.is_broken:
            found.error(match.position, diagnostics.not_one_match_kind(kind for kind, _ in match.patterns))
        return None
    ((kind, written),) = match.patterns
    text = written.value
    if kind == "cidr":
        try:
            return Pattern(PatternKind.CIDR, text, parse_network(text))
        except ValueError as error:
            found.error(written.position, diagnostics.bad_cidr(text, str(error)))
    elif kind == "prefix":
        if text:
            return Pattern(PatternKind.PREFIX, text, text)
        found.error(written.position, diagnostics.empty_prefix())
    elif not text:
        found.error(written.position, diagnostics.empty_regex())
    else:
        try:
            return Pattern(PatternKind.REGEX, text, re2.compile(text, _OPTIONS))
        except re2.error as error:
            found.error(written.position, diagnostics.bad_regex(text, _error_text(error)))
    return None


def _error_text(error: re2.error) -> str:
    (reason,) = error.args
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
