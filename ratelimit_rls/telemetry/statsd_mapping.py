"""PROMETHEUS_MAPPER_YAML: files of statsd_exporter that say which statsd name is which Prometheus series.

Dashboards are built on what such a file makes of the reference's names, so they are read as statsd_exporter reads them:

    match      glob (the default): one * per part between dots; or match_type: regex, searched for anywhere (RE2)
    order      every glob before every regex; globs in the order of the file, or, with glob_disable_ordering, those
               that say most from left to right first; regexes in the order of the file
    $1, ${1}   in `name` and in labels: what the first * or group met; of a group that is not there, nothing
    not met    the name itself, with _ for whatever a Prometheus name cannot have

Different are two things. A file with a mistake is refused, not ignored. And how long calls took is always a histogram,
in our buckets: a summary of several processes cannot be put together, and buckets are chosen before there is a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import re2
import yaml

from ratelimit_rls.errors import SettingsError, one_line
from ratelimit_rls.telemetry.instruments import INSTRUMENTS, Kind

MOST_BYTES = 2**20
MOST_KEPT = 120_000
"""Names whose series are remembered. There are ten for each path of metrics.py at most, and these are bounded."""

HELP = "Made from a statsd name by PROMETHEUS_MAPPER_YAML."

_KINDS = {"counter": Kind.COUNTER, "gauge": Kind.GAUGE, "observer": Kind.HISTOGRAM, "timer": Kind.HISTOGRAM}
_OBSERVERS = ("histogram", "summary", "")
_IDLE = ("ttl", "honor_labels", "buckets", "quantiles", "summary_options", "histogram_options")
_RULE_KEYS = (
    *("match", "match_type", "match_metric_type", "name", "labels", "help", "action", "scale"),
    *("observer_type", "timer_type", *_IDLE),
)
_DEFAULT_KEYS = ("match_type", "glob_disable_ordering", "observer_type", "timer_type", *_IDLE)

_GLOB = re.compile(r"(\*|[a-zA-Z_][a-zA-Z0-9_-]*)(\.(\*|[a-zA-Z0-9_][a-zA-Z0-9_-]*))*")
_NAME = re.compile(r"([a-zA-Z_]|\$\{?[0-9]+\}?)([a-zA-Z0-9_]|\$\{?[0-9]+\}?)*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_REFERENCE = re.compile(r"\$(?:\$|\{([a-zA-Z0-9_]+)\}|([a-zA-Z0-9_]+))")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_PARSER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # of either, every scalar is the text that was written


class Target(NamedTuple):
    """The series that a statsd name is counted in."""

    name: str
    kind: Kind
    about: str
    labels: tuple[tuple[str, str], ...]  # sorted, and without empty ones, which are as good as absent
    scale: float  # by which the value is multiplied; a timer's is in milliseconds


class _Template:
    """Text with $1 in it."""

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str]] = []  # what stands before, and the group after it
        at = 0
        for found in _REFERENCE.finditer(text):
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
    kind: Kind | None  # None: of any
    name: _Template
    labels: tuple[tuple[str, _Template], ...]
    about: str
    is_drop: bool
    scale: float | None

    def meet(self, name: str, parts: Sequence[str]) -> dict[str, str] | None:
        """Groups by number; None if this is not for that name."""
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
        """What the file says that has no effect here."""
        globs = [rule for rule in rules if rule.glob]
        if by_detail:
            globs.sort(key=lambda rule: tuple(part == "*" for part in rule.glob))
        self._globs: dict[int, list[_Rule]] = {}  # by number of parts
        for rule in globs:
            self._globs.setdefault(len(rule.glob), []).append(rule)
        self._regexes = [rule for rule in rules if not rule.glob]
        self._kept: dict[tuple[str, Kind], Target | None] = {}

    def target(self, name: str, kind: Kind) -> Target | None:
        """None: dropped, or a name of ours without a mapping, which Prometheus has from us as it is."""
        key = name, kind
        if key in self._kept:
            return self._kept[key]
        if len(self._kept) >= MOST_KEPT:
            self._kept.clear()
        found = self._kept[key] = self._find(name, kind)
        return found

    def _find(self, name: str, kind: Kind) -> Target | None:
        parts = name.split(".")
        for rule in (*self._globs.get(len(parts), ()), *self._regexes):
            if rule.kind in (None, kind) and (groups := rule.meet(name, parts)) is not None:
                return None if rule.is_drop else _target(rule, kind, groups)
        if name.startswith(("ratelimit.service.", "ratelimit_server.")):
            return Target(_escaped(name), kind, HELP, (), 1.0)
        return None


def _target(rule: _Rule, kind: Kind, groups: Mapping[str, str]) -> Target | None:
    labels = ((label, template.fill(groups)) for label, template in rule.labels)
    name = _escaped(rule.name.fill(groups))
    present = tuple(sorted((label, text) for label, text in labels if text))
    return Target(name, kind, rule.about or HELP, present, rule.scale or 1.0) if name else None


def _escaped(name: str) -> str:
    clean = _NOT_IN_NAMES.sub("_", name)
    return f"_{clean}" if clean[:1].isdigit() else clean


def read_statsd_mapping(path: Path) -> StatsdMapping:
    """Raises SettingsError, which names the file and everything that is wrong in it."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"PROMETHEUS_MAPPER_YAML={path}: {error.strerror or error}") from error
    try:
        if len(content) > MOST_BYTES:
            raise _Wrong([f"is larger than {MOST_BYTES} bytes"])
        return parse_statsd_mapping(content)
    except _Wrong as wrong:
        sentences = (f"PROMETHEUS_MAPPER_YAML={path}: {one_line(sentence)}" for sentence in wrong.sentences)
        raise SettingsError("\n".join(sentences)) from None


