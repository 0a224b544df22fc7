"""A stored rule as a file, and back, without loss.

    # ratelimit-rls: {"name": "free_tier", "priority": 50, "targeting": {"tiers": ["free"], "scope": "user"}}
    domain: edge
    rate_limit: {unit: minute, requests_per_unit: 5}    # the document, comments and all, as it was stored

Everything but the document is in the first line, which to any reader of rules is a comment. A file without such a line
is the document of a rule that is called like the file, and has nothing else to say. Several rules in one file are
parted by `---`, and each but the first needs such a line of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

from ratelimit_rls.core.accounts import LONGEST_ID, Scope, StoredRule, Targeting
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.load import LAST_RANK
from ratelimit_rls.rules.parts import BREAKS, parts

ENDING = ".yaml"
LONGEST_FILE_NAME = 120
"""Of what is made of a rule's name: file systems take 255 bytes."""

_HEADER = "# ratelimit-rls: "
_BOM = "\ufeff"
_KEYS = ("name", "priority", "enabled", "targeting")
_LISTS = ("tiers", "endpoints", "methods", "cidrs")

_PARTED = "---\n"
_PARTED_UNENDED = "--- # the line above has no end\n"
"""Between two rules, where the document of the first does not end with a line break: one was put there."""

_SEPARATOR = re.compile(rf"---[ \t]*(#[^{BREAKS}]*)?(?:\r\n|[{BREAKS}]|\Z)")


class _At(NamedTuple):
    file: str
    line: int


class WrittenRule(NamedTuple):
    """A rule as it stands in a file, without an id."""

    rule: StoredRule
    text: str  # with its first line
    line: int  # the number of that in the file


def text_of(rule: StoredRule) -> str:
    fields: dict[str, Any] = {"name": rule.name}
    default = StoredRule("", "", "")
    if rule.priority != default.priority:
        fields["priority"] = rule.priority
    if not rule.enabled:
        fields["enabled"] = False
    if rule.targeting:
        fields["targeting"] = targeting_fields(rule.targeting)
    return f"{_HEADER}{json.dumps(fields)}\n{rule.document.removeprefix(_BOM)}"  # no BOM belongs on a second line


def joined(rules: Iterable[StoredRule]) -> str:
    """All of them as one file, which `rules_of` has again as they were."""
    texts = [text_of(rule) for rule in rules]
    ended = [text + _PARTED if text.endswith("\n") else f"{text}\n{_PARTED_UNENDED}" for text in texts[:-1]]
    return "".join([*ended, *texts[-1:]])


def rules_of(text: str, name: str, file: str) -> list[WrittenRule]:
    """Those of a file, one after the other; `name` is for the first, should it have none of its own.

    Raises RulesError with all that is wrong with what is not in their documents.
    """
    found: list[WrittenRule] = []
    problems: list[Problem] = []
    for number, (line, whole) in enumerate(_written(text, problems, file)):
        try:
            found.append(WrittenRule(rule_of(whole, "" if number else name, file, line), whole, line))
        except RulesError as refused:
            problems += refused.problems
    if problems:
        raise RulesError(problems)
    return found


def _written(text: str, problems: list[Problem], file: str) -> Iterator[tuple[int, str]]:
    """Each rule with the number of its first line.

    Another one begins behind a `---` that is followed by a first line. One that is not is a part of the document, which
    may begin or end with it; where it would part two documents, there is a rule that nobody named.
    """
    begins, line, has_content = 0, 1, False
    for part in parts(text):
        separator = _SEPARATOR.match(text, part.start) if part.mark == "---" else None
        if separator and text.startswith(_HEADER, separator.end()):
            if text.startswith(_HEADER, begins) or has_content:
                is_unended = separator[0].rstrip() == _PARTED_UNENDED.rstrip()
                whole = text[begins : part.start]
                yield line, whole.removesuffix("\n") if is_unended else whole
            begins, line, has_content = separator.end(), part.line + 1, part.has_content
        elif part.mark == "---" and part.has_content and has_content:
            problems.append(Problem(file, part.line, 1, offences.nameless_rule(_HEADER)))
        has_content = has_content or part.has_content
    yield line, text[begins:]


