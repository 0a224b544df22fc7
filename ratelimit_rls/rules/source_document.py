"""Text of one source of rules, and its YAML document."""

from __future__ import annotations

from dataclasses import dataclass

from ratelimit_rls.core.model import Position
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.stored_rule import Targeting
from ratelimit_rls.yaml.multi_document import second_document_line
from ratelimit_rls.yaml.nodes import YamlNode
from ratelimit_rls.yaml.parser import MAX_DEPTH, NotYaml, Parser, TooDeep, decode, parse

MAX_BYTES = 16 * 2**20
"""Bytes of one file: sixty times the largest public configuration known to us, and parsed in seconds."""

LAST_RANK = 2**31
"""Rank of files and of xDS resources: after every priority of a stored rule."""


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """Text of one source: a rules file, read up to just beyond the size limit, or a stored rule."""

    name: str
    content: bytes
    rank: int = LAST_RANK  # lower ranks take precedence where two sources define the same descriptor
    targeting: Targeting | None = None  # of a stored rule, possibly empty; None for all other sources
    lines_above: int = 0  # lines before it in its file: positions are those in the file

    @property
    def is_stored(self) -> bool:
        return self.targeting is not None


def load(source: SourceDocument, parser: Parser | None = None) -> YamlNode | None:
    """Return the first document; None if there is none. Raise RulesError if it cannot be parsed.

    `parser` forces that parser; by default the fast reader is tried before the fastest parser.
    """
    if len(source.content) > MAX_BYTES:
        raise RulesError([Problem(source.name, source.lines_above + 1, 1, diagnostics.too_large(MAX_BYTES))])
    try:
        return parse(source.content, source.lines_above, parser)
    except NotYaml as error:
        is_too_deep = isinstance(error, TooDeep)
        message = diagnostics.too_deep(MAX_DEPTH) if is_too_deep else diagnostics.not_yaml(error.reason)
        raise RulesError([Problem(source.name, error.line, error.column, message)]) from error


def second_document(source: SourceDocument) -> Position | None:
    """Return the position of a second document, which `load` does not read; None if there is none or it is empty."""
    line = second_document_line(decode(source.content))
    return None if line is None else Position(source.name, source.lines_above + line, 1)
