"""Mapping files of statsd_exporter: its semantics, and error messages for invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.telemetry.instruments import InstrumentKind
from ratelimit_rls.telemetry.statsd_mapping import (
    HELP,
    StatsdMapping,
    Target,
    compile_statsd_mapping,
    read_statsd_mapping,
)
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.parser import parse
from ratelimit_rls.yaml.settings_file import MAX_SETTINGS_FILE_BYTES


def mapping(*rules: str, defaults: str = "{}") -> StatsdMapping:
    listed = "\n".join(f"  - {rule}" for rule in rules)
    return compiled(f"defaults: {defaults}\nmappings:\n{listed}\n".encode())


def compiled(content: bytes) -> StatsdMapping:
    found = Findings("conf.yaml")
    read = compile_statsd_mapping(parse(content), found)
    assert found.errors == []
    return read


def mapped(found: StatsdMapping, name: str, kind: InstrumentKind = InstrumentKind.COUNTER) -> str:
    """Format the target as Prometheus would."""
    target = found.target(name, kind)
    if target is None:
        return ""
    labels = ",".join(f'{label}="{text}"' for label, text in target.labels)
    return target.name + (f"{{{labels}}}" if labels else "")


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("a.b.c", 'three{first="a",second="b"}'),
        ("a..c", 'three{first="a"}'),
        ("a.b.d", ""),
        ("a.b.c.d", ""),
        ("b.c", ""),
        ("0x.y-z.c", 'three{first="0x",second="y-z"}'),
    ],
)
def test_a_star_matches_one_part_between_dots(name: str, series: str) -> None:
    assert mapped(mapping('{match: "*.*.c", name: three, labels: {first: $1, second: "${2}"}}'), name) == series


def test_the_first_matching_glob_is_used() -> None:
    found = mapping("{match: a.*, name: wide}", "{match: a.b, name: narrow}")
    assert mapped(found, "a.b") == "wide"


def test_the_most_specific_glob_is_used_without_ordering() -> None:
    rules = ('{match: "*.b.c", name: right}', "{match: a.*.*, name: left}", "{match: a.*.c, name: both}")
    found = mapping(*rules, defaults="{glob_disable_ordering: true}")
    assert mapped(found, "a.b.c") == "both"
    assert mapped(found, "a.b.d") == "left"
    assert mapped(found, "x.b.c") == "right"
    assert mapped(mapping(*rules), "a.b.c") == "right"


def test_regexes_come_after_globs_and_match_anywhere() -> None:
    found = mapping(
        '{match: "total", match_type: regex, name: "any"}',
        '{match: "^(a)\\\\.(?P<last>.*)$", match_type: regex, name: named, labels: {it: $last, all: $0, one: "$1x"}}',
        "{match: a.total, name: glob}",
    )
    assert mapped(found, "a.total") == "glob"
    assert mapped(found, "b.total.c") == "any"
    assert mapped(found, "a.b.c") == 'named{all="a.b.c",it="b.c"}'
    assert mapped(found, "b") == ""


def test_the_default_match_type_may_be_regex() -> None:
    found = mapping(
        "{match: a.b, name: regex}", "{match: a.b, match_type: glob, name: glob}", defaults="{match_type: regex}"
    )
    assert mapped(found, "axb") == "regex"
    assert mapped(found, "a.b") == "glob"


def test_a_rule_may_match_one_metric_type_only() -> None:
    found = mapping(
        "{match: a, match_metric_type: gauge, name: gauge}",
        "{match: a, match_metric_type: timer, name: observer}",
        "{match: a, match_type: regex, name: counter, match_metric_type: counter}",
    )
    assert [
        mapped(found, "a", kind) for kind in (InstrumentKind.COUNTER, InstrumentKind.GAUGE, InstrumentKind.HISTOGRAM)
    ] == [
        "counter",
        "gauge",
        "observer",
    ]


def test_dropped_names_are_not_exported() -> None:
    found = mapping(
        "{match: ratelimit.service.a, name: kept}", '{match: ".", match_type: regex, action: drop, name: x}'
    )
    assert mapped(found, "ratelimit.service.a") == "kept"
    assert mapped(found, "ratelimit.service.b") == ""


@pytest.mark.parametrize(
    ("template", "text"),
    [("$1", "one"), ("${1}_x", "one_x"), ("$1_x", ""), ("$2$1", "twoone"), ("$3", ""), ("$$1", "$1"), ("a$0b", "a")],
)
def test_capture_references_are_greedy(template: str, text: str) -> None:
    target = mapping(f'{{match: "*.*", name: n, labels: {{label: "{template}"}}}}').target(
        "one.two", InstrumentKind.COUNTER
    )
    assert target is not None
    assert dict(target.labels).get("label", "") == text


def test_names_are_sanitised_for_prometheus() -> None:
    found = mapping('{match: "x.*", name: "$1"}', '{match: "(y.*)", match_type: regex, name: "$0"}')
    assert mapped(found, "x.7up-now é") == "_7up_now__"
    assert mapped(found, "y.z") == "y_z"
    assert mapped(found, "x.") == ""  # an empty name


def test_unmapped_compatible_names_are_kept_and_own_names_are_skipped() -> None:
    found = mapping()
    assert found.target("ratelimit.service.rate_limit.a-b.c_1.2.over_limit", InstrumentKind.COUNTER) == Target(
        "ratelimit_service_rate_limit_a_b_c_1_2_over_limit", InstrumentKind.COUNTER, HELP, (), 1.0
    )
    assert (
        mapped(found, "ratelimit_server.Check.response_time", InstrumentKind.HISTOGRAM)
        == "ratelimit_server_Check_response_time"
    )
    assert mapped(found, "ratelimit.denial_cache.entries", InstrumentKind.GAUGE) == ""


def test_help_and_scale_come_from_the_rule() -> None:
    target = mapping("{match: a, name: b, help: Of b., scale: 1e-3}").target("a", InstrumentKind.GAUGE)
    assert target == Target("b", InstrumentKind.GAUGE, "Of b.", (), 0.001)


def test_an_empty_file_maps_nothing() -> None:
    assert compiled(b"").target("a", InstrumentKind.COUNTER) is None
    assert compiled(b"mappings:\ndefaults:\n").warnings == ()


def test_keys_without_effect_are_warned_of_once() -> None:
    found = mapping(
        "{match: a, name: b, timer_type: summary, ttl: 1m}",
        "{match: c, name: d, observer_type: summary, histogram_options: {buckets: [1, 2]}}",
        "{match: e, name: f, timer_type: histogram}",
        defaults="{ttl: 1h}",
    )
    assert found.warnings == (
        "line 1: ttl has no effect: series of removed rules are kept",
        "line 3: summary has no effect: durations are exported as a histogram, since summaries of several "
        "processes cannot be merged",
        "line 4: histogram_options has no effect: the buckets of durations are fixed",
    )


@pytest.mark.parametrize(
    ("rule", "column", "sentence"),
    [
        ("{match: a, nam: b}", 16, "'nam' is not a key of statsd_exporter's; did you mean 'name'?"),
        ("{match: a}", 5, "name is missing"),
        ("{match: a, name: b-c}", 22, "name 'b-c' is invalid; use letters, digits, _ and $1"),
        ("{match: a, name: ratelimit_workers}", 22, "name 'ratelimit_workers' is a metric that is exported"),
        (
            "{match: a, name: rpc_server_call_duration_seconds_sum}",
            22,
            "name 'rpc_server_call_duration_seconds_sum' is a metric that is exported already",
        ),
        ("{match: a*.b, name: b}", 13, "match 'a*.b' is not a glob; write parts of letters"),
        ("{name: b}", 5, "match '' is not a glob"),
        ("{name: b, match_type: regex}", 5, "match is missing"),
        ('{match: "(a", match_type: regex, name: b}', 13, "match '(a' is not a regular expression: missing ): (a"),
        ("{match: a, match_type: prefix, name: b}", 28, "match_type is 'prefix'; use glob or regex"),
        (
            "{match: a, match_metric_type: set, name: b}",
            35,
            "match_metric_type is 'set'; use counter or gauge or observer",
        ),
        ("{match: a, action: keep, name: b}", 24, "action is 'keep'; use map or drop"),
        ("{match: a, name: b, timer_type: gauge}", 37, "timer_type is 'gauge'; use histogram or summary"),
        ("{match: a, name: b, scale: fast}", 32, "scale is 'fast'; use a number above 0, such as 0.001"),
        ("{match: a, name: b, scale: -1}", 32, "scale is '-1'; use a number above 0"),
        ("{match: a, name: b, labels: {a-b: $1}}", 34, "label 'a-b' is invalid; use letters, digits and _"),
        ("{match: a, name: b, labels: {__name__: $1}}", 34, "label '__name__' is invalid"),
        ("{match: a, name: b, labels: {le: $1}}", 34, "label 'le' is invalid"),
        ("{match: a, name: b, labels: {l: [1]}}", 37, "the value of label l is not text"),
        ("{match: a, name: b, labels: [1]}", 33, "labels is not a mapping; write `label: $1` for each"),
        ("{match: [a], name: b}", 13, "match: a list is not text"),
        ("text", 5, "text is not a mapping; its keys are match, match_type"),
    ],
)
def test_an_error_is_reported_with_its_position(tmp_path: Path, rule: str, column: int, sentence: str) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(f"mappings:\n  - {rule}\n")
    with pytest.raises(SettingsError) as raised:
        read_statsd_mapping(path)
    assert str(raised.value).startswith("PROMETHEUS_MAPPER_YAML:\n")
    assert f"\n{path}:2:{column}: error: {sentence}" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b"mappings: {",
            ":2:1: error: this is not YAML: while parsing a flow node, did not find expected node content",
        ),
        (b"mappings: {}\nmapping: []\n", "'mapping' is not a key of statsd_exporter's; did you mean 'mappings'?"),
        (b"mappings: {a: b}\n", "mappings is not a list; write `- match: …` for each"),
        (b"- match: a\n", "a list is not a mapping; its keys are defaults, mappings"),
        (b"defaults: {order: true}\n", "'order' is not a key of statsd_exporter's"),
        (b"defaults: {glob_disable_ordering: maybe}\n", "glob_disable_ordering is 'maybe'; use true or false"),
        (b"\xff\xfe\xfd", "is not YAML: "),
        (b"# " + b"x" * MAX_SETTINGS_FILE_BYTES, "is larger than 1 MiB"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_rejected(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "conf.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as raised:
        read_statsd_mapping(path)
    assert sentence in str(raised.value)


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text("mappings:\n  - {match: a}\n  - {match: b, name: c, scale: x}\n")
    with pytest.raises(SettingsError) as raised:
        read_statsd_mapping(path)
    assert len(str(raised.value).splitlines()) == 3  # the variable, and two errors


def test_last_value_of_a_repeated_key_is_used() -> None:
    assert mapped(mapping("{match: a, name: b, name: c}"), "a") == "c"
