"""Prometheus exporter: text exposition format 0.0.4.

In addition to our own names there are those of envoyproxy/ratelimit, so that its dashboards keep working: with its
default labels, or as PROMETHEUS_MAPPER_YAML says. OpenMetrics is not supported: it requires counters to end in _total,
and those of envoyproxy/ratelimit do not.

A scrape of many rules is written in pieces, and the sender may do other work between two pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.instruments import DURATIONS_S, INSTRUMENTS, REFERENCE_TIMES, InstrumentKind
from ratelimit_rls.telemetry.series import Collected, Distribution, Value, kind_of, timers
from ratelimit_rls.telemetry.statsd_mapping import OWN_NAMES, StatsdMapping, Target, read_statsd_mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PIECE_ROWS = 1000
"""Series written per piece: about a millisecond."""

PIECE_NAMES = 100
"""Statsd names looked up per piece: the first scrape tries the mapping's expressions one after the other."""

_NOT_IN_LABELS = re.compile(r"[^a-zA-Z0-9_]")
_TO_MS = 1000.0
_PLACEHOLDER = "\0"  # replaced by %s in line templates

Labels = tuple[tuple[str, str], ...]


class PrometheusText:
    def __init__(
        self, *, mapping: StatsdMapping | None = None, extra_tags: Mapping[str, str] | None = None, in_ms: bool = False
    ) -> None:
        """`in_ms`: export envoyproxy/ratelimit response times in milliseconds, although their name says seconds."""
        self.mapping = mapping
        self._in_ms = in_ms
        tags = (extra_tags or {}).items()
        self._extra = {_label_name(key): text for key, text in sorted(tags) if key and text}

    def pieces(self, collected: Collected, names: Iterable[tuple[str, int]] = ()) -> Iterator[bytes]:
        """Yield the text in a stable order; a piece may be empty."""
        rows: dict[str, list[tuple[tuple[str, ...], Value]]] = {}
        for number, ((name, attributes), value) in enumerate(collected.items()):
            rows.setdefault(name, []).append((attributes, value))
            if number % PIECE_ROWS == 0:
                yield b""
        for instrument in INSTRUMENTS:
            if instrument.name in rows and not (instrument.reference and self.mapping is not None):
                name, labels = instrument.prometheus, tuple(key.replace(".", "_") for key in instrument.attributes)
                scale = _TO_MS if self._in_ms and instrument is REFERENCE_TIMES else 1.0
                yield _family_header(name, instrument.kind, instrument.about)
                yield from _sorted_pieces(_lines(name, labels, self._beside(labels), rows[instrument.name], scale))
        if self.mapping is not None:
            yield from self._mapped(self.mapping, collected, names)

    def _beside(self, labels: Iterable[str]) -> Labels:
        """Return the extra tags as labels, except those that exist already."""
        return tuple((key, text) for key, text in self._extra.items() if key not in labels)

    def text(self, collected: Collected, names: Iterable[tuple[str, int]] = ()) -> bytes:
        return b"".join(self.pieces(collected, names))

    def _mapped(
        self, mapping: StatsdMapping, collected: Collected, names: Iterable[tuple[str, int]]
    ) -> Iterator[bytes]:
        families = _Families()
        for name, distribution in sorted(timers(collected)):
            families.add(mapping.target(name, InstrumentKind.HISTOGRAM), distribution)
        for number, (name, count) in enumerate(names):
            families.add(mapping.target(name, kind_of(name)), count)
            if number % PIECE_NAMES == 0:
                yield b""
        for name in sorted(families.whole):
            target, values = families.whole[name]
            yield _family_header(target.name, target.kind, target.about)
            yield from _sorted_pieces(
                # Timers of statsd are in milliseconds.
                _line(target.name, _braces((*labels, *self._beside(dict(labels)))), value, _TO_MS * target.scale)
                for labels, value in values.items()
            )


class _Family(NamedTuple):
    target: Target
    values: dict[Labels, Value]


