"""`explain`: match attempts, the matched rule and its counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratelimit_rls.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run


def test_explain_prints_match_attempts_limit_and_counter(run: Run, rules: Path) -> None:
    ended = run("explain", rules, "--domain", "edge", "--descriptor", "plan=free,user=alice")
    assert ended.code == ExitCode.DONE
    assert ended.out == (
        "domain edge · descriptor (plan=free, user=alice)\n"
        "  plan=free     exact 'free'     matched        api.yaml:3:5\n"
        "                key only 'plan'  not tried      api.yaml:12:5\n"
        "    user=alice  exact 'alice'    none\n"
        "                key only 'user'  matched        api.yaml:6:9\n"
        "rule edge.plan_free.user\n"
        "limit 10/minute gcra, burst 5, charge admitted\n"
        "counter rl:{edge/plan=free/user=alice}:gcra:60  slot 3497\n"
    )


WATCHED = """\
domain: edge
deny: {format: json}
ext_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}
descriptors:
  - key: user
    action: throttle
    warn_at: 0.9
    penalty: {after: 2, multipliers: [1, 5]}
    answer: {headers: [rule]}
    rate_limit: {unit: minute, requests_per_unit: 10}
"""


def test_explain_prints_penalty_warning_and_response_policy(run: Run, rules: Path) -> None:
    rules.write_text(WATCHED)
    ended = run("explain", rules, "--domain", "edge", "--descriptor", "user=alice")
    assert ended.out.splitlines()[-6:] == [
        "rule edge.user",
        "limit 10/minute leaky_bucket, burst 1, charge admitted, throttle up to 1s, penalty x1 x5 after 2 within 1h, "
        "warn at 90 %",
        "answer headers rule, deny 429 json",
        "counter rl:{edge/user=alice}:leaky_bucket:60  slot 12790",
        "penalty rl:{edge/user=alice}:penalty  slot 12790",
        "warning rl:{edge/user=alice}:warning  slot 12790",
    ]

    result = json.loads(run("explain", rules, "--domain", "edge", "--descriptor", "user=a", "--format", "json").out)
    assert result["ext_authz"] is True
    (descriptor,) = result["descriptors"]
    assert (descriptor["max_delay"], descriptor["warn_at"]) == ("1s", 0.9)
    assert descriptor["penalty"] == {"within": "1h", "after": 2, "multipliers": [1, 5]}
    assert (descriptor["answer"], descriptor["deny"]) == ({"headers": ["rule"]}, {"format": "json"})
    assert descriptor["storage_keys"] == ["rl:{edge/user=a}:leaky_bucket:60"]
    assert descriptor["watcher_keys"] == ["rl:{edge/user=a}:penalty", "rl:{edge/user=a}:warning"]


HOT = """\
domain: edge
shard_by: domain
descriptors:
  - key: user
    on_store_failure: deny
    descriptors:
      - key: key
        hot: {lease: 100ms}
        rate_limit: {unit: minute, requests_per_unit: 10}
