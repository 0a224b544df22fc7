from __future__ import annotations

import pytest

from ratelimit_rls.rules.compile import compile_documents

LIMIT = "rate_limit: {unit: second, requests_per_unit: 1}"


def _warnings(text: str) -> list[tuple[int, str, str]]:
    warnings = compile_documents({"f.yaml": text.encode()}).warnings
    assert all(warning.severity == "warning" for warning in warnings)
    return [(warning.line, warning.code, warning.message) for warning in warnings]


MISPLACED = {
    "shadow_mode under rate_limit": (
        f"domain: d\ndescriptors:\n  - key: k\n    {LIMIT[:-1]}, shadow_mode: true}}",
        "'shadow_mode' has no effect here; it belongs on a descriptor, beside 'key'",
    ),
    "unit on a descriptor": (
        "domain: d\ndescriptors:\n  - key: k\n    unit: minute",
        "'unit' has no effect here; it belongs inside 'rate_limit'",
    ),
    "domain on a descriptor": (
        "domain: d\ndescriptors:\n  - key: k\n    domain: e",
        "'domain' has no effect here; it belongs at the top of the file",
    ),
    "answer under rate_limit": (
        f"domain: d\ndescriptors:\n  - key: k\n    {LIMIT[:-1]}, answer: {{headers: [ietf]}}}}",
        "'answer' has no effect here; it belongs at the top of the file or on a descriptor, beside 'key'",
    ),
    "ext_authz on a descriptor": (
        "domain: d\ndescriptors:\n  - key: k\n    ext_authz: {anything: 1.5}",
        "'ext_authz' has no effect here; it belongs at the top of the file",
    ),
    "name on a descriptor": (
        "domain: d\ndescriptors:\n  - key: k\n    name: e",
        "'name' has no effect here; it belongs inside 'rate_limit' or inside 'replaces'",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISPLACED.values(), ids=MISPLACED.keys())
def test_a_known_key_without_effect_is_a_warning(text: str, message: str) -> None:
    assert _warnings(text) == [(4, "misplaced", message)]


# The earlier value, the later value (None: no value), and whether the later one can ever be met.
PATTERNS = [
    ("/a*", "/a/b*", False),
    ("/a/b*", "/a*", True),
    ("*", "x*", False),
    ("*a*", "*a*b*", False),
    ("*a*b*", "*b*a*", True),
    ("a*a", "a*", True),
    ("*ab*", "*a*b*", True),
    ("*a*b*", "*ab*", False),
    ("a*", "a*a", False),
    ("*", None, False),
    ("**", None, False),
    ("a*", None, True),
    ("*a", "a", True),
]


@pytest.mark.parametrize(("earlier", "later", "is_reachable"), PATTERNS)
def test_what_an_earlier_wildcard_always_meets_is_unreachable(
    earlier: str, later: str | None, is_reachable: bool
) -> None:
    value = f"\n    value: '{later}'" if later else ""
    text = f"domain: d\ndescriptors:\n  - key: k\n    value: '{earlier}'\n  - key: k{value}\n"

    found = _warnings(text)

    named = f"key 'k' value '{later}'" if later else "key 'k'"
    expected = (5, "unreachable", f"{named} is always met first by key 'k' value '{earlier}' at f.yaml:3:5")
    assert found == ([] if is_reachable else [expected])


def test_wildcards_of_different_keys_do_not_hide_each_other() -> None:
    assert _warnings("domain: d\ndescriptors: [{key: a, value: '*'}, {key: b, value: '*'}, {key: c}]") == []


def test_a_wildcard_key_hides_the_bare_keys_it_meets() -> None:
    found = _warnings("domain: d\ndescriptors:\n  - key: us*\n  - key: user\n  - key: path")

    assert [(line, code) for line, code, _ in found] == [(4, "unreachable")]


def test_a_limit_of_zero_is_pointed_out_written_or_not() -> None:
    text = (
        "domain: d\ndescriptors:\n  - key: a\n    rate_limit: {unit: day, requests_per_unit: 0}\n"
        "  - key: b\n    rate_limit: {unit: day}\n  - key: c\n    rate_limit: {unlimited: true}\n"
    )

    assert _warnings(text) == [
        (4, "zero-limit", "requests_per_unit is 0: every request is refused"),
        (6, "zero-limit", "there is no requests_per_unit, which means 0: every request is refused"),
    ]


@pytest.mark.parametrize(
    "key",
    [
        *("shadow_mode: true", "quota_mode: true", "detailed_metric: true", "charge: always", "metadata: {a: 1}"),
        *("penalty: {}", "warn_at: 0.8", "answer: {headers: []}", "deny: {status: 503}"),
    ],
)
def test_what_needs_a_limit_is_pointed_out_where_there_is_none(key: str) -> None:
    text = f"domain: d\ndescriptors:\n  - key: k\n    {key}\n"

    assert [(line, code) for line, code, _ in _warnings(text)] == [(4, "no-effect")]
    assert _warnings(f"{text}    {LIMIT}\n") == []


def test_what_counts_is_pointed_out_beside_unlimited() -> None:
    text = "domain: d\ndescriptors:\n  - key: k\n    rate_limit:\n      unlimited: y\n      requests_per_unit: 5\n"

    assert _warnings(text) == [(6, "no-effect", "'requests_per_unit' has no effect when unlimited")]


@pytest.mark.parametrize("key", ["penalty: {}", "warn_at: 0.8", "answer: {headers: []}", "deny: {status: 503}"])
@pytest.mark.parametrize("beside", ["rate_limit: {unlimited: true}", f"action: allow\n    {LIMIT}"])
def test_what_needs_refusals_is_pointed_out_where_everything_passes(key: str, beside: str) -> None:
    text = f"domain: d\ndescriptors:\n  - key: k\n    {key}\n    {beside}\n"

    name, _, _ = key.partition(":")
    assert _warnings(text) == [(4, "no-effect", f"'{name}' has no effect when unlimited")]


def test_replacing_a_name_that_nobody_has_is_pointed_out() -> None:
    text = (
        "domain: d\ndescriptors:\n"
        "  - key: a\n    rate_limit: {unit: day, requests_per_unit: 1, name: one}\n"
        "  - key: b\n    rate_limit: {unit: day, requests_per_unit: 1, replaces: [{name: one}, {name: two}]}\n"
    )

    assert _warnings(text) == [(6, "replaces", "replaces 'two', but no rate_limit of this domain has that name")]
