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
    "shard_by on a descriptor": (
        "domain: d\ndescriptors:\n  - key: k\n    shard_by: domain",
        "'shard_by' has no effect here; it belongs at the top of the file",
    ),
    "on_store_failure under rate_limit": (
        f"domain: d\ndescriptors:\n  - key: k\n    {LIMIT[:-1]}, on_store_failure: deny}}",
        "'on_store_failure' has no effect here; it belongs at the top of the file or on a descriptor, beside 'key'",
    ),
    "hot under rate_limit": (
        f"domain: d\ndescriptors:\n  - key: k\n    {LIMIT[:-1]}, hot: {{lease: 1s}}}}",
        "'hot' has no effect here; it belongs on a descriptor, beside 'key'",
    ),
    "name on a descriptor": (
        "domain: d\ndescriptors:\n  - key: k\n    name: e",
        "'name' has no effect here; it belongs inside 'rate_limit' or inside 'replaces'",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISPLACED.values(), ids=MISPLACED.keys())
def test_misplaced_key_is_a_warning(text: str, message: str) -> None:
    assert _warnings(text) == [(4, "misplaced", message)]


# The earlier value, the later value (None: no value), and whether the later one can ever match.
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
def test_descriptor_covered_by_an_earlier_wildcard_is_unreachable(
    earlier: str, later: str | None, is_reachable: bool
) -> None:
    value = f"\n    value: '{later}'" if later else ""
    text = f"domain: d\ndescriptors:\n  - key: k\n    value: '{earlier}'\n  - key: k{value}\n"

    found = _warnings(text)

    named = f"key 'k' value '{later}'" if later else "key 'k'"
    expected = (
        5,
        "unreachable",
        f"{named} is never matched: it is always preceded by key 'k' value '{earlier}' at f.yaml:3:5",
    )
    assert found == ([] if is_reachable else [expected])


def test_wildcards_of_different_keys_are_independent() -> None:
    assert _warnings("domain: d\ndescriptors: [{key: a, value: '*'}, {key: b, value: '*'}, {key: c}]") == []


def test_wildcard_key_makes_matching_bare_keys_unreachable() -> None:
    found = _warnings("domain: d\ndescriptors:\n  - key: us*\n  - key: user\n  - key: path")

    assert [(line, code) for line, code, _ in found] == [(4, "unreachable")]


def test_zero_limit_is_a_warning_explicit_or_default() -> None:
    text = (
        "domain: d\ndescriptors:\n  - key: a\n    rate_limit: {unit: day, requests_per_unit: 0}\n"
        "  - key: b\n    rate_limit: {unit: day}\n  - key: c\n    rate_limit: {unlimited: true}\n"
    )

    assert _warnings(text) == [
        (4, "zero-limit", "requests_per_unit is 0, so that every request is denied"),
        (6, "zero-limit", "there is no requests_per_unit, which means 0, so that every request is denied"),
    ]


@pytest.mark.parametrize(
    "key",
    [
        *("shadow_mode: true", "quota_mode: true", "detailed_metric: true", "charge: always", "metadata: {a: 1}"),
        *("penalty: {}", "warn_at: 0.8", "answer: {headers: []}", "deny: {status: 503}"),
        *("hot: {lease: 100ms}", "on_store_failure: deny"),
    ],
)
def test_key_that_needs_a_limit_warns_without_one(key: str) -> None:
    text = f"domain: d\ndescriptors:\n  - key: k\n    {key}\n"

    assert [(line, code) for line, code, _ in _warnings(text)] == [(4, "no-effect")]
    assert _warnings(f"{text}    {LIMIT}\n") == []


def test_counting_keys_warn_next_to_unlimited() -> None:
    text = "domain: d\ndescriptors:\n  - key: k\n    rate_limit:\n      unlimited: y\n      requests_per_unit: 5\n"

    assert _warnings(text) == [
        (6, "no-effect", "'requests_per_unit' has no effect when unlimited; drop it, or 'unlimited'")
    ]


@pytest.mark.parametrize("key", ["penalty: {}", "warn_at: 0.8", "answer: {headers: []}", "deny: {status: 503}"])
@pytest.mark.parametrize("beside", ["rate_limit: {unlimited: true}", f"action: allow\n    {LIMIT}"])
def test_denial_keys_warn_where_everything_passes(key: str, beside: str) -> None:
    text = f"domain: d\ndescriptors:\n  - key: k\n    {key}\n    {beside}\n"

    name, _, _ = key.partition(":")
    assert (4, "no-effect", f"'{name}' has no effect when unlimited; drop it, or 'unlimited'") in _warnings(text)


NOTHING_COUNTED = {
    "unlimited": ("rate_limit: {unlimited: true}", False),
    "action: allow": ("action: allow", False),
    "nothing below either": ("descriptors: [{key: a}, {key: b, rate_limit: {unlimited: true}}]", False),
    "a limit below": (f"descriptors: [{{key: a}}, {{key: b, descriptors: [{{key: c, {LIMIT}}}]}}]", True),
    "a limit below what is allowed": (f"action: allow\n    descriptors: [{{key: b, {LIMIT}}}]", True),
}


