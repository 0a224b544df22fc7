"""The `request` of a step: descriptors built by the domain's mapping, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.errors import RulesError
from ratelimit_rls.simulation.runner import run_suite
from ratelimit_rls.simulation.suite import read_suite

RULES = """\
domain: edge
ext_authz:
  descriptors:
    - entries: [{key: remote_address, from: client_ip}]
    - entries: [{key: method, from: method}, {key: host, from: host}, {key: scheme, from: scheme}]
    - entries: [{key: page, query: page}, {key: path, from: path}]
    - entries: [{key: api, header: x-api}]
    - entries: [{key: route, context: name}]
    - entries: [{key: sub, metadata: {namespace: jwt, path: [payload, sub]}}]
    - {entries: [{key: authority, header: ":authority"}], hits: 3}
descriptors:
  - {key: remote_address, rate_limit: {unit: minute, requests_per_unit: 2}}
  - key: method
    descriptors: [{key: host, descriptors: [{key: scheme, rate_limit: {unlimited: true}}]}]
  - {key: page, descriptors: [{key: path, rate_limit: {unlimited: true}}]}
  - {key: api, rate_limit: {unit: minute, requests_per_unit: 2}}
  - {key: route, rate_limit: {unlimited: true}}
  - {key: sub, rate_limit: {unlimited: true}}
  - {key: authority, rate_limit: {unit: minute, requests_per_unit: 10}}
