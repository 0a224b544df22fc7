"""PROMETHEUS_MAPPER_YAML: mapping files of statsd_exporter from statsd names to Prometheus series.

Existing dashboards depend on the result for envoyproxy/ratelimit names, so files are read as statsd_exporter does:

    match      glob (the default): one * per part between dots; or match_type: regex, searched for anywhere (RE2)
    order      every glob before every regex; globs in the order of the file, or, with glob_disable_ordering, the most
               specific from left to right first; regexes in the order of the file
    $1, ${1}   in `name` and in labels: what the first * or group matched; empty for a group that does not exist
    no match   the name itself, with _ for every character that a Prometheus name cannot have

There are two differences. A file with an error is rejected, not ignored. And durations are always a histogram in our
buckets: summaries of several processes cannot be merged, and buckets are fixed before the file is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import re2
import yaml

from ratelimit_rls.errors import SettingsError, one_line
from ratelimit_rls.telemetry.instruments import INSTRUMENTS, InstrumentKind

MAX_FILE_BYTES = 2**20
MAX_CACHED_NAMES = 120_000
"""Names whose series are cached. There are at most ten for each path of metrics.py, and those are bounded."""

HELP = "Made from a statsd name by PROMETHEUS_MAPPER_YAML."

_KINDS = {
    "counter": InstrumentKind.COUNTER,
    "gauge": InstrumentKind.GAUGE,
    "observer": InstrumentKind.HISTOGRAM,
    "timer": InstrumentKind.HISTOGRAM,
}
_OBSERVERS = ("histogram", "summary", "")
_IGNORED_KEYS = ("ttl", "honor_labels", "buckets", "quantiles", "summary_options", "histogram_options")
_RULE_KEYS = (
    *("match", "match_type", "match_metric_type", "name", "labels", "help", "action", "scale"),
    *("observer_type", "timer_type", *_IGNORED_KEYS),
)
_DEFAULT_KEYS = ("match_type", "glob_disable_ordering", "observer_type", "timer_type", *_IGNORED_KEYS)

_GLOB = re.compile(r"(\*|[a-zA-Z_][a-zA-Z0-9_-]*)(\.(\*|[a-zA-Z0-9_][a-zA-Z0-9_-]*))*")
_NAME = re.compile(r"([a-zA-Z_]|\$\{?[0-9]+\}?)([a-zA-Z0-9_]|\$\{?[0-9]+\}?)*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_CAPTURE_REFERENCE = re.compile(r"\$(?:\$|\{([a-zA-Z0-9_]+)\}|([a-zA-Z0-9_]+))")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_PARSER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # both keep every scalar as the text in the file


class Target(NamedTuple):
    """The Prometheus series of a statsd name."""

    name: str
    kind: InstrumentKind
    about: str
    labels: tuple[tuple[str, str], ...]  # sorted, without empty ones, which are equivalent to absent ones
    scale: float  # factor of the value; a timer is in milliseconds


class _Template:
    """Text with references such as $1."""

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str]] = []  # pairs of literal text and the group after it
        at = 0
        for found in _CAPTURE_REFERENCE.finditer(text):
            group = found[1] or found[2] or ""
            self._parts.append((text[at : found.start()] + ("" if group else "$"), group))
            at = found.end()
        self._rest = text[at:]
        self.is_fixed = not self._parts

    def fill(self, groups: Mapping[str, str]) -> str:
        return "".join(before + groups.get(group, "") for before, group in self._parts) + self._rest


@dataclass(frozen=True, slots=True)
class _Rule:
    glob: tuple[str, ...]  # empty: a regular expression
    regex: Any
    kind: InstrumentKind | None  # None: any
    name: _Template
    labels: tuple[tuple[str, _Template], ...]
    about: str
    is_drop: bool
    scale: float | None

    def meet(self, name: str, parts: Sequence[str]) -> dict[str, str] | None:
        """Return the groups by number; None if the name does not match."""
        if self.glob:
            captured = []
            for mine, theirs in zip(self.glob, parts, strict=True):
                if mine == "*":
                    captured.append(theirs)
                elif mine != theirs:
                    return None
            return {str(number): text for number, text in enumerate(captured, 1)}
        found = self.regex.search(name)
        if found is None:
            return None
        groups = {str(number): text or "" for number, text in enumerate((found[0], *found.groups()))}
        return groups | {key: text or "" for key, text in found.groupdict().items()}


class StatsdMapping:
    def __init__(self, rules: Sequence[_Rule], warnings: Sequence[str], *, by_detail: bool) -> None:
        self.warnings = tuple(warnings)
        """Keys of the file that have no effect."""
        globs = [rule for rule in rules if rule.glob]
        if by_detail:
            globs.sort(key=lambda rule: tuple(part == "*" for part in rule.glob))
        self._globs: dict[int, list[_Rule]] = {}  # by number of parts
        for rule in globs:
            self._globs.setdefault(len(rule.glob), []).append(rule)
        self._regexes = [rule for rule in rules if not rule.glob]
        self.target: Callable[[str, InstrumentKind], Target | None] = lru_cache(MAX_CACHED_NAMES)(self._find)
        """Returns the series of a name; None if it is dropped, or exported under our own name without a mapping."""

    def _find(self, name: str, kind: InstrumentKind) -> Target | None:
        parts = name.split(".")
        for rule in (*self._globs.get(len(parts), ()), *self._regexes):
            if rule.kind in (None, kind) and (groups := rule.meet(name, parts)) is not None:
                return None if rule.is_drop else _target(rule, kind, groups)
        if name.startswith(("ratelimit.service.", "ratelimit_server.")):
            return Target(_escaped(name), kind, HELP, (), 1.0)
        return None


def _target(rule: _Rule, kind: InstrumentKind, groups: Mapping[str, str]) -> Target | None:
    labels = ((label, template.fill(groups)) for label, template in rule.labels)
    name = _escaped(rule.name.fill(groups))
    present = tuple(sorted((label, text) for label, text in labels if text))
    return Target(name, kind, rule.about or HELP, present, rule.scale or 1.0) if name else None


def _escaped(name: str) -> str:
    clean = _NOT_IN_NAMES.sub("_", name)
    return f"_{clean}" if clean[:1].isdigit() else clean


def read_statsd_mapping(path: Path) -> StatsdMapping:
    """Read a mapping file. Raises SettingsError with the file's name and all errors in it."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"PROMETHEUS_MAPPER_YAML={path}: {error.strerror or error}") from error
    try:
        if len(content) > MAX_FILE_BYTES:
            raise _MappingError([f"is larger than {MAX_FILE_BYTES} bytes"])
        return parse_statsd_mapping(content)
    except _MappingError as errors:
        sentences = (f"PROMETHEUS_MAPPER_YAML={path}: {one_line(sentence)}" for sentence in errors.sentences)
        raise SettingsError("\n".join(sentences)) from None


