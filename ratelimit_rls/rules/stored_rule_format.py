"""File format of stored rules, lossless in both directions.

    # ratelimit-rls: {"name": "free_tier", "priority": 50, "targeting": {"tiers": ["free"], "scope": "user"}}
    domain: edge
    rate_limit: {unit: minute, requests_per_unit: 5}    # the document as it was stored, including comments

Everything but the document is in the first line, the header, which is a comment to any reader of rules. A file without
a header is the document of a rule named like the file, with defaults for all other fields. Several rules in one file
are separated by `---`, and each but the first needs a header.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

from ratelimit_rls.core.names import MAX_ID_LENGTH
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.source_document import LAST_RANK
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting
from ratelimit_rls.yaml.messages import unknown_key
from ratelimit_rls.yaml.multi_document import LINE_BREAKS, split_documents

FILE_SUFFIX = ".yaml"
MAX_FILE_NAME_LENGTH = 120
"""Characters of a file name derived from a rule's name: file systems allow 255 bytes."""

_HEADER = "# ratelimit-rls: "
_BOM = "\ufeff"
_KEYS = ("name", "priority", "enabled", "targeting")
_LISTS = ("tiers", "endpoints", "methods", "cidrs")

_SEPARATOR_LINE = "---\n"
_SEPARATOR_AFTER_NO_NEWLINE = "--- # the line above has no end\n"
"""Separator after a document without a final line break: one was added there."""

_SEPARATOR = re.compile(rf"---[ \t]*(#[^{LINE_BREAKS}]*)?(?:\r\n|[{LINE_BREAKS}]|\Z)")


class _Location(NamedTuple):
    file: str
    line: int


class ParsedRule(NamedTuple):
    """A rule parsed from a file, without an id."""

    rule: StoredRule
    text: str  # including the header
    line: int  # line number of the header in the file


def format_rule(rule: StoredRule) -> str:
    fields: dict[str, Any] = {"name": rule.name}
    default = StoredRule("", "", "")
    if rule.priority != default.priority:
        fields["priority"] = rule.priority
    if not rule.enabled:
        fields["enabled"] = False
    if rule.targeting:
        fields["targeting"] = targeting_to_json(rule.targeting)
    # A byte order mark must not end up on the second line.
    return f"{_HEADER}{json.dumps(fields)}\n{rule.document.removeprefix(_BOM)}"


def format_rules(rules: Iterable[StoredRule]) -> str:
    """Format several rules as one file, which `parse_rules` reads back unchanged."""
    texts = [format_rule(rule) for rule in rules]
    ended = [
        text + _SEPARATOR_LINE if text.endswith("\n") else f"{text}\n{_SEPARATOR_AFTER_NO_NEWLINE}"
        for text in texts[:-1]
    ]
    return "".join([*ended, *texts[-1:]])


def parse_rules(text: str, name: str, file: str) -> list[ParsedRule]:
    """Parse the rules of a file, in order. `name` is the default name of the first rule.

    Raise RulesError with all errors outside of the rules' documents.
    """
    found: list[ParsedRule] = []
    problems: list[Problem] = []
    for number, (line, whole) in enumerate(_split(text, problems, file)):
        try:
            found.append(ParsedRule(parse_rule(whole, "" if number else name, file, line), whole, line))
        except RulesError as error:
            problems += error.problems
    if problems:
        raise RulesError(problems)
    return found


def _split(text: str, problems: list[Problem], file: str) -> Iterator[tuple[int, str]]:
    """Yield each rule with its first line number.

    A rule starts after a `---` that is followed by a header. A `---` without a header belongs to the document, at its
    beginning or end. Where it would separate two documents, a header is missing.
    """
    begins, line, has_content = 0, 1, False
    for part in split_documents(text):
        separator = _SEPARATOR.match(text, part.start) if part.mark == "---" else None
        if separator and text.startswith(_HEADER, separator.end()):
            if text.startswith(_HEADER, begins) or has_content:
                is_unended = separator[0].rstrip() == _SEPARATOR_AFTER_NO_NEWLINE.rstrip()
                whole = text[begins : part.start]
                yield line, whole.removesuffix("\n") if is_unended else whole
            begins, line, has_content = separator.end(), part.line + 1, part.has_content
        elif part.mark == "---" and part.has_content and has_content:
            problems.append(Problem(file, part.line, 1, diagnostics.unnamed_rule(_HEADER)))
        has_content = has_content or part.has_content
    yield line, text[begins:]


