"""Errors in keys that envoyproxy/ratelimit does not have: position, message, remedy."""

from __future__ import annotations

import pytest

from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents

HEAD = "domain: edge\ndescriptors:\n  - key: user\n"
LIMIT = "rate_limit: {unit: minute, requests_per_unit: 5}"
BUCKET = "rate_limit: {unit: minute, requests_per_unit: 5, algorithm: gcra}"


def problems(text: str) -> list[str]:
    with pytest.raises(RulesError) as raised:
        compile_documents({"f.yaml": text.encode()})
    return [f"{one.line}:{one.column} {one.message}" for one in raised.value.problems]


# On a descriptor with a limit, in line 4.
BESIDE_A_LIMIT = {
    "penalty: 3": "4:14 3 is not a mapping; its keys are within, after, multipliers",
    "penalty: {whithin: 1h}": "4:15 config error, unknown key 'whithin'; did you mean 'within'?",
    "penalty: {after: 1, after: 2}": "4:25 'after' is written twice",
    "penalty: {within: 721h}": "4:23 within: 721h is not between 1s and 720h",
    "penalty: {within: 999ms}": "4:23 within: 999ms is not between 1s and 720h",
    "penalty: {within: 31d}": "4:23 within: 31d is not between 1s and 720h",
    "penalty: {within: 30 d}": "4:23 within: 30 d is not a duration; use a number with a unit, e.g. 250ms",
    "penalty: {after: 0}": "4:22 after: 0 is not a whole number from 1 on",
    "penalty: {after: 1001}": "4:22 after: 1001 is more than the 1000 violations that are recorded per client",
    "penalty: {after: 997}": "4:14 penalty: after 997 and 4 multipliers would count 1001 violations; at most 1000",
    "penalty: {multipliers: []}": "4:28 multipliers: must be a list of 1 to 16 whole numbers, not of 0",
    f"penalty: {{multipliers: [{'1, ' * 17}]}}": "4:28 multipliers: must be a list of 1 to 16 whole numbers, not of 17",
    "penalty: {multipliers: 2}": "4:28 multipliers: 2 is not a list",
    "penalty: {multipliers: [1, 1.5]}": "4:32 multipliers: 1.5 is not a whole number from 1 on",
    "penalty: {multipliers: [0, 1]}": "4:29 multipliers: 0 is not a whole number from 1 on",
    "penalty: {multipliers: [1, 10001]}": "4:28 multipliers: 10001 is too large; must be at most 10,000",
    "penalty: {multipliers: [1, 4, 2]}": "4:28 multipliers must not decrease",
    "warn_at: 1.0": "4:14 warn_at: 1.0 is not a fraction of the limit; must be a number above 0.1 and below 1",
    "warn_at: 0.1": "4:14 warn_at: 0.1 is not a fraction of the limit",
    "warn_at: -0.5": "4:14 warn_at: -0.5 is not a fraction of the limit",
    "warn_at: 80": "4:14 warn_at: 80 is not a fraction of the limit",
    "warn_at: '0.8'": "4:14 warn_at: 0.8 is not a fraction of the limit",
    "warn_at: 0.8001": "4:14 warn_at: 0.8001 is not a fraction of the limit",
    "warn_at: .nan": "4:14 warn_at: .nan is not a fraction of the limit",
    "warn_at: [0.8]": "4:14 warn_at: a list is not a fraction of the limit",
    "on_store_failure: refuse": "4:23 on_store_failure 'refuse' is not one of deny, error, local, allow",
    "on_store_failure: Alow": "4:23 on_store_failure 'Alow' is not one of deny, error, local, allow; did you mean "
    "'allow'?",
    "on_store_failure: ''": "4:23 on_store_failure '' is not one of deny, error, local, allow",
    "on_store_failure: [deny]": "4:24 config error, yaml file contains list of type other than map: deny; a list",
    "hot: 100ms": "4:10 100ms is not a mapping; its keys are lease",
    "hot: true": "4:10 true is not a mapping; its keys are lease",
    "hot: {}": "4:10 'lease' is missing; write 'lease: 100ms'",
    "hot: {lease: }": "4:10 'lease' is missing; write 'lease: 100ms'",
    "hot: {leases: 1s}": "4:11 config error, unknown key 'leases'; did you mean 'lease'?",
    "hot: {lease: 1s, lease: 1s}": "4:22 'lease' is written twice",
    "hot: {lease: 999us}": "4:18 lease: 999us is not between 1ms and 10s",
    "hot: {lease: 10001ms}": "4:18 lease: 10001ms is not between 1ms and 10s",
    "hot: {lease: 100}": "4:18 lease: 100 is not a duration; use a number with a unit",
    "hot: {lease: [1s]}": "4:18 lease: a list is not text",
    "hot: {split: 4}": "4:11 'split' is not needed: leases spare the one node",
    "hot: {lease: 1s, split: 4}": "4:22 'split' is not needed: leases spare the one node that counts a hot key as well "
    "as several counters would, and keep one that is exact; use 'lease'",
    "max_delay: 200ms": "4:16 max_delay has no meaning without 'action: throttle'",
    "answer: ietf": "4:13 ietf is not a mapping; its keys are headers, retry_jitter",
    "answer: {headers: ietf}": "4:23 headers: ietf is not a list",
    "answer: {headers: [ietff]}": "4:24 headers: ietff is not one of reference, x-ratelimit, x-ratelimit-epoch, "
    "x-ratelimit-windows, ietf, retry-after, rule; did you mean 'ietf'?",
    "answer: {headers: [{ietf: 1}]}": "4:24 headers: a mapping is not one of reference",
    "answer: {headers: [ietf, rule, ietf]}": "4:36 headers: ietf is already in the list",
    "answer: {headers: [x-ratelimit, x-ratelimit-epoch]}": "4:37 headers: x-ratelimit and x-ratelimit-epoch have the "
    "same names",
    "answer: {retry_jitter: 61m}": "4:28 retry_jitter: 61m is not between 0s and 1h",
    "deny: no": "4:11 no is not a mapping; its keys are format, body, content_type, headers, status",
    "deny: {format: xml}": "4:20 format: xml is not one of json, problem+json",
    "deny: {format: text}": "4:20 format: text is not one of json, problem+json; for a text of your own write 'body",
    "deny: {format: json, body: sorry}": "4:20 'deny' cannot have both 'format' and 'body'",
    "deny: {body: [sorry]}": "4:18 body: a list is not text",
    "deny: {body: 'sorry, ${user}'}": "4:18 body: the template asks for '${user}'; it can ask for domain, rule",
    "deny: {body: 'in ${retry_after s'}": "4:18 body: the template has a '${' without its '}'",
    f"deny: {{body: {'ü' * 8193}}}": "4:18 body is too long; must be at most 16 KiB",
    "deny: {format: json, content_type: text/html}": "4:40 content_type has no meaning without 'body'",
    "deny: {body: sorry, content_type: html}": "4:39 content_type: 'html' is not a media type",
    'deny: {body: sorry, content_type: "text/html\\r\\nx: y"}': "4:39 content_type: 'text/html\\r\\nx: y' is not a",
    "deny: {status: 200}": "4:20 status: 200 is not the status of an error; must be a whole number from 400 to 599",
    "deny: {status: '429'}": "4:20 status: 429 is not the status of an error; must be a whole number from 400 to "
    "599, without quotes",
    "deny: {headers: [x-a]}": "4:21 headers: a list is not a mapping of names to texts",
    "deny: {headers: {x a: b}}": "4:22 headers: 'x a' is not the name of a header",
    "deny: {headers: {':status': '200'}}": "4:22 headers: ':status' is not the name of a header",
    "deny: {headers: {Connection: close}}": "4:22 headers: 'Connection' is set by the HTTP connection",
    "deny: {headers: {host: a}}": "4:22 headers: 'host' is set by the HTTP connection",
    "deny: {headers: {content-length: 0}}": "4:22 headers: 'content-length' is set by the HTTP connection",
    "deny: {headers: {Content-Type: a/b}}": "4:22 headers: the content type cannot be set here; write 'content_type'",
    "deny: {headers: {x-a: b, X-A: c}}": "4:30 headers: 'X-A' is written twice",
    'deny: {headers: {x-a: "b\\r\\nx: c"}}': "4:27 header 'x-a': the text has a line break",
    'deny: {headers: {x-a: "b\\u0085c"}}': "4:27 header 'x-a': the text has a line break",
    "deny: {headers: {x-a: ' b'}}": "4:27 header 'x-a': the text has a line break, another control character or a "
    "space at one end",
    "deny: {headers: {x-a: '${retry-after}'}}": "4:27 header 'x-a': the template asks for '${retry-after}'",
    "deny: {headers: {x-a: }}": "4:27 header 'x-a': null is not text",
    "deny: {headers: {x-a: [b]}}": "4:27 header 'x-a': a list is not text",
    f"deny: {{headers: {{x-a: {'b' * 4097}}}}}": "4:27 header 'x-a': the text is too long; must be at most 4 KiB",
    f"deny: {{headers: {{{', '.join(f'x-{n}: a' for n in range(33))}}}}}": "4:21 headers: there are 33; "
    "must be at most 32",
}