"""


def test_explain_prints_leases_store_failure_policy_and_sharding(run: Run, rules: Path) -> None:
    rules.write_text(HOT)
    requested = ("explain", rules, "--domain", "edge", "--entry", "user=a", "--entry", "key=b")
    assert run(*requested).out.splitlines()[-2:] == [
        "limit 10/minute fixed_window, charge admitted, leases of 100ms, on store failure deny",
        "counter rl:{edge}/user=a/key=b:fixed_window:60  slot 3202",
    ]

    (result,) = json.loads(run(*requested, "--format", "json").out)["descriptors"]
    assert (result["hot"], result["on_store_failure"]) == ({"lease": "100ms"}, "deny")
    assert result["storage_keys"] == ["rl:{edge}/user=a/key=b:fixed_window:60"]

    (result,) = json.loads(run(*requested[:-2], "--format", "json").out)["descriptors"]
    assert (result["hot"], result["on_store_failure"]) == (None, None)


def test_explain_escapes_control_characters(run: Run, rules: Path) -> None:
    ended = run("explain", rules, "--domain", "ed\nge", "--entry", "color=a\nb\x1b[31m")
    assert ended.out.splitlines() == [
        r"domain ed\nge · descriptor (color=a\nb\x1b[31m)",
        r"no rules for domain 'ed\nge': no limit applies",
    ]
    ended = run("explain", rules, "--domain", "edge", "--entry", "path=/v1/\n\x1b[31m")
    lines = ended.out.splitlines()
    assert lines[1].split("  ")[:3] == ["", r"path=/v1/\n\x1b[31m", r"exact '/v1/\n\x1b[31m'"]
    assert ended.out.replace("\n", "").isprintable()
    assert "counter rl:{edge/path=%2Fv1%2F%0A%1B[31m}:fixed_window:1  slot 9448" in lines


def test_descriptors_of_one_request_can_replace_each_other(run: Run, rules: Path) -> None:
    ended = run("explain", rules, "--domain", "edge", "--descriptor", "path=/v1/x", "--descriptor", "plan=gold")
    first, second = ended.out.split("\n\n")
    assert "not counted: another descriptor of this request replaces 'five'" in first
    assert "counter" not in first
    assert "counter rl:{edge/plan=gold}:fixed_window:60  slot 8791" in second


@pytest.mark.parametrize(
    ("domain", "descriptor", "conclusion"),
    [
        ("edge", "plan=free", "no rate_limit"),
        ("edge", "color=red", "no limit applies"),
        ("nowhere", "plan=free", "no rules for domain 'nowhere'"),
        ("edge", "staff=me", "unlimited"),
    ],
)
def test_explain_prints_why_a_descriptor_is_not_limited(
    run: Run, rules: Path, domain: str, descriptor: str, conclusion: str
) -> None:
    ended = run("explain", rules, "--domain", domain, "--descriptor", descriptor)
    assert ended.code == ExitCode.DONE
    assert conclusion in ended.out
    assert "counter" not in ended.out


def test_entry_values_can_contain_commas_and_equals_signs(run: Run, rules: Path) -> None:
    result = json.loads(run("explain", rules, "--domain", "edge", "--entry", "path=/v1/a,b=c", "--format", "json").out)[
        "descriptors"
    ][0]
    assert result["descriptor"] == [["path", "/v1/a,b=c"]]
    assert result["rule"] == "edge.path_/v1/*"
    (limit,) = result["limits"]
    assert (limit["requests_per_unit"], limit["unit"], limit["algorithm"]) == (5, "second", "fixed_window")
    assert result["storage_keys"] == ["rl:{edge/path=%2Fv1%2Fa,b%3Dc}:fixed_window:1"]
    assert [attempt["outcome"] for attempt in result["levels"][0]["attempts"]] == ["no such value", "matched", "none"]


def test_counter_key_has_the_cache_key_prefix(run: Run, rules: Path) -> None:
    ended = run("explain", rules, "--domain", "edge", "--descriptor", "plan=x", "--cache-key-prefix", "eu-")
    assert "counter eu-rl:{edge/plan=x}:fixed_window:60  slot 7461\n" in ended.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "no descriptor: give --descriptor key=value,key=value or --entry key=value"),
        (("--descriptor", "path=/a,b"), "'b' in 'path=/a,b' is not key=value; a value with a comma needs --entry"),
        (("--descriptor", "path"), "'path' in 'path' is not key=value"),
        (("--entry", "=x"), "'=x' in '=x' is not key=value"),
    ],
)
def test_invalid_descriptor_is_a_usage_error(run: Run, rules: Path, arguments: tuple[str, ...], sentence: str) -> None:
    ended = run("explain", rules, "--domain", "edge", *arguments)
    assert ended.code == ExitCode.USAGE
    assert sentence in ended.err