def parse_rule(text: str, name: str, file: str, line: int = 1) -> StoredRule:
    """Parse one rule that starts at this line of a file; `name` is its default name. Raise RulesError."""
    at = _Location(file, line)
    first, _, rest = text.partition("\n")
    if not first.startswith(_HEADER):
        return StoredRule("", _name(name, at, 1), text)
    try:
        fields = json.loads(first.removeprefix(_HEADER))
    except json.JSONDecodeError as error:
        _reject(at, len(_HEADER) + error.pos + 1, f"what follows '{_HEADER.strip()}' is not JSON: {error.msg}")
    except RecursionError:
        _reject(at, len(_HEADER) + 1, f"what follows '{_HEADER.strip()}' is not JSON: nested too deep")
    column = len(_HEADER) + 1
    if not isinstance(fields, dict):
        _reject(at, column, 'must be a mapping, e.g. {"name": "free_tier", "priority": 50}')
    for key in fields:
        if key not in _KEYS:
            _reject(at, column, unknown_key(key, _KEYS))
    default = StoredRule("", "", "")
    priority = fields.get("priority", default.priority)
    enabled = fields.get("enabled", default.enabled)
    if not isinstance(priority, int) or isinstance(priority, bool) or not -LAST_RANK <= priority < LAST_RANK:
        _reject(at, column, f"'priority' is a whole number from {-LAST_RANK} to {LAST_RANK - 1}")
    if not isinstance(enabled, bool):
        _reject(at, column, "'enabled' is true or false")
    targeting = _targeting(fields.get("targeting", {}), at, column)
    return StoredRule("", _name(fields.get("name", name), at, column), rest, priority, enabled, targeting)


def targeting_to_json(targeting: Targeting) -> dict[str, Any]:
    """Return the targeting as JSON values, omitting empty fields."""
    fields: dict[str, Any] = {key: list(getattr(targeting, key)) for key in _LISTS if getattr(targeting, key)}
    return {**fields, "scope": targeting.scope.value} if targeting.scope else fields


def file_name(rule_name: str) -> str:
    """Return a file name for a rule's name: unique, valid on every file system, and read back as rules."""
    safe = quote(rule_name, safe=" ", errors="surrogatepass")
    for first, last in ((".", ""), ("", ".test")):  # hidden files and tests are not read as rules
        if safe.startswith(first) and safe.endswith(last):
            safe = f"%2E{safe[1:]}" if first else f"{safe.removesuffix(last)}%2Etest"
    if len(safe) > MAX_FILE_NAME_LENGTH or rule_name != rule_name.lower():  # some file systems are case-insensitive
        digest = hashlib.sha256(rule_name.encode(errors="surrogatepass")).hexdigest()[:12]
        safe = f"{safe[: MAX_FILE_NAME_LENGTH - 13]}-{digest}"
    return safe + FILE_SUFFIX


def _targeting(fields: object, at: _Location, column: int) -> Targeting:
    if not isinstance(fields, dict):
        _reject(at, column, "'targeting' is a mapping")
    for key in fields:
        if key not in (*_LISTS, "scope"):
            _reject(at, column, f"targeting: {unknown_key(key, (*_LISTS, 'scope'))}")
    lists: dict[str, tuple[str, ...]] = {}
    for key in _LISTS:
        texts = fields.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            _reject(at, column, f"'targeting.{key}' is a list of texts")
        lists[key] = tuple(texts)
    scope = fields.get("scope")
    known = {one.value: one for one in CounterScope}
    if scope is not None and str(scope) not in known:
        _reject(at, column, f"targeting: {diagnostics.unknown_choice('scope', str(scope), known)}")
    return Targeting(**lists, scope=None if scope is None else known[str(scope)])


def _name(name: object, at: _Location, column: int) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_LENGTH or not name.isprintable():
        _reject(at, column, f"the name of a rule has 1 to {MAX_ID_LENGTH} characters that can be printed")
    return name


def _reject(at: _Location, column: int, message: str) -> NoReturn:
    raise RulesError([Problem(at.file, at.line, column, message)])