@pytest.mark.parametrize("written", BESIDE_A_LIMIT, ids=lambda written: written[:50])
def test_error_has_position_and_message(written: str) -> None:
    (problem,) = problems(f"{HEAD}    {written}\n    {LIMIT}\n")

    assert problem.startswith(BESIDE_A_LIMIT[written])


@pytest.mark.parametrize(
    "written",
    [written for written in BESIDE_A_LIMIT if written.startswith(("answer", "deny"))],
    ids=lambda one: one[:50],
)
def test_domain_answer_and_deny_are_checked_strictly(written: str) -> None:
    (problem,) = problems(f"domain: edge\n{written}\n")

    column, _, sentence = BESIDE_A_LIMIT[written].removeprefix("4:").partition(" ")
    assert problem.startswith(f"2:{int(column) - 4} {sentence}")


@pytest.mark.parametrize("key", ["on_store_failure", "shard_by", "charge"])
def test_domain_enum_settings_are_checked_strictly(key: str) -> None:
    (problem,) = problems(f"domain: edge\n{key}: domaine\n")

    assert problem.startswith(f"2:{len(key) + 3} {key} 'domaine' is not one of ")
    assert problem.endswith("; did you mean 'domain'?") == (key == "shard_by")


HOT = "hot: {lease: 100ms}"
TAKEN_BEFORE = (
    "cannot be used with hot, where hits are leased before the calls arrive, so that the store does not know which"
)

