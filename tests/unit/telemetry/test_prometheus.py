"""The Prometheus exporter, checked with the parser of prometheus_client."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry import instruments
from ratelimit_rls.telemetry.instruments import DURATIONS_S, INSTRUMENTS, Instrument, InstrumentKind
from ratelimit_rls.telemetry.prometheus import PIECE_ROWS, PrometheusText, new_prometheus_text
from ratelimit_rls.telemetry.series import Collected, Distribution, Series
from ratelimit_rls.telemetry.statsd_mapping import compile_statsd_mapping
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.parser import parse

TIMES = Distribution((1, 2, *[0] * 10, 4, 3), 5.25)


def series(instrument: Instrument, *attributes: str) -> Series:
    return Series(instrument.name, attributes)


def families(text: bytes) -> dict[str, Metric]:
    """Return the families by name; a name that occurs twice would be two families."""
    found = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def samples(text: bytes, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return names from the text, since the parser appends _total to counters without it."""
    assert f"\n{name}{{" in text.decode() or f"\n{name} " in text.decode()
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in families(text).values()
        for sample in family.samples
        if sample.name in (name, f"{name}_total")
    }


def test_every_instrument_is_read_back_with_its_name_type_and_labels() -> None:
    collected: Collected = {
        series(one, *(f"v{n}" for n in range(len(one.attributes)))): TIMES
        if one.kind is InstrumentKind.HISTOGRAM
        else 7
        for one in INSTRUMENTS
    }
    found = families(PrometheusText().text(collected))
    assert len(found) == len(INSTRUMENTS)
    for one in INSTRUMENTS:
        family = found[one.prometheus.removesuffix("_total") if one.kind is InstrumentKind.COUNTER else one.prometheus]
        assert family.type == one.kind.value
        assert family.documentation == one.about
        sample = family.samples[0]
        labels = {key.replace(".", "_"): f"v{n}" for n, key in enumerate(one.attributes)}
        assert {key: text for key, text in sample.labels.items() if key != "le"} == labels
        if one.kind is not InstrumentKind.HISTOGRAM:
            assert sample.name in (one.prometheus, f"{one.prometheus}_total")
            assert sample.value == 7


def test_prometheus_names_are_unique() -> None:
    names = [
        one.prometheus + suffix
        for one in INSTRUMENTS
        for suffix in (("_bucket", "_sum", "_count") if one.kind is InstrumentKind.HISTOGRAM else ("",))
    ]
    assert len(set(names)) == len(names)


def test_histogram_buckets_are_cumulative() -> None:
    text = PrometheusText().text({series(instruments.STORE_DURATION, "redis", ""): TIMES})
    buckets = samples(text, "ratelimit_store_duration_seconds_bucket")
    store = ("ratelimit_store", "redis")
    assert [float(dict(labels)["le"]) for labels in buckets] == [*DURATIONS_S, math.inf]
    assert list(buckets.values()) == [1, 3, *[3] * 10, 7, 10]
    assert (("le", "0.0001"), store) in buckets
    assert (("le", "1"), store) in buckets
    assert samples(text, "ratelimit_store_duration_seconds_sum") == {(store,): 5.25}
    assert samples(text, "ratelimit_store_duration_seconds_count") == {(store,): 10}


@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\nb", '"}\nevil 1\n# ', "\\n", "ü€😀", "a\rb\tc", "%s %", "\0"])
def test_client_data_cannot_break_out_of_a_label(value: str) -> None:
    text = PrometheusText().text({series(instruments.UNKNOWN_DOMAINS, value): 3})
    (sample,) = families(text)["ratelimit_unknown_domains"].samples
    assert sample.labels == {"ratelimit_domain": value}
    assert len(text.splitlines()) == len(text.decode().split("\n")) - 1 + value.count("\r")


def test_empty_labels_are_omitted() -> None:
    limit = instruments.REFERENCE_LIMITS["total_hits"]
    text = PrometheusText().text({series(limit, "d", "k", ""): 1, series(limit, "d", "k", "l"): 2})
    assert samples(text, "ratelimit_service_rate_limit_total_hits") == {
        (("domain", "d"), ("key1", "k")): 1,
        (("domain", "d"), ("key1", "k"), ("key2", "l")): 2,
    }
    assert b'key2=""' not in text


def test_the_order_is_stable() -> None:
    one: Collected = {series(instruments.RULES_LOADS, outcome): 1 for outcome in ("success", "error")}
    one |= {series(instruments.WORKERS): 2, series(instruments.CALL_DURATION, "grpc", "a/B", "OK"): TIMES}
    other = dict(reversed(one.items()))
    assert PrometheusText().text(one) == PrometheusText().text(other)


def test_many_series_are_written_in_pieces() -> None:
    collected: Collected = {series(instruments.NEAR_LIMIT, "d", f"rule{n}"): n for n in range(3 * PIECE_ROWS + 5)}
    pieces = list(PrometheusText().pieces(collected))
    assert max(piece.count(b"\n") for piece in pieces) == PIECE_ROWS
    assert len(samples(b"".join(pieces), "ratelimit_near_limit_total")) == len(collected)


def test_extra_tags_are_added_without_replacing_labels() -> None:
    text = PrometheusText(extra_tags={"data-centre": 'a"b', "key1": "mine", "empty": ""}).text(
        {series(instruments.WORKERS): 1, series(instruments.REFERENCE_LIMITS["over_limit"], "d", "k", ""): 2}
    )
    assert samples(text, "ratelimit_workers") == {(("data_centre", 'a"b'), ("key1", "mine")): 1}
    assert samples(text, "ratelimit_service_rate_limit_over_limit") == {
        (("data_centre", 'a"b'), ("domain", "d"), ("key1", "k")): 2
    }


