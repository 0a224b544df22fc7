"""Every family of headers and every body through a real Envoy, for a 200 and a 429."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import http_sf
import pytest
import yaml

from tests.support.servers import SANDBOXES, EnvoyServer, Service, Upstream
from tests.support.windows import DAY_S, wait_for_time_left

pytestmark = pytest.mark.e2e

YEAR_S = 31_536_000
COMPARED_HEADERS = ("ratelimit", "x-ratelimit", "retry-after", "content-type", "x-why")

# One request a day is allowed, so that the second is denied.
ANSWERS = {
    "/reference": {"answer": {"headers": ["reference"]}},
    "/seconds": {"answer": {"headers": ["x-ratelimit"]}},
    "/epoch": {"answer": {"headers": ["x-ratelimit-epoch"]}},
    "/windows": {"answer": {"headers": ["x-ratelimit-windows"]}},
    "/ietf": {"answer": {"headers": ["ietf", "retry-after"]}},
    "/jitter": {"answer": {"headers": ["retry-after"], "retry_jitter": "5s"}},
    "/inherits": {},
    "/none": {"answer": {"headers": []}},
    "/state": {"answer": {"headers": []}, "warn_at": 0.8},
    "/json": {"answer": {"headers": []}, "deny": {"format": "json"}},
    "/problem": {"answer": {"headers": ["ietf"]}, "deny": {"format": "problem+json"}},
    "/template": {
        "answer": {"headers": []},
        "deny": {
            "body": '{"say": "try ${rule} again in ${retry_after} s"}',
            "content_type": "application/vnd.acme+json",
            "headers": {"X-Why": "${limit} a ${window}"},
        },
    },
}
RULES = {
    "domain": "edge",
    "answer": {"headers": ["rule"]},
    "descriptors": [
        {
            "key": "path",
            "value": path,
            "limits": [{"unit": "day", "requests_per_unit": 1}, {"unit": "year", "requests_per_unit": 100}],
            **rule,  # type: ignore[dict-item]
        }
        for path, rule in ANSWERS.items()
    ],
}
RULE_METADATA = "envoy.filters.http.ratelimit:rule"
LOG_FORMAT = " ".join(
    [
        "%RESPONSE_CODE%",
        "%REQ(:PATH)%",
        *(f"%DYNAMIC_METADATA({RULE_METADATA}:{word})%" for word in ("path", "window", "limit")),
    ]
)


class Answered(NamedTuple):
    status: int
    headers: list[tuple[str, str]]  # in order of arrival, only those of this service
    body: str
    between: tuple[float, float]  # time of the request and of the response

    def left_s(self, window_s: int) -> set[int]:
        """Return the valid numbers of whole seconds to the end of a window: the service uses this machine's clock."""
        first, last = (-int(-(window_s - moment % window_s) // 1) for moment in self.between)
        return set(range(last, first + 1))

    def end_s(self, window_s: int) -> int:
        return int(self.between[0] // window_s + 1) * window_s


@pytest.fixture(scope="module")
def proxy(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyServer]:
    directory = tmp_path_factory.mktemp("answers")
    rules = directory / "rules.yaml"
    rules.write_text(yaml.safe_dump(RULES))
    with Service({"RLS_RULES": rules}) as service, logging_envoy(upstream, service, directory / "log") as proxy:
        yield proxy


def logging_envoy(upstream: Upstream, service: Service, log: Path) -> EnvoyServer:
    """The plain sandbox with an access log and without Envoy's own x-ratelimit headers, which would duplicate ours."""
    document = yaml.safe_load((SANDBOXES / "rls-http" / "envoy.yaml").read_text())
    (listener,) = document["static_resources"]["listeners"]
    listener["filter_chains"][0]["filters"][0]["typed_config"]["access_log"] = [
        {
            "name": "envoy.access_loggers.file",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                "path": str(log),
                "log_format": {"text_format_source": {"inline_string": f"{LOG_FORMAT}\n"}},
            },
        }
    ]
    config = log.with_name("envoy.yaml")
    config.write_text(yaml.safe_dump(document))
    where = {8000: upstream.port, 8081: service.grpc_port}
    return EnvoyServer(config, where, {"enable_x_ratelimit_headers": "OFF"})


def ask(proxy: EnvoyServer, path: str) -> Answered:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    sent_s = time.time()
    connection.request("GET", path)
    answer = connection.getresponse()
    headers = [(name, value) for name, value in answer.getheaders() if name.startswith(COMPARED_HEADERS)]
    answered = Answered(answer.status, headers, answer.read().decode(), (sent_s, time.time()))
    connection.close()
    return answered


def twice(proxy: EnvoyServer, path: str) -> tuple[Answered, Answered]:
    wait_for_time_left(DAY_S)
    passed, denied = ask(proxy, path), ask(proxy, path)
    assert (passed.status, denied.status) == (200, 429)
    assert passed.headers.pop(headers(passed).index("content-type")) == ("content-type", "text/plain"), "the upstream's"
    return passed, denied


def headers(answered: Answered) -> list[str]:
    return [name for name, _ in answered.headers]


@pytest.mark.parametrize(("path", "prefix"), [("/reference", "ratelimit"), ("/seconds", "x-ratelimit")])
def test_limit_remaining_and_seconds(proxy: EnvoyServer, path: str, prefix: str) -> None:
    for answered in twice(proxy, path):
        reset = int(answered.headers[2][1])
        assert answered.headers == [
            (f"{prefix}-limit", "1"),
            (f"{prefix}-remaining", "0"),
            (f"{prefix}-reset", str(reset)),
        ]
        assert reset in answered.left_s(DAY_S)


def test_limit_remaining_and_epoch(proxy: EnvoyServer) -> None:
    for answered in twice(proxy, "/epoch"):
        assert answered.headers == [
            ("x-ratelimit-limit", "1"),
            ("x-ratelimit-remaining", "0"),
            ("x-ratelimit-reset", str(answered.end_s(DAY_S))),
        ]


def test_headers_of_every_window(proxy: EnvoyServer) -> None:
    for answered in twice(proxy, "/windows"):
        day, year = (
            datetime.fromtimestamp(answered.end_s(window_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            for window_s in (DAY_S, YEAR_S)
        )
        assert answered.headers == [
            ("x-ratelimit-limit-day", "1"),
            ("x-ratelimit-remaining-day", "0"),
            ("x-ratelimit-reset-day", day),
            ("x-ratelimit-limit-year", "100"),
            ("x-ratelimit-remaining-year", "99"),
            ("x-ratelimit-reset-year", year),
        ]


def test_ietf_fields_and_retry_after(proxy: EnvoyServer) -> None:
    day, year = "edge.path_/ietf:day", "edge.path_/ietf:year"
    policy = f'"{day}";q=1;w=86400, "{year}";q=100;w=31536000'
    passed, denied = twice(proxy, "/ietf")

    limits = dict(structured(passed, "ratelimit"))
    to_day, to_year = limits[day]["t"], limits[year]["t"]
    assert passed.headers == [
        ("ratelimit-policy", policy),
        ("ratelimit", f'"{day}";r=0;t={to_day}, "{year}";r=99;t={to_year}'),
    ]
    assert to_day in passed.left_s(DAY_S)
    assert to_year in passed.left_s(YEAR_S)

    ((name, parameters),) = structured(denied, "ratelimit")
    retry = parameters["t"]
    assert denied.headers[:3] == [
        ("ratelimit-policy", policy),
        ("ratelimit", f'"{day}";r=0;t={retry}'),
        ("retry-after", str(retry)),
    ]
    assert name == day
    assert retry in denied.left_s(DAY_S)
    assert structured(denied, "ratelimit-policy") == [
        (day, {"q": 1, "w": DAY_S}),
        (year, {"q": 100, "w": YEAR_S}),
    ]


def structured(answered: Answered, name: str) -> list[tuple[str, dict[str, int]]]:
    parsed: list[tuple[str, dict[str, int]]] = http_sf.parse(dict(answered.headers)[name].encode(), tltype="list")  # type: ignore[assignment]
    return parsed


def test_retry_after_with_jitter_is_in_range(proxy: EnvoyServer) -> None:
    passed, denied = twice(proxy, "/jitter")
    assert passed.headers == []
    assert headers(denied) == ["retry-after"]
    exact = denied.left_s(DAY_S)
    assert min(exact) <= int(denied.headers[0][1]) <= max(exact) + 5


def test_rule_without_headers_uses_the_domains_choice(proxy: EnvoyServer) -> None:
    for answered in twice(proxy, "/inherits"):
        assert answered.headers == [("x-ratelimit-rule", "edge.path_/inherits")]


def test_rule_may_choose_no_headers(proxy: EnvoyServer) -> None:
    assert [answered.headers for answered in twice(proxy, "/none")] == [[], []]


def test_state_header_is_sent(proxy: EnvoyServer) -> None:
    passed, denied = twice(proxy, "/state")
    assert passed.headers == [("x-ratelimit-state", "warning")]
    assert denied.headers == [("x-ratelimit-state", "throttled")]


def test_json_body(proxy: EnvoyServer) -> None:
    passed, denied = twice(proxy, "/json")
    assert (passed.headers, passed.body) == ([], "hello from the upstream\n")
    assert denied.headers == [("content-type", "application/json")]
    body = json.loads(denied.body)
    retry = body["error"]["details"]["retry_after"]
    assert retry in denied.left_s(DAY_S)
    now, end = datetime.fromisoformat(body["timestamp"]), datetime.fromtimestamp(denied.end_s(DAY_S), UTC)
    assert int(denied.between[0]) <= now.timestamp() <= denied.between[1]
    assert body == {
        "error": {
            "code": 429,
            "message": "Rate limit exceeded: day limit reached",
            "details": {
                "limit_type": "day",
                "day_used": 1,
                "year_used": 1,
                "reset_at": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "retry_after": retry,
            },
        },
        "timestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def test_problem_body_names_policies_as_the_header_does(proxy: EnvoyServer) -> None:
    _, denied = twice(proxy, "/problem")
    assert dict(denied.headers)["content-type"] == "application/problem+json"
    body = json.loads(denied.body)
    assert body["type"] == "https://iana.org/assignments/http-problem-types#quota-exceeded"
    assert body["violated-policies"] == [name for name, _ in structured(denied, "ratelimit")]
    assert (body["title"], body["status"]) == ("Quota Exceeded", 429)


def test_body_and_headers_from_templates(proxy: EnvoyServer) -> None:
    passed, denied = twice(proxy, "/template")
    assert passed.headers == []
    assert denied.headers == [("content-type", "application/vnd.acme+json"), ("x-why", "1 a day")]
    retry = int(json.loads(denied.body)["say"].split()[-2])
    assert denied.body == f'{{"say": "try edge.path_/template again in {retry} s"}}'
    assert retry in denied.left_s(DAY_S)


def test_access_log_contains_the_denying_rule(upstream: Upstream, tmp_path: Path) -> None:
    rules, log = tmp_path / "rules.yaml", tmp_path / "access.log"
    limits = [{"unit": "day", "requests_per_unit": 1, "name": "daily"}, {"unit": "year", "requests_per_unit": 100}]
    rules.write_text(yaml.safe_dump({"domain": "edge", "descriptors": [{"key": "path", "limits": limits}]}))
    with Service({"RLS_RULES": rules}) as service, logging_envoy(upstream, service, log) as proxy:
        wait_for_time_left(DAY_S)
        assert [ask(proxy, "/logged").status for _ in range(2)] == [200, 429]
        proxy.stop()  # flushes the access log
    assert log.read_text().splitlines() == ["200 /logged - - -", "429 /logged edge.path day daily"]