CONTRADICTIONS = {
    (
        HOT,
        "charge: always",
        LIMIT,
    ): "5:13 charge: always cannot be used with hot, where hits are leased before the calls arrive",
    (HOT, "shadow_mode: true", LIMIT): f"5:18 shadow_mode {TAKEN_BEFORE}",
    (HOT, "quota_mode: true", LIMIT): f"5:17 quota_mode {TAKEN_BEFORE}",
    (HOT, "action: log_only", LIMIT): f"5:13 action: log_only {TAKEN_BEFORE}",
    (HOT, "action: throttle", BUCKET): f"5:13 action: throttle {TAKEN_BEFORE}",
    (HOT, "action: allow"): "5:13 hot has no effect with action: allow, since no hits are counted that could be leased",
    (HOT, "penalty: {}", LIMIT): f"5:14 penalty {TAKEN_BEFORE}",
    (HOT, "warn_at: 0.8", LIMIT): f"5:14 warn_at {TAKEN_BEFORE}",
    (HOT, "rate_limit: {unlimited: true}"): "5:29 hot has no effect with unlimited, since no hits are counted",
    (HOT, "enabled: false", "warn_at: 0.8", LIMIT): f"6:14 warn_at {TAKEN_BEFORE}",
    ("hot: {lease: 501ms}", "rate_limit: {unit: second, requests_per_unit: 5}"): "4:18 lease: 501ms is more than half "
    "of a window of 1s, so that leased hits could outlive the window; must be at most 500ms, or choose",
    (
        "penalty: {}",
        "quota_mode: true",
        LIMIT,
    ): "4:14 penalty has no effect with quota_mode, which denies no call by itself",
    ("penalty: {}", "shadow_mode: true", LIMIT): "4:14 penalty has no effect with shadow_mode",
    ("penalty: {}", "action: log_only", LIMIT): "4:14 penalty has no effect with action: log_only",
    ("action: throttle", "max_delay: 61s", BUCKET): "5:16 max_delay: 61s is not between 1ms and 1m",
    ("action: throttle", "max_delay: 999us", BUCKET): "5:16 max_delay: 999us is not between 1ms and 1m",
    ("action: throttle", "max_delay: 200", BUCKET): "5:16 max_delay: 200 is not a duration",
    ("action: throttle",): "4:13 action: throttle needs a rate_limit, or one among limits, with algorithm token_bucket",
    ("action: throttle", "rate_limit: {unlimited: true}"): "4:13 action: throttle needs a rate_limit",
    ("action: throttle", f"{LIMIT[:-1]}, algorithm: sliding_log}}"): "4:13 action: throttle needs a rate_limit",
    (
        "action: throttle",
        "rate_limit: {unit: day, requests_per_unit: 5, calendar: true}",
    ): "4:13 action: throttle needs",
    ("action: throttle", "limits: [{unit: day, requests_per_unit: 5}]"): "4:13 action: throttle needs a rate_limit",
    ("action: throttle", "enabled: false"): "4:13 action: throttle needs a rate_limit",
    ("action: throttle", "charge: always", BUCKET): "5:13 charge: always cannot be used with action: throttle",
    ("action: throttle", "shadow_mode: true", BUCKET): "5:18 action: throttle has no effect with shadow_mode",
    ("action: throttle", "quota_mode: true", BUCKET): "5:17 action: throttle has no effect with quota_mode",
}