def rule_of(text: str, name: str, file: str, line: int = 1) -> StoredRule:
    """The rule that begins at this line of a file; `name` where it has none of its own. Raises RulesError."""
    at = _At(file, line)
    first, _, rest = text.partition("\n")
    if not first.startswith(_HEADER):
        return StoredRule("", _name(name, at, 1), text)
    try:
        fields = json.loads(first.removeprefix(_HEADER))
    except json.JSONDecodeError as fault:
        _refuse(at, len(_HEADER) + fault.pos + 1, f"what follows '{_HEADER.strip()}' is not JSON: {fault.msg}")
    except RecursionError:
        _refuse(at, len(_HEADER) + 1, f"what follows '{_HEADER.strip()}' is not JSON: it is nested too deep")
    column = len(_HEADER) + 1
    if not isinstance(fields, dict):
        _refuse(at, column, 'it is a mapping, e.g. {"name": "free_tier", "priority": 50}')
    for key in fields:
        if key not in _KEYS:
            _refuse(at, column, offences.unknown_key(key, _KEYS, ()))
    default = StoredRule("", "", "")
    priority = fields.get("priority", default.priority)
    enabled = fields.get("enabled", default.enabled)
    if not isinstance(priority, int) or isinstance(priority, bool) or not -LAST_RANK <= priority < LAST_RANK:
        _refuse(at, column, f"'priority' is a whole number from {-LAST_RANK} to {LAST_RANK - 1}")
    if not isinstance(enabled, bool):
        _refuse(at, column, "'enabled' is true or false")
    targeting = _targeting(fields.get("targeting", {}), at, column)
    return StoredRule("", _name(fields.get("name", name), at, column), rest, priority, enabled, targeting)


def targeting_fields(targeting: Targeting) -> dict[str, Any]:
    """As JSON says it, without what is not said."""
    fields: dict[str, Any] = {key: list(getattr(targeting, key)) for key in _LISTS if getattr(targeting, key)}
    return {**fields, "scope": targeting.scope.value} if targeting.scope else fields


def file_name(rule_name: str) -> str:
    """One for each name that no other has, that every file system takes, and that is read back as rules."""
    safe = quote(rule_name, safe=" ", errors="surrogatepass")
    for first, last in ((".", ""), ("", ".test")):  # hidden files and tests are no rules
        if safe.startswith(first) and safe.endswith(last):
            safe = f"%2E{safe[1:]}" if first else f"{safe.removesuffix(last)}%2Etest"
    if len(safe) > LONGEST_FILE_NAME or rule_name != rule_name.lower():  # some file systems do not tell A from a
        told = hashlib.sha256(rule_name.encode(errors="surrogatepass")).hexdigest()[:12]
        safe = f"{safe[: LONGEST_FILE_NAME - 13]}-{told}"
    return safe + ENDING


def _targeting(fields: object, at: _At, column: int) -> Targeting:
    if not isinstance(fields, dict):
        _refuse(at, column, "'targeting' is a mapping")
    for key in fields:
        if key not in (*_LISTS, "scope"):
            _refuse(at, column, f"targeting: {offences.unknown_key(key, (*_LISTS, 'scope'), ())}")
    lists: dict[str, tuple[str, ...]] = {}
    for key in _LISTS:
        texts = fields.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            _refuse(at, column, f"'targeting.{key}' is a list of texts")
        lists[key] = tuple(texts)
    scope = fields.get("scope")
    known = {one.value: one for one in Scope}
    if scope is not None and str(scope) not in known:
        _refuse(at, column, f"targeting: {offences.unknown_word('scope', str(scope), known)}")
    return Targeting(**lists, scope=None if scope is None else known[str(scope)])


def _name(name: object, at: _At, column: int) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_ID or not name.isprintable():
        _refuse(at, column, f"the name of a rule has 1 to {LONGEST_ID} characters that can be printed")
    return name


def _refuse(at: _At, column: int, message: str) -> NoReturn:
    raise RulesError([Problem(at.file, at.line, column, message)])