"""
HEAD = "descriptors: rules.yaml\ndomain: edge\ntests:\n  - name: one\n    steps:\n"


def write(directory: Path, *steps: str) -> Path:
    (directory / "rules.yaml").write_text(RULES)
    file = directory / "a.test.yaml"
    file.write_text(HEAD + "".join(f"      - {step}\n" for step in steps))
    return file


def descriptors_of(directory: Path, request: str) -> list[str]:
    """Return the descriptors that a request results in."""
    (case,) = read_suite(write(directory, f"{{request: {request}, expect: ok}}")).cases
    return [",".join(f"{key}={value}" for key, value in one.entries) for one in case.steps[0].descriptors]


def problems(directory: Path, step: str) -> list[str]:
    with pytest.raises(RulesError) as raised:
        read_suite(write(directory, step))
    return [f"{one.line}:{one.column} {one.message}" for one in raised.value.problems]


REQUESTS = {
    "{}": [],
    "{peer: '::ffff:192.0.2.1'}": ["remote_address=192.0.2.1"],
    "{host: API.example.com, scheme: https}": [
        "method=GET,host=api.example.com,scheme=https",
        "authority=API.example.com",
    ],
    "{method: POST, path: '/users/7?x=1&page=2', host: a, scheme: http}": [
        "method=POST,host=a,scheme=http",
        "page=2,path=/users/7",
        "authority=a",
    ],
    "{headers: {X-Api: v2}}": ["api=v2"],
    "{headers: {':authority': b}, host: a}": ["authority=b"],
    "{headers: {x-api: ''}}": [],
    "{context: {name: a, other: b}}": ["route=a"],
    "{metadata: {jwt: {payload: {sub: alice}}}}": ["sub=alice"],
    "{metadata: {jwt: {payload: {sub: 7}}}}": ["sub=7"],
    "{metadata: {jwt: {payload: {sub: 0x10}}}}": ["sub=16"],
    "{metadata: {jwt: {payload: {sub: 2.0}}}}": ["sub=2"],
    "{metadata: {jwt: {payload: {sub: 2.5}}}}": ["sub=2.5"],
    "{metadata: {jwt: {payload: {sub: yes}}}}": ["sub=true"],
    "{metadata: {jwt: {payload: {sub: 'yes'}}}}": ["sub=yes"],
    "{metadata: {jwt: {payload: {sub: null}}}}": [],
    "{metadata: {jwt: {payload: {sub: [a]}}}}": [],
    "{metadata: {jwt: {payload: alice}, other: {sub: a}}}": [],
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_mapping_builds_descriptors_from_the_request(tmp_path: Path, request_: str) -> None:
    assert descriptors_of(tmp_path, request_) == REQUESTS[request_]


STEPS = {
    "{request: 7, expect: ok}": "6:19 7 is not a mapping; its keys are method, path",
    "{request: {pth: /}, expect: ok}": "6:20 config error, unknown key 'pth'",
    "{request: {path: /, path: /}, expect: ok}": "6:29 'path' is written twice",
    "{request: {path: users}, expect: ok}": "6:26 path: users does not start with '/'",
    "{request: {peer: nobody}, expect: ok}": "6:26 peer: nobody is not an address",
    "{request: {method: [GET]}, expect: ok}": "6:28 method: a list is not text",
    "{request: {headers: [a]}, expect: ok}": "6:29 headers: a list is not a mapping of names to values",
    "{request: {headers: {a: {}}}, expect: ok}": "6:33 headers: a mapping is not text",
    "{request: {headers: {a b: c}}, expect: ok}": "6:29 headers: 'a b' is not the name of a header",
    "{request: {headers: {A: b, a: c}}, expect: ok}": "6:29 headers: 'a' is written twice; Envoy joins",
    "{request: {context: {a: b, a: c}}, expect: ok}": "6:36 context: 'a' is written twice",
    "{request: {context: {[a]: b}}, expect: ok}": "6:30 context: a list is not a name",
    "{request: {metadata: {jwt: sub}}, expect: ok}": "6:36 metadata of a namespace: sub is not a mapping",
    "{request: {peer: 192.0.2.1}, hits: 2, expect: ok}": "6:44 'hits' beside 'request'; the mapping",
    "{request: {peer: 192.0.2.1}, refund: true, expect: ok}": "6:46 'refund' beside 'request'",
    "{request: {}, expect: ok, remaining: 1}": "6:9 'remaining' for which descriptor (this request has none)?",
    "{request: {}, expect: ok, statuses: [{}]}": "6:45 statuses: 1 for 0 descriptors (this request has none)",
    "{request: {peer: 192.0.2.1, headers: {x-api: a}}, expect: ok, statuses: [{}]}": (
        "6:81 statuses: 1 for 2 descriptors (remote_address=192.0.2.1; api=a); write one for each"
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_request_error_has_its_position(tmp_path: Path, step: str) -> None:
    (message,) = problems(tmp_path, step)
    assert message.startswith(STEPS[step])


def test_rules_errors_are_reported_without_follow_up_errors(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, "{request: {peer: 192.0.2.1}, expect: ok, remaining: 1}", "{request: {peer: x}, expect: ok}")
    (tmp_path / "rules.yaml").write_text(RULES.replace("from: method", "from: methud"))

    with pytest.raises(RulesError) as raised:
        read_suite(file)

    assert [Path(problem.file).name for problem in raised.value.problems] == ["a.test.yaml", "rules.yaml"]


async def test_request_step_runs_like_a_descriptor_step(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "{request: {peer: 192.0.2.1}, times: 2, every: 1s, expect: ok, remaining: 0, rule: edge.remote_address}",
        "{at: 2s, request: {peer: 192.0.2.1}, expect: over_limit, retry_after: 58s}",
        "{at: 60s, request: {peer: 192.0.2.1, headers: {x-api: a}}, expect: ok, statuses: [{}, {rule: edge.api}]}",
        "{request: {headers: {':authority': a}}, times: 3, expect: ok, remaining: 1}",
        "{request: {}, times: 9, expect: ok}",
    )

    (outcome,) = await run_suite(read_suite(file))

    assert outcome.differences == ()
    assert {rule.path for rule in outcome.matched_rules} == {"edge.remote_address", "edge.api", "edge.authority"}


def test_request_without_descriptors_explains_the_mismatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", str(write(tmp_path, "{request: {}, expect: over_limit}"))]) == 1

    message = capsys.readouterr().out
    assert "expected  over_limit\n    got       ok\n" in message
    assert "domain edge · the mapping makes no descriptor from this request, so no limit applies" in message