class _Families:
    """Metric families of mapped names, several of which may map to the same series."""

    def __init__(self) -> None:
        self.whole: dict[str, _Family] = {}
        self._taken = set(OWN_NAMES)

    def add(self, target: Target | None, value: Value) -> None:
        """Add a value. The first name determines the kind of a family; other kinds and our own names are skipped."""
        if target is None:
            return
        family = self.whole.get(target.name)
        if family is None:
            if target.name in self._taken:
                return
            family = self.whole[target.name] = _Family(target, {})
            if target.kind is InstrumentKind.HISTOGRAM:
                self._taken |= {f"{target.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
        if family.target.kind is target.kind:
            if not isinstance(value, Distribution) and target.scale != 1.0:
                value *= target.scale
            before = family.values.get(target.labels)
            family.values[target.labels] = value if before is None else _merge_values(target.kind, before, value)


def _merge_values(kind: InstrumentKind, one: Value, other: Value) -> Value:
    if isinstance(one, Distribution) and isinstance(other, Distribution):
        counts = tuple(first + second for first, second in zip(one.counts, other.counts, strict=True))
        return Distribution(counts, one.sum_s + other.sum_s)
    assert not isinstance(one, Distribution)
    assert not isinstance(other, Distribution)
    return one + other if kind is InstrumentKind.COUNTER else other


def _family_header(name: str, kind: InstrumentKind, about: str) -> bytes:
    escaped = about.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind.value}\n".encode(errors="replace")


def _sorted_pieces(lines: Iterable[str]) -> Iterator[bytes]:
    """Encode the sorted lines. Sorting the finished lines is far faster than sorting the rows."""
    written: list[str] = []
    for line in lines:
        written.append(line)
        if len(written) % PIECE_ROWS == 0:
            yield b""
    written.sort()
    for at in range(0, len(written), PIECE_ROWS):
        yield "".join(written[at : at + PIECE_ROWS]).encode(errors="replace")


class _Escapes(dict[str, str]):
    """Cache of escaped label values; the same few occur in many series."""

    def __missing__(self, text: str) -> str:
        escaped = self[text] = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return escaped


def _lines(
    name: str, labels: tuple[str, ...], extra: Labels, rows: Iterable[tuple[tuple[str, ...], Value]], scale: float
) -> Iterator[str]:
    """Yield the lines of each series of one of our instruments, of which there may be tens of thousands."""
    escapes = _Escapes()
    escaped = escapes.__getitem__
    template = name + _braces([*((label, _PLACEHOLDER) for label in labels), *extra]).replace("%", "%%").replace(
        _PLACEHOLDER, "%s"
    )
    template += " %s\n"
    for attributes, value in rows:
        if type(value) is int and all(attributes):
            yield template % (*map(escaped, attributes), value)
        else:
            yield _line(name, _braces([*zip(labels, attributes, strict=True), *extra]), value, scale)


def _line(name: str, labels: str, value: Value, scale: float) -> str:
    """Format a sample. `scale` applies to durations and to bucket bounds."""
    if isinstance(value, Distribution):
        return _histogram(name, labels, value, scale)
    return f"{name}{labels} {_number(value)}\n"


def _histogram(name: str, labels: str, value: Distribution, scale: float) -> str:
    before = labels[:-1] + "," if labels else "{"
    count = 0
    lines = []
    for bound_s, counted in zip((*DURATIONS_S, float("inf")), value.counts, strict=True):
        count += counted
        lines.append(f'{name}_bucket{before}le="{_number(bound_s, scale)}"}} {count}\n')
    lines.append(f"{name}_sum{labels} {_number(value.sum_s, scale)}\n{name}_count{labels} {count}\n")
    return "".join(lines)


def _number(value: float, scale: float = 1.0) -> str:
    """Format as short as exact: 0.00025 times a thousand is 0.25, without binary rounding errors."""
    if scale != 1.0:
        value = float(f"{value * scale:.12g}")
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)


def _braces(labels: Iterable[tuple[str, str]]) -> str:
    """Format labels. Empty labels are omitted, which is equivalent."""
    escapes = _Escapes()
    written = ",".join([f'{name}="{escapes[text]}"' for name, text in labels if text])
    return f"{{{written}}}" if written else ""


def _label_name(key: str) -> str:
    name = _NOT_IN_LABELS.sub("_", key)
    return f"_{name}" if name[0].isdigit() else name


def new_prometheus_text(settings: Settings) -> PrometheusText:
    """Return the exporter. Raises SettingsError if the mapping file cannot be used.

    A missing file only logs a warning: Envoy Gateway names one whose ConfigMap need not exist.
    """
    path = settings.prometheus_mapper_yaml
    mapping = None
    if path and Path(path).exists():
        mapping = read_statsd_mapping(Path(path))
    elif path:
        structlog.get_logger().warning(
            "prometheus_mapper_missing", file=path, error="no such file; using default labels"
        )
    for warning in mapping.warnings if mapping is not None else ():
        structlog.get_logger().warning("prometheus_mapper_ignored_key", file=path, error=warning)
    return PrometheusText(
        mapping=mapping, extra_tags=settings.extra_tags, in_ms=settings.prometheus_response_time_as_milliseconds
    )