@pytest.mark.parametrize("lines", CONTRADICTIONS, ids=lambda lines: ", ".join(lines)[:60])
def test_conflicting_keys_are_rejected(lines: tuple[str, ...]) -> None:
    (problem,) = problems(HEAD + "".join(f"    {line}\n" for line in lines))

    assert problem.startswith(CONTRADICTIONS[lines])


def test_hot_in_a_domain_with_charge_always_is_rejected() -> None:
    (problem,) = problems(f"charge: always\n{HEAD}    {HOT}\n    {LIMIT}\n")

    assert problem.startswith("5:10 hot cannot be used in a domain with charge: always")
    assert "write 'charge: admitted' beside hot" in problem


ONCE = {
    "a lease that is too long is not missing": ("hot: {lease: 11s}", LIMIT),
    "nor compared with a limit that cannot be read": ("hot: {lease: 5s}", "rate_limit: {unit: fortnight}"),
    "an unknown charge is not a wrong one": (HOT, "charge: alway", LIMIT),
    "an unknown action neither": (HOT, "action: throttl", LIMIT),
    "unlimited among limits is told by itself": (HOT, "limits: [{unlimited: true}]"),
    "an unknown action does not make max_delay wrong": ("action: thrott", "max_delay: 1s", BUCKET),
    "a limit that cannot be read may have been a queue": ("action: throttle", "rate_limit: {unit: fortnight}"),
    "so may one that is no mapping": ("action: throttle", "rate_limit: 5"),
}


@pytest.mark.parametrize("lines", ONCE.values(), ids=ONCE.keys())
def test_one_mistake_is_reported_once(lines: tuple[str, ...]) -> None:
    assert len(problems(HEAD + "".join(f"    {line}\n" for line in lines))) == 1


MAPPING = "ext_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}"


@pytest.mark.parametrize("block", ["answer: {headers: [ietf]}", "deny: {format: json}", MAPPING])
def test_domain_block_in_two_files_is_an_error(block: str) -> None:
    files = {"a.yaml": f"domain: d\n{block}".encode(), "b.yaml": f"domain: d\n{block}".encode()}
    key, _, _ = block.partition(":")

    with pytest.raises(RulesError, match=rf"b\.yaml:2:\d+: .*domain 'd' has '{key}' at a\.yaml:2:\d+ already"):
        compile_documents(files, merge_domains=True)


def test_ext_authz_error_has_its_position() -> None:
    (problem,) = problems(
        "domain: edge\next_authz:\n  trusted: 1\n  descriptors: [{entries: [{key: a, from: path}]}]\n"
    )

    assert problem.startswith("3:3 config error, unknown key 'trusted'; did you mean 'trusted_proxies'?")
