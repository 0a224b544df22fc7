"""`match` to the pattern it describes, checked here so that a request can never find it wanting."""

from __future__ import annotations

import re2

from ratelimit_rls.core.pattern import Pattern, Way, parse_network
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.document import DescriptorDocument
from ratelimit_rls.rules.grammar import Findings

MOST_REGEX_BYTES = 8 * 2**20
"""Of memory for one compiled expression and its states; RE2 refuses what would need more."""

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = MOST_REGEX_BYTES


def compile_pattern(document: DescriptorDocument, found: Findings) -> Pattern | None:
    """None without `match`, and after an error."""
    match = document.match
    if match is None:
        return None
    if document.value is not None and document.value.value:
        found.error(match.position, offences.value_beside_match())
    if len(match.ways) != 1:
        if not match.is_broken:
            found.error(match.position, offences.not_one_way(way for way, _ in match.ways))
        return None
    ((way, written),) = match.ways
    text = written.value
    if way == "cidr":
        try:
            return Pattern(Way.CIDR, text, parse_network(text))
        except ValueError as error:
            found.error(written.position, offences.bad_cidr(text, str(error)))
    elif way == "prefix":
        if text:
            return Pattern(Way.PREFIX, text, text)
        found.error(written.position, offences.empty_prefix())
    elif not text:
        found.error(written.position, offences.empty_regex())
    else:
        try:
            return Pattern(Way.REGEX, text, re2.compile(text, _OPTIONS))
        except re2.error as error:
            found.error(written.position, offences.bad_regex(text, _words(error)))
    return None


def _words(error: re2.error) -> str:
    (why,) = error.args
    return why.decode(errors="replace") if isinstance(why, bytes) else str(why)
