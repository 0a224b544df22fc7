"""Settings of metrics and traces: sinks, errors, and mogrifiers."""

from __future__ import annotations

import socket

import pytest

from ratelimit_rls.errors import SettingsError
from tests.unit.conftest import Read

MOGRIFIER = {
    "USE_DOG_STATSD": "true",
    "USE_DOG_STATSD_MOGRIFIERS": "hits",
    "DOG_STATSD_MOGRIFIER_HITS_PATTERN": r"^ratelimit\.service\.rate_limit\.([^.]+)\.(.*)\.([^.]+)$",
    "DOG_STATSD_MOGRIFIER_HITS_NAME": "ratelimit.$3",
    "DOG_STATSD_MOGRIFIER_HITS_TAGS": "domain:$1,rule:$2",
}


@pytest.mark.parametrize(
    ("environ", "sink"),
    [
        ({}, ""),
        ({"USE_STATSD": "true"}, "statsd"),
        ({"USE_STATSD": "false"}, ""),
        ({"USE_DOG_STATSD": "true"}, "dogstatsd"),
        ({"USE_PROMETHEUS": "true"}, "prometheus"),
        ({"USE_PROMETHEUS": "true", "USE_STATSD": "false"}, "prometheus"),
        ({"USE_PROMETHEUS": "true", "USE_STATSD": "true", "DISABLE_STATS": "true"}, ""),
    ],
)
def test_metrics_sink(read: Read, environ: dict[str, str], sink: str) -> None:
    assert read(**environ).stats_sink == sink


def test_otlp_metrics_unless_stats_are_disabled(read: Read) -> None:
    settings = read(USE_PROMETHEUS="true", RLS_OTLP_METRICS="grpc")
    assert (settings.stats_sink, settings.otlp_metrics) == ("prometheus", "grpc")
    assert read(RLS_OTLP_METRICS="http", DISABLE_STATS="true").otlp_metrics == ""
    assert read(RLS_OTLP_METRICS="").otlp_metrics == ""


@pytest.mark.parametrize(
    ("address", "listen"),
    [
        ("127.0.0.1:19001", ("127.0.0.1", 19001)),
        ("[::]:9090", ("::", 9090)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("metrics.local:0", ("metrics.local", 0)),
        (":9090", ("::" if socket.has_dualstack_ipv6() else "0.0.0.0", 9090)),
    ],
)
def test_prometheus_address(read: Read, address: str, listen: tuple[str, int]) -> None:
    assert read(USE_PROMETHEUS="true", PROMETHEUS_ADDR=address).prometheus_listen == listen


@pytest.mark.parametrize("address", ["", "9090", "::1:9090", "[::1]", "host:", "host:65536", ":-1", ":" + "9" * 5000])
def test_invalid_prometheus_address(read: Read, address: str) -> None:
    with pytest.raises(SettingsError, match=r"PROMETHEUS_ADDR='.*' is not an address; use host:port, \[IPv6"):
        read(USE_PROMETHEUS="true", PROMETHEUS_ADDR=address)


@pytest.mark.parametrize("tag", ["le", "__name__"])
def test_reserved_prometheus_labels_are_rejected(read: Read, tag: str) -> None:
    with pytest.raises(SettingsError, match=rf"EXTRA_TAGS has '{tag}', which is reserved by Prometheus"):
        read(USE_PROMETHEUS="true", EXTRA_TAGS=f"zone:a,{tag}:b")


@pytest.mark.parametrize("path", ["", "metrics", "/a b", "/{path}", "/metrics?x=1", "/\n"])
def test_invalid_prometheus_path(read: Read, path: str) -> None:
    with pytest.raises(SettingsError, match=r"PROMETHEUS_PATH='.*' is not a path; use /metrics"):
        read(USE_PROMETHEUS="true", PROMETHEUS_PATH=path)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"USE_STATSD": "1", "STATSD_PROTOCOL": "http"}, "STATSD_PROTOCOL='http' is not a valid choice; use tcp"),
        ({"USE_STATSD": "1", "STATSD_PORT": "0"}, "STATSD_HOST and STATSD_PORT must be set to send metrics"),
        ({"USE_DOG_STATSD": "1", "STATSD_HOST": ""}, "STATSD_HOST and STATSD_PORT must be set to send metrics"),
        (
            {**MOGRIFIER, "USE_DOG_STATSD_MOGRIFIERS": "hits,calls"},
            "DOG_STATSD_MOGRIFIER_CALLS_PATTERN is not set, although USE_DOG_STATSD_MOGRIFIERS lists its name; set it",
        ),
        ({**MOGRIFIER, "DOG_STATSD_MOGRIFIER_HITS_NAME": ""}, "DOG_STATSD_MOGRIFIER_HITS_NAME is not set"),
        (
            {**MOGRIFIER, "DOG_STATSD_MOGRIFIER_HITS_PATTERN": "(a"},
            "DOG_STATSD_MOGRIFIER_HITS_PATTERN='(a' is not a regular expression: missing ): (a",
        ),
        (
            {**MOGRIFIER, "DOG_STATSD_MOGRIFIER_HITS_PATTERN": r"(a)\1"},
            "is not a regular expression: invalid escape sequence",
        ),
        ({**MOGRIFIER, "DOG_STATSD_MOGRIFIER_HITS_TAGS": "a"}, "_HITS_TAGS='a' is not a map; use key:value"),
        ({**MOGRIFIER, "DOG_STATSD_MOGRIFIER_HITS_TAGS": "a:"}, "_HITS_TAGS='a:' has a tag without a key or a value"),
    ],
)
def test_invalid_telemetry_settings_are_rejected(read: Read, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(**environ)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"STATSD_PROTOCOL": "http", "PROMETHEUS_ADDR": "nowhere", "PROMETHEUS_PATH": ""},
        {**MOGRIFIER, "USE_DOG_STATSD": "false", "DOG_STATSD_MOGRIFIER_HITS_PATTERN": "(a"},
        {"USE_PROMETHEUS": "true", "PROMETHEUS_ADDR": "nowhere", "DISABLE_STATS": "true"},
    ],
)
def test_unused_telemetry_settings_are_not_checked(read: Read, environ: dict[str, str]) -> None:
    assert read(**environ).warnings() == []


def test_mogrifiers_are_in_listed_order(read: Read) -> None:
    settings = read(
        **{**MOGRIFIER, "USE_DOG_STATSD_MOGRIFIERS": "Second,HITS"},
        DOG_STATSD_MOGRIFIER_SECOND_PATTERN=".",
        DOG_STATSD_MOGRIFIER_SECOND_NAME="other",
    )
    second, hits = settings.dog_statsd_mogrifiers
    assert (second.name, second.tags) == ("other", ())
    assert (hits.name, hits.tags) == ("ratelimit.$3", (("domain", "$1"), ("rule", "$2")))
    assert hits.pattern.search("ratelimit.service.rate_limit.a.b.c.total_hits").groups() == ("a", "b.c", "total_hits")


def test_mogrifiers_are_read_once(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read(**MOGRIFIER)
    monkeypatch.setenv("DOG_STATSD_MOGRIFIER_HITS_NAME", "changed")
    assert settings.dog_statsd_mogrifiers[0].name == "ratelimit.$3"