def test_compatible_response_times_may_be_in_milliseconds() -> None:
    text = PrometheusText(in_ms=True).text(
        {
            series(instruments.REFERENCE_TIMES, "ShouldRateLimit"): TIMES,
            series(instruments.CALL_DURATION, "grpc", "a/B", "OK"): TIMES,
        }
    )
    buckets = samples(text, "ratelimit_service_response_time_seconds_bucket")
    bounds = [dict(labels)["le"] for labels in buckets]
    assert bounds == ["0.1", "0.25", "0.5", "1", "2.5", "5", "10", "20", "50", "100", "250", "500", "1000", "+Inf"]
    assert list(samples(text, "ratelimit_service_response_time_seconds_sum").values()) == [5250]
    assert list(samples(text, "rpc_server_call_duration_seconds_sum").values()) == [5.25]


MAPPING = rb"""
mappings:
  - {match: ratelimit.service.rate_limit.*.*.total_hits, name: hits_total, labels: {domain: $1, rule: $2}, help: Hits.}
  - {match: ratelimit_server.*.response_time, name: call_seconds, scale: 0.001, labels: {method: $1}}
  - {match: ratelimit.throttle.queue_length, name: queue}
  - {match: ratelimit.service.config_load_*, name: dropped, match_type: regex, action: drop}
  - {match: ratelimit.hot_keys.*, name: "${1}"}
"""


def test_a_mapping_replaces_the_compatible_series() -> None:
    prometheus = PrometheusText(
        mapping=compile_statsd_mapping(parse(MAPPING), Findings("")), extra_tags={"rule": "x", "zone": "z"}
    )
    assert prometheus.mapping is not None
    collected: Collected = {
        series(instruments.WORKERS): 2,
        series(instruments.REFERENCE_LIMITS["total_hits"], "d", "k", ""): 4,
        series(instruments.REFERENCE_TIMES, "ShouldRateLimit"): TIMES,
    }
    names = [
        ("ratelimit.service.rate_limit.d.k.total_hits", 4),
        ("ratelimit.service.rate_limit.d.k.within_limit", 3),
        ("ratelimit.service.rate_limit.d_e-f.within_limit", 1),
        ("ratelimit.service.rate_limit.d.e.f.within_limit", 2),
        ("ratelimit.service.config_load_success", 1),
        ("ratelimit.throttle.queue_length", 6),
        ("ratelimit.denial_cache.entries", 9),
        ("ratelimit.hot_keys.max_rate", 5),
    ]
    text = prometheus.text(collected, names)
    zone = ("zone", "z")
    assert samples(text, "hits_total") == {(("domain", "d"), ("rule", "k"), zone): 4}
    assert families(text)["hits"].documentation == "Hits."
    assert samples(text, "queue") == {(("rule", "x"), zone): 6}
    assert families(text)["queue"].type == "gauge"
    assert families(text)["call_seconds"].type == "histogram"
    assert samples(text, "call_seconds_sum") == {(("method", "ShouldRateLimit"), ("rule", "x"), zone): 5.25}
    assert [dict(labels)["le"] for labels in samples(text, "call_seconds_bucket")][:3] == [
        "0.0001",
        "0.00025",
        "0.0005",
    ]
    # As envoyproxy/ratelimit does with unmapped names: everything that it cannot distinguish is in the name.
    assert samples(text, "ratelimit_service_rate_limit_d_e_f_within_limit") == {(("rule", "x"), zone): 3}
    exported = set(families(text))
    assert "ratelimit_workers" in exported
    assert "ratelimit_denial_cache_entries" not in exported  # it would be duplicated if it is in `collected`
    assert not [name for name in exported if name.startswith(("ratelimit_service_config_load", "dropped"))]


def test_mapped_names_cannot_use_our_names_or_mix_kinds() -> None:
    content = b"""
mappings:
  - {match: ratelimit.*.queue_length, name: "ratelimit_${1}_queue_length"}
  - {match: ratelimit.service.*, name: mixed, labels: {what: $1}}
  - {match: ratelimit.leases.*, name: mixed, labels: {what: $1}, scale: 0.5}
  - {match: ratelimit_server.*.response_time, name: calls}
  - {match: ratelimit_server.*.total_requests, name: calls_count}
"""
    mapping = compile_statsd_mapping(parse(content), Findings(""))
    text = PrometheusText(mapping=mapping).text(
        {series(instruments.REFERENCE_TIMES, "Check"): TIMES},
        [
            ("ratelimit.leases.requests", 4),
            ("ratelimit.leases.counters", 2),
            ("ratelimit.service.global_shadow_mode", 3),
            ("ratelimit.throttle.queue_length", 1),
            ("ratelimit_server.Check.total_requests", 9),
        ],
    )
    assert samples(text, "mixed") == {(("what", "requests"),): 2, (("what", "global_shadow_mode"),): 3}
    assert set(families(text)) == {"mixed", "calls"}
    assert list(samples(text, "calls_count").values()) == [10]


def test_the_mapping_file_comes_from_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_bytes(MAPPING)
    assert new_prometheus_text(Settings(prometheus_mapper_yaml=str(path))).mapping is not None
    assert new_prometheus_text(Settings()).mapping is None
    # Envoy Gateway names one whose ConfigMap need not exist.
    with capture_logs() as lines:
        assert new_prometheus_text(Settings(prometheus_mapper_yaml=str(tmp_path / "none.yaml"))).mapping is None
    assert [line["file"] for line in lines] == [str(tmp_path / "none.yaml")]
    path.write_text("mappings: [{match: a}]")
    with pytest.raises(SettingsError, match=r"PROMETHEUS_MAPPER_YAML:\n.*/conf.yaml:1:12: error: name is missing"):
        new_prometheus_text(Settings(prometheus_mapper_yaml=str(path)))