class _MappingError(ValueError):
    def __init__(self, sentences: Iterable[str]) -> None:
        self.sentences = tuple(sentences)
        super().__init__("\n".join(self.sentences))


def parse_statsd_mapping(content: bytes) -> StatsdMapping:
    """Parse a mapping. Raises ValueError with a sentence for every error."""
    try:
        document = yaml.load(content.decode(), _PARSER)  # noqa: S506 - these parsers create nothing but text
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise _MappingError([f"{where}is not YAML: {error.problem or error.context}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _MappingError([f"is not YAML: {error}"]) from None
    return _Reader().read(document if document not in (None, "") else {})


class _Reader:
    """Reads a mapping file, collecting all errors before it is rejected."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        self._ignored: dict[str, str] = {}  # key -> where it was first seen

    def read(self, document: Any) -> StatsdMapping:
        whole = self._keys("the file", document, ("defaults", "mappings"))
        defaults = self._keys("defaults", whole.get("defaults", {}), _DEFAULT_KEYS)
        self._note_ignored("defaults", defaults)
        self._observer("defaults", defaults)
        match_type = self._choice("defaults", defaults, "match_type", ("glob", "regex", "")) or "glob"
        by_detail = self._choice("defaults", defaults, "glob_disable_ordering", ("true", "false", "")) == "true"
        listed = whole.get("mappings") or []
        if not isinstance(listed, list):
            self._errors.append("mappings is not a list; write `- match: …` for each")
            listed = []
        rules = [self._rule(f"mappings[{number}]", rule, match_type) for number, rule in enumerate(listed)]
        if self._errors:
            raise _MappingError(self._errors)
        return StatsdMapping([rule for rule in rules if rule is not None], self._warnings(), by_detail=by_detail)

    def _rule(self, where: str, written: Any, match_type: str) -> _Rule | None:
        fields = self._keys(where, written, _RULE_KEYS)
        if not fields:
            return None
        before = len(self._errors)
        self._note_ignored(where, fields)
        self._observer(where, fields)
        match = self._text(where, fields, "match")
        match_type = self._choice(where, fields, "match_type", ("glob", "regex", "")) or match_type
        kind = self._choice(where, fields, "match_metric_type", (*_KINDS, ""))
        is_drop = self._choice(where, fields, "action", ("map", "drop", "")) == "drop"
        rule = _Rule(
            glob=self._glob(where, match) if match_type == "glob" else (),
            regex=self._regex(where, match) if match_type == "regex" else None,
            kind=_KINDS.get(kind),
            name=self._name(where, self._text(where, fields, "name")),
            labels=self._labels(where, fields.get("labels") or {}),
            about=self._text(where, fields, "help"),
            is_drop=is_drop,
            scale=self._scale(where, self._text(where, fields, "scale")),
        )
        return rule if len(self._errors) == before else None

    def _keys(self, where: str, written: Any, known: Sequence[str]) -> dict[str, Any]:
        if written == "":
            return {}
        if not isinstance(written, dict):
            self._errors.append(f"{where} is not a mapping; its keys are {', '.join(known[:4])} …")
            return {}
        for key in written:
            if key not in known:
                near = get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                self._errors.append(f"{where}: {key!r} is not a key of statsd_exporter's{hint}")
        return written

    def _text(self, where: str, fields: Mapping[str, Any], key: str) -> str:
        value = fields.get(key, "")
        if not isinstance(value, str):
            self._errors.append(f"{where}: {key} is not text")
            return ""
        return value

    def _choice(self, where: str, fields: Mapping[str, Any], key: str, choices: Sequence[str]) -> str:
        value = self._text(where, fields, key)
        if value not in choices:
            self._errors.append(
                f"{where}: {key} is {value!r}; use {' or '.join(choice for choice in choices if choice)}"
            )
        return value

    def _observer(self, where: str, fields: Mapping[str, Any]) -> None:
        for key in "observer_type", "timer_type":
            if self._choice(where, fields, key, _OBSERVERS) == "summary":
                self._ignored.setdefault("summary", where)

    def _note_ignored(self, where: str, fields: Mapping[str, Any]) -> None:
        for key in _IGNORED_KEYS:
            if key in fields:
                self._ignored.setdefault(key, where)

    def _warnings(self) -> list[str]:
        summary = "durations are exported as a histogram, since summaries of several processes cannot be merged"
        reasons = {
            "summary": summary,
            "summary_options": summary,
            "quantiles": summary,
            "buckets": "the buckets of durations are fixed",
            "histogram_options": "the buckets of durations are fixed",
            "ttl": "series of removed rules are kept",
            "honor_labels": "names here have no labels of their own",
        }
        return [f"{where}: {key} has no effect: {reasons[key]}" for key, where in self._ignored.items()]

    def _glob(self, where: str, match: str) -> tuple[str, ...]:
        if not _GLOB.fullmatch(match):
            self._errors.append(
                f"{where}: match {match!r} is not a glob; write parts of letters, digits, _ and -, or *, between dots, "
                "or match_type: regex"
            )
        return tuple(match.split("."))

    def _regex(self, where: str, match: str) -> Any:
        if not match:
            self._errors.append(f"{where}: match is missing")
            return None
        try:
            return re2.compile(match, _OPTIONS)
        except re2.error as error:
            (detail,) = error.args
            reason = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
            self._errors.append(f"{where}: match {match!r} is not a regular expression: {reason}")
            return None

    def _name(self, where: str, name: str) -> _Template:
        template = _Template(name)
        if not name:
            self._errors.append(f"{where}: name is missing; a dropped match needs one, too")
        elif not _NAME.fullmatch(name):
            self._errors.append(f"{where}: name {name!r} is invalid; use letters, digits, _ and $1")
        elif template.is_fixed and name in OWN_NAMES:
            self._errors.append(f"{where}: name {name!r} is a metric that is exported already; choose another")
        return template

    def _labels(self, where: str, written: Any) -> tuple[tuple[str, _Template], ...]:
        if not isinstance(written, dict):
            self._errors.append(f"{where}: labels is not a mapping; write `label: $1` for each")
            return ()
        for label, text in written.items():
            if not isinstance(label, str) or not _LABEL.fullmatch(label) or label == "le":
                self._errors.append(f"{where}: label {label!r} is invalid; use letters, digits and _")
            elif not isinstance(text, str):
                self._errors.append(f"{where}: the value of label {label} is not text")
        return tuple((str(label), _Template(str(text))) for label, text in written.items())

    def _scale(self, where: str, text: str) -> float | None:
        if not text:
            return None
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not 0 < scale < math.inf:
            self._errors.append(f"{where}: scale is {text!r}; use a number above 0, such as 0.001")
        return scale


def _own_names() -> frozenset[str]:
    names = set()
    for instrument in INSTRUMENTS:
        if not instrument.reference:
            suffixes = ("", "_bucket", "_sum", "_count") if instrument.kind is InstrumentKind.HISTOGRAM else ("",)
            names |= {instrument.prometheus + suffix for suffix in suffixes}
    return frozenset(names)


OWN_NAMES = _own_names()
"""Names that no mapping may use: they are exported regardless of a mapping file."""