class _Wrong(ValueError):
    def __init__(self, sentences: Iterable[str]) -> None:
        self.sentences = tuple(sentences)
        super().__init__("\n".join(self.sentences))


def parse_statsd_mapping(content: bytes) -> StatsdMapping:
    """Raises ValueError with a sentence for every mistake."""
    try:
        document = yaml.load(content.decode(), _PARSER)  # noqa: S506 - of these parsers, which make nothing but text
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise _Wrong([f"{where}is not YAML: {error.problem or error.context}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _Wrong([f"is not YAML: {error}"]) from None
    return _Reader().read(document if document not in (None, "") else {})


class _Reader:
    """Collects every mistake of a file before it is refused."""

    def __init__(self) -> None:
        self._wrong: list[str] = []
        self._idle: dict[str, str] = {}  # key -> where it was first seen

    def read(self, document: Any) -> StatsdMapping:
        whole = self._keys("the file", document, ("defaults", "mappings"))
        defaults = self._keys("defaults", whole.get("defaults", {}), _DEFAULT_KEYS)
        self._note_idle("defaults", defaults)
        self._observer("defaults", defaults)
        match_type = self._word("defaults", defaults, "match_type", ("glob", "regex", "")) or "glob"
        by_detail = self._word("defaults", defaults, "glob_disable_ordering", ("true", "false", "")) == "true"
        listed = whole.get("mappings") or []
        if not isinstance(listed, list):
            self._wrong.append("mappings is not a list; write `- match: …` for each")
            listed = []
        rules = [self._rule(f"mappings[{number}]", rule, match_type) for number, rule in enumerate(listed)]
        if self._wrong:
            raise _Wrong(self._wrong)
        return StatsdMapping([rule for rule in rules if rule is not None], self._warnings(), by_detail=by_detail)

    def _rule(self, where: str, written: Any, match_type: str) -> _Rule | None:
        said = self._keys(where, written, _RULE_KEYS)
        if not said:
            return None
        before = len(self._wrong)
        self._note_idle(where, said)
        self._observer(where, said)
        match = self._text(where, said, "match")
        match_type = self._word(where, said, "match_type", ("glob", "regex", "")) or match_type
        kind = self._word(where, said, "match_metric_type", (*_KINDS, ""))
        is_drop = self._word(where, said, "action", ("map", "drop", "")) == "drop"
        rule = _Rule(
            glob=self._glob(where, match) if match_type == "glob" else (),
            regex=self._regex(where, match) if match_type == "regex" else None,
            kind=_KINDS.get(kind),
            name=self._name(where, self._text(where, said, "name")),
            labels=self._labels(where, said.get("labels") or {}),
            about=self._text(where, said, "help"),
            is_drop=is_drop,
            scale=self._scale(where, self._text(where, said, "scale")),
        )
        return rule if len(self._wrong) == before else None

    def _keys(self, where: str, written: Any, known: Sequence[str]) -> dict[str, Any]:
        if written == "":
            return {}
        if not isinstance(written, dict):
            self._wrong.append(f"{where} is not a mapping; its keys are {', '.join(known[:4])} …")
            return {}
        for key in written:
            if key not in known:
                near = get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                self._wrong.append(f"{where}: {key!r} is not a key of statsd_exporter's{hint}")
        return written

    def _text(self, where: str, said: Mapping[str, Any], key: str) -> str:
        value = said.get(key, "")
        if not isinstance(value, str):
            self._wrong.append(f"{where}: {key} is not text")
            return ""
        return value

    def _word(self, where: str, said: Mapping[str, Any], key: str, words: Sequence[str]) -> str:
        value = self._text(where, said, key)
        if value not in words:
            self._wrong.append(f"{where}: {key} is {value!r}; use {' or '.join(word for word in words if word)}")
        return value

    def _observer(self, where: str, said: Mapping[str, Any]) -> None:
        for key in "observer_type", "timer_type":
            if self._word(where, said, key, _OBSERVERS) == "summary":
                self._idle.setdefault("summary", where)

    def _note_idle(self, where: str, said: Mapping[str, Any]) -> None:
        for key in _IDLE:
            if key in said:
                self._idle.setdefault(key, where)

    def _warnings(self) -> list[str]:
        summary = "times are exported as a histogram, since summaries of several processes cannot be added up"
        why = {
            "summary": summary,
            "summary_options": summary,
            "quantiles": summary,
            "buckets": "the buckets of times are fixed",
            "histogram_options": "the buckets of times are fixed",
            "ttl": "series of rules that are gone are kept",
            "honor_labels": "no name here comes with labels of its own",
        }
        return [f"{where}: {key} has no effect: {why[key]}" for key, where in self._idle.items()]

    def _glob(self, where: str, match: str) -> tuple[str, ...]:
        if not _GLOB.fullmatch(match):
            self._wrong.append(
                f"{where}: match {match!r} is not a glob; write parts of letters, digits, _ and -, or *, between dots, "
                "or match_type: regex"
            )
        return tuple(match.split("."))

    def _regex(self, where: str, match: str) -> Any:
        if not match:
            self._wrong.append(f"{where}: match is missing")
            return None
        try:
            return re2.compile(match, _OPTIONS)
        except re2.error as error:
            (why,) = error.args
            told = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
            self._wrong.append(f"{where}: match {match!r} is not a regular expression: {told}")
            return None

    def _name(self, where: str, name: str) -> _Template:
        template = _Template(name)
        if not name:
            self._wrong.append(f"{where}: name is missing; a dropped match needs one, too")
        elif not _NAME.fullmatch(name):
            self._wrong.append(f"{where}: name {name!r} is not one; use letters, digits, _ and $1")
        elif template.is_fixed and name in OURS:
            self._wrong.append(f"{where}: name {name!r} is a metric that is exported already; choose another")
        return template

    def _labels(self, where: str, written: Any) -> tuple[tuple[str, _Template], ...]:
        if not isinstance(written, dict):
            self._wrong.append(f"{where}: labels is not a mapping; write `label: $1` for each")
            return ()
        for label, text in written.items():
            if not isinstance(label, str) or not _LABEL.fullmatch(label) or label == "le":
                self._wrong.append(f"{where}: label {label!r} is not one; use letters, digits and _")
            elif not isinstance(text, str):
                self._wrong.append(f"{where}: the value of label {label} is not text")
        return tuple((str(label), _Template(str(text))) for label, text in written.items())

    def _scale(self, where: str, text: str) -> float | None:
        if not text:
            return None
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not 0 < scale < math.inf:
            self._wrong.append(f"{where}: scale is {text!r}; use a number above 0, such as 0.001")
        return scale


def _taken() -> frozenset[str]:
    names = set()
    for instrument in INSTRUMENTS:
        if not instrument.reference:
            suffixes = ("", "_bucket", "_sum", "_count") if instrument.kind is Kind.HISTOGRAM else ("",)
            names |= {instrument.prometheus + suffix for suffix in suffixes}
    return frozenset(names)


OURS = _taken()
"""Names that no mapping can have: they are exported beside whatever a file makes."""
