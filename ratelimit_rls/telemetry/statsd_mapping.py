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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import re2

from ratelimit_rls.telemetry.instruments import INSTRUMENTS, InstrumentKind
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.messages import did_you_mean
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar, excerpt, is_null
from ratelimit_rls.yaml.settings_file import read_settings_file
from ratelimit_rls.yaml.strict_mapping import StrictMapping

MAX_CACHED_NAMES = 120_000
"""Names whose series are cached. There are at most ten for each path of metrics.py, and those are bounded."""

HELP = "Made from a statsd name by PROMETHEUS_MAPPER_YAML."

_KINDS = {
    "counter": InstrumentKind.COUNTER,
    "gauge": InstrumentKind.GAUGE,
    "observer": InstrumentKind.HISTOGRAM,
    "timer": InstrumentKind.HISTOGRAM,
}
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

_EMPTY = YamlMap(1, 1, ())


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
            for wanted, part in zip(self.glob, parts, strict=True):
                if wanted == "*":
                    captured.append(part)
                elif wanted != part:
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
    """Read a mapping file. Raises SettingsError with all errors and their positions."""
    return read_settings_file("PROMETHEUS_MAPPER_YAML", path, compile_statsd_mapping)


def compile_statsd_mapping(root: YamlNode | None, found: Findings) -> StatsdMapping:
    """Return the mapping of a document. It is incomplete if errors are reported to `found`."""
    return _Compiler(found).compile(root)


class _Section(StrictMapping):
    """One mapping of the file. A key may be written twice, as statsd_exporter allows; the last one counts."""

    may_repeat_keys = True

    def unknown_key(self, key: str, keys: Sequence[str]) -> str:
        return f"{key!r} is not a key of statsd_exporter's{did_you_mean(key, keys)}"

    def error(self, key: str, message: str) -> None:
        """Report an error at the value of `key`, or at the mapping if it has none."""
        self.found.error(self.value(key) or self.node, message)

    def option(self, key: str, *choices: str) -> str:
        """Return the text under `key`, which must be one of `choices`; "" if it is absent or empty."""
        text = self.text(key) or ""
        if text and text not in choices:
            self.error(key, f"{key} is {text!r}; use {' or '.join(choices)}")
        return text


class _Compiler:
    """Compiles a mapping file, collecting all errors before it is rejected."""

    def __init__(self, found: Findings) -> None:
        self._found = found
        self._ignored: dict[str, int] = {}  # key -> the line where it was first seen

    def compile(self, root: YamlNode | None) -> StatsdMapping:
        whole = self._section(root, ("defaults", "mappings"))
        defaults = self._section(whole.value("defaults"), _DEFAULT_KEYS)
        self._note_ignored(defaults)
        match_type = defaults.option("match_type", "glob", "regex") or "glob"
        by_detail = defaults.option("glob_disable_ordering", "true", "false") == "true"
        listed = whole.value("mappings")
        if listed is not None and not isinstance(listed, YamlList):
            self._found.error(listed, "mappings is not a list; write `- match: …` for each")
        nodes = listed.items if isinstance(listed, YamlList) else ()
        rules = [self._rule(node, match_type) for node in nodes]
        return StatsdMapping([rule for rule in rules if rule is not None], self._warnings(), by_detail=by_detail)

    def _section(self, node: YamlNode | None, keys: Sequence[str]) -> _Section:
        return _Section(_EMPTY if node is None or is_null(node) else node, keys, self._found)

    def _rule(self, node: YamlNode, match_type: str) -> _Rule | None:
        before = len(self._found.errors)
        fields = self._section(node, _RULE_KEYS)
        if not isinstance(fields.node, YamlMap) or not fields.node.pairs:
            return None
        self._note_ignored(fields)
        match = fields.text("match") or ""
        match_type = fields.option("match_type", "glob", "regex") or match_type
        rule = _Rule(
            glob=_glob(fields, match) if match_type == "glob" else (),
            regex=_regex(fields, match) if match_type == "regex" else None,
            kind=_KINDS.get(fields.option("match_metric_type", *_KINDS)),
            name=_name(fields),
            labels=_labels(fields),
            about=fields.text("help") or "",
            is_drop=fields.option("action", "map", "drop") == "drop",
            scale=_scale(fields),
        )
        return rule if len(self._found.errors) == before else None

    def _note_ignored(self, fields: _Section) -> None:
        for key in _IGNORED_KEYS:
            if (node := fields.value(key)) is not None:
                self._ignored.setdefault(key, node.line)
        for key in "observer_type", "timer_type":
            if fields.option(key, "histogram", "summary") == "summary":
                self._ignored.setdefault("summary", fields.node.line)

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
        return [f"line {line}: {key} has no effect: {reasons[key]}" for key, line in self._ignored.items()]


def _glob(fields: _Section, match: str) -> tuple[str, ...]:
    if not _GLOB.fullmatch(match):
        fields.error(
            "match",
            f"match {match!r} is not a glob; write parts of letters, digits, _ and -, or *, between dots, "
            "or match_type: regex",
        )
    return tuple(match.split("."))


def _regex(fields: _Section, match: str) -> Any:
    if not match:
        fields.error("match", "match is missing")
        return None
    try:
        return re2.compile(match, _OPTIONS)
    except re2.error as error:
        (detail,) = error.args
        reason = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        fields.error("match", f"match {match!r} is not a regular expression: {reason}")
        return None


def _name(fields: _Section) -> _Template:
    name = fields.text("name") or ""
    template = _Template(name)
    if not name:
        fields.error("name", "name is missing; a dropped match needs one, too")
    elif not _NAME.fullmatch(name):
        fields.error("name", f"name {name!r} is invalid; use letters, digits, _ and $1")
    elif template.is_fixed and name in OWN_NAMES:
        fields.error("name", f"name {name!r} is a metric that is exported already; choose another")
    return template


def _labels(fields: _Section) -> tuple[tuple[str, _Template], ...]:
    node = fields.value("labels") or _EMPTY
    if not isinstance(node, YamlMap):
        fields.error("labels", "labels is not a mapping; write `label: $1` for each")
        return ()
    labels: dict[str, _Template] = {}
    for key, value in node.fields():
        label = key.text if isinstance(key, YamlScalar) else ""
        if not _LABEL.fullmatch(label) or label == "le":
            fields.found.error(key, f"label {excerpt(key)!r} is invalid; use letters, digits and _")
        elif not isinstance(value, YamlScalar):
            fields.found.error(value, f"the value of label {label} is not text")
        else:
            labels[label] = _Template(value.text)
    return tuple(labels.items())


def _scale(fields: _Section) -> float | None:
    text = fields.text("scale")
    if not text:
        return None
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        fields.error("scale", f"scale is {text!r}; use a number above 0, such as 0.001")
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
