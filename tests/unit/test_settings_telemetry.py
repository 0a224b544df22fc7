"""Where metrics and traces go, what of it is refused, and the variables whose names another one lists."""

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
def test_metrics_go_to_one_place_and_to_none_by_default(read: Read, environ: dict[str, str], sink: str) -> None:
    assert read(**environ).stats_sink == sink


def test_otlp_is_beside_it_unless_nothing_is_to_be_sent(read: Read) -> None:
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
def test_the_address_of_the_metrics_is_the_references(read: Read, address: str, listen: tuple[str, int]) -> None:
    assert read(USE_PROMETHEUS="true", PROMETHEUS_ADDR=address).prometheus_listen == listen


@pytest.mark.parametrize("address", ["", "9090", "::1:9090", "[::1]", "host:", "host:65536", ":-1", ":" + "9" * 5000])
def test_other_addresses_are_refused(read: Read, address: str) -> None:
    with pytest.raises(SettingsError, match=r"PROMETHEUS_ADDR='.*' is not an address; use host:port, \[IPv6"):
        read(USE_PROMETHEUS="true", PROMETHEUS_ADDR=address)


@pytest.mark.parametrize("tag", ["le", "__name__"])
def test_tags_that_are_prometheus_s_own_are_refused(read: Read, tag: str) -> None:
    with pytest.raises(SettingsError, match=rf"EXTRA_TAGS has '{tag}', which means something to Prometheus itself"):
        read(USE_PROMETHEUS="true", EXTRA_TAGS=f"zone:a,{tag}:b")


@pytest.mark.parametrize("path", ["", "metrics", "/a b", "/{path}", "/metrics?x=1", "/\n"])
def test_other_paths_are_refused(read: Read, path: str) -> None:
    with pytest.raises(SettingsError, match=r"PROMETHEUS_PATH='.*' is not a path; use /metrics"):
        read(USE_PROMETHEUS="true", PROMETHEUS_PATH=path)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"USE_STATSD": "1", "STATSD_PROTOCOL": "http"}, "STATSD_PROTOCOL='http' is not one of the choices; use tcp"),
        ({"USE_STATSD": "1", "STATSD_PORT": "0"}, "STATSD_HOST and STATSD_PORT must say where to send metrics"),
        ({"USE_DOG_STATSD": "1", "STATSD_HOST": ""}, "STATSD_HOST and STATSD_PORT must say where to send metrics"),
        (
            {**MOGRIFIER, "USE_DOG_STATSD_MOGRIFIERS": "hits,calls"},
            "DOG_STATSD_MOGRIFIER_CALLS_PATTERN is not given, and USE_DOG_STATSD_MOGRIFIERS lists it; give it",
        ),
        ({**MOGRIFIER, "DOG_STATSD_MOGRIFIER_HITS_NAME": ""}, "DOG_STATSD_MOGRIFIER_HITS_NAME is not given"),
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
def test_what_cannot_be_sent_is_refused(read: Read, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(**environ)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"STATSD_PROTOCOL": "http", "PROMETHEUS_ADDR": "nowhere", "PROMETHEUS_PATH": ""},
        {**MOGRIFIER, "USE_DOG_STATSD": "false", "DOG_STATSD_MOGRIFIER_HITS_PATTERN": "(a"},
        {"USE_PROMETHEUS": "true", "PROMETHEUS_ADDR": "nowhere", "DISABLE_STATS": "true"},
    ],
)
def test_what_is_not_used_is_not_refused(read: Read, environ: dict[str, str]) -> None:
    assert read(**environ).warnings() == []


def test_mogrifiers_are_read_in_the_order_they_are_listed(read: Read) -> None:
    settings = read(
        **{**MOGRIFIER, "USE_DOG_STATSD_MOGRIFIERS": "Second,HITS"},
        DOG_STATSD_MOGRIFIER_SECOND_PATTERN=".",
        DOG_STATSD_MOGRIFIER_SECOND_NAME="other",
    )
    second, hits = settings.dog_statsd_mogrifiers
    assert (second.name, second.tags) == ("other", ())
    assert (hits.name, hits.tags) == ("ratelimit.$3", (("domain", "$1"), ("rule", "$2")))
    assert hits.pattern.search("ratelimit.service.rate_limit.a.b.c.total_hits").groups() == ("a", "b.c", "total_hits")


def test_they_are_read_once_as_all_settings_are(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read(**MOGRIFIER)
    monkeypatch.setenv("DOG_STATSD_MOGRIFIER_HITS_NAME", "changed")
    assert settings.dog_statsd_mogrifiers[0].name == "ratelimit.$3"