@pytest.mark.parametrize(("beside", "has_effect"), NOTHING_COUNTED.values(), ids=NOTHING_COUNTED.keys())
def test_on_store_failure_warns_where_nothing_is_counted(beside: str, has_effect: bool) -> None:
    found = _warnings(f"domain: d\ndescriptors:\n  - key: k\n    on_store_failure: deny\n    {beside}\n")

    message = "'on_store_failure' has no effect where nothing is counted, neither on this descriptor nor below it"
    assert found == ([] if has_effect else [(4, "no-effect", message)])


@pytest.mark.parametrize("limits", [LIMIT, "limits: [{unit: day, requests_per_unit: 0}]"])
def test_limit_next_to_action_allow_is_a_warning(limits: str) -> None:
    text = f"domain: d\ndescriptors:\n  - key: k\n    action: allow\n    {limits}\n"

    name, _, _ = limits.partition(":")
    message = f"'{name}' has no effect beside 'action: allow', which lets everything pass uncounted; drop one of them"
    assert _warnings(text) == [(5, "no-effect", message)]


@pytest.mark.parametrize("limits", ["rate_limit: {unlimited: true}", "descriptors: []"])
def test_unlimited_next_to_action_allow_gives_no_warning(limits: str) -> None:
    assert _warnings(f"domain: d\ndescriptors:\n  - key: k\n    action: allow\n    {limits}\n") == []


def test_replaces_with_unknown_name_is_a_warning() -> None:
    text = (
        "domain: d\ndescriptors:\n"
        "  - key: a\n    rate_limit: {unit: day, requests_per_unit: 1, name: one}\n"
        "  - key: b\n    rate_limit: {unit: day, requests_per_unit: 1, replaces: [{name: one}, {name: two}]}\n"
    )

    assert _warnings(text) == [
        (6, "replaces", "replaces 'two' has no effect: no rate_limit of this domain has that name")
    ]


# Entries that ext_authz builds, the rules, and whether one of them can match.
MAPPED = {
    "its key": ("{key: user, header: x-user}", f"{{key: user, {LIMIT}}}", True),
    "no such key": ("{key: usr, header: x-user}", f"{{key: user, {LIMIT}}}", False),
    "some value of its key": ("{key: user, header: x-user}", f"{{key: user, value: a, {LIMIT}}}", True),
    "a pattern of its key": ("{key: user, header: x-user}", f"{{key: user, match: {{prefix: a}}, {LIMIT}}}", True),
    "a wildcard key": ("{key: user, header: x-user}", f"{{key: us*, {LIMIT}}}", True),
    "another wildcard key": ("{key: path, from: path}", f"{{key: us*, {LIMIT}}}", False),
    "a fixed value": ("{key: kind, value: a}", f"{{key: kind, value: a, {LIMIT}}}", True),
    "another fixed value": ("{key: kind, value: b}", f"{{key: kind, value: a, {LIMIT}}}", False),
    "a wildcard of a fixed value": ("{key: kind, value: ab}", f"{{key: kind, value: a*, {LIMIT}}}", True),
    "an exemption": ("{key: user, header: x-user}", "{key: user}", True),
    "what ends above the rule": ("{key: user, header: x}", f"{{key: user, descriptors: [{{key: b, {LIMIT}}}]}}", False),
    "two levels": (
        "{key: user, header: x}, {key: b, query: q}",
        f"{{key: user, descriptors: [{{key: b, {LIMIT}}}]}}",
        True,
    ),
    "the levels the other way round": (
        "{key: b, query: q}, {key: user, header: x}",
        f"{{key: user, descriptors: [{{key: b, {LIMIT}}}]}}",
        False,
    ),
    "an entry too many": ("{key: user, header: x}, {key: b, query: q}", f"{{key: user, {LIMIT}}}", False),
}


@pytest.mark.parametrize(("entries", "rule", "is_mapped"), MAPPED.values(), ids=MAPPED.keys())
def test_unmatched_ext_authz_descriptor_is_a_warning(entries: str, rule: str, is_mapped: bool) -> None:
    text = (
        "domain: d\next_authz:\n  descriptors:\n    - entries: [{key: fine, from: path}]\n"
        f"    - entries: [{entries}]\ndescriptors:\n  - {{key: fine, {LIMIT}}}\n  - {rule}\n"
    )

    assert [(line, code) for line, code, _ in _warnings(text)] == ([] if is_mapped else [(5, "unmapped")])


def test_unmapped_warning_names_the_keys() -> None:
    text = "domain: d\next_authz: {descriptors: [{entries: [{key: a, from: path}, {key: b, from: host}]}]}\n"

    message = "no rule of this domain matches a descriptor of a, b: it has no effect"
    assert _warnings(text) == [(2, "unmapped", message)]


def test_merged_domain_is_linted_as_a_whole() -> None:
    mapping = b"domain: d\next_authz: {descriptors: [{entries: [{key: a, from: path}]}]}\n"
    rules = f"domain: d\ndescriptors: [{{key: a, {LIMIT}}}]\n".encode()

    assert compile_documents({"a.yaml": mapping, "b.yaml": rules}, merge_domains=True).warnings == ()
