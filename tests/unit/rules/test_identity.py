"""Compilation of `identity` and `limits_of`, and positions and messages of their errors."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from ratelimit_rls.cli.canonical_yaml import canonical_documents
from ratelimit_rls.core.attributes import AnonymousIpSource, CallerIdSource, CallerSource
from ratelimit_rls.core.client_ip import ClientIp
from ratelimit_rls.core.identity import (
    CredentialEntry,
    CredentialKind,
    CredentialLocation,
    IdentityConfig,
    UnauthenticatedPolicy,
)
from ratelimit_rls.core.model import Charge, Subject
from ratelimit_rls.errors import RulesError
from ratelimit_rls.identity.issuers import read_issuers
from ratelimit_rls.rules.compile import CompiledRules, compile_documents

FULL = """\
domain: api
identity:
  credentials:
    - {kind: api_key, header: X-API-Key}
    - {kind: api_key, query: api_key}
    - {kind: jwt, header: Authorization}
    - {kind: api_key, header: authorization, scheme: ApiKey}
  entries:
    - {key: token, kind: jwt}
    - {key: api-key, kind: api_key, becomes: [tier, user]}
  on_invalid: refuse
  on_missing: ip
  blocked_status: 429
  hide_credentials: true
descriptors:
  - {key: user, limits_of: user, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: api_key, limits_of: api_key}
"""


def compiled(text: str) -> CompiledRules:
    return compile_documents({"api.yaml": textwrap.dedent(text).encode()})


def problems(text: str) -> list[str]:
    with pytest.raises(RulesError) as raised:
        compiled(text)
    return [f"{problem.line}: {problem.message}" for problem in raised.value.problems]


def identity(block: str) -> str:
    return "domain: api\nidentity:\n" + textwrap.indent(textwrap.dedent(block), "  ")


def test_every_identity_key_is_compiled() -> None:
    assert compiled(FULL).tree.identities == {
        "api": IdentityConfig(
            locations=(
                CredentialLocation(CredentialKind.API_KEY, header="x-api-key"),
                CredentialLocation(CredentialKind.API_KEY, query="api_key"),
                CredentialLocation(CredentialKind.JWT, header="authorization", scheme="bearer"),
                CredentialLocation(CredentialKind.API_KEY, header="authorization", scheme="apikey"),
            ),
            entries=(
                CredentialEntry("token", CredentialKind.JWT, ("user",)),
                CredentialEntry("api-key", CredentialKind.API_KEY, ("tier", "user")),
            ),
            on_invalid=UnauthenticatedPolicy.REFUSE,
            on_missing=UnauthenticatedPolicy.IP,
            blocked_status=429,
            hidden=("x-api-key", "authorization"),
        )
    }


def test_minimal_identity_has_defaults() -> None:
    terms = compiled(identity("credentials: [{kind: jwt, header: x-token}]")).tree.identities["api"]
    assert (terms.locations[0].scheme, terms.on_invalid, terms.on_missing) == (
        "",
        UnauthenticatedPolicy.IP,
        UnauthenticatedPolicy.IP,
    )
    assert (terms.blocked_status, terms.hidden) == (403, ())


def test_limits_of_is_compiled() -> None:
    root = compiled(FULL).tree.domains["api"]
    rules = {key: node.rule for key, node in root.by_key.items()}
    assert {key: rule.limits_of for key, rule in rules.items() if rule} == {
        "user": Subject.USER,
        "api_key": Subject.API_KEY,
    }
    assert rules["api_key"] is not None
    assert rules["api_key"].limits == ()
    assert rules["user"] is not None
    assert rules["user"].charge is Charge.ADMITTED  # like every rule with keys that envoyproxy/ratelimit does not have


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("on_invalid: ip", "3: 'identity' does not say where credentials are"),
        ("credentials: [{kind: api_key}]", "3: a credential has one location; write either 'header' or 'query'"),
        ("credentials: [{kind: api_key, header: a, query: b}]", "3: a credential has one location"),
        ("credentials: [{kind: api_key, query: b, scheme: bearer}]", "3: 'scheme' precedes a credential"),
        ("credentials: [{header: a}]", "3: 'kind' is missing"),
        ("credentials: [{kind: basic, header: a}]", "3: kind: basic is not one of api_key, jwt"),
        ("credentials: [{kind: jwt, header: 'a b'}]", "3: header: a b is not the name of a header"),
        ("credentials: [{kind: jwt, header: a, scheme: 'a b'}]", "3: scheme: a b is not the name of a scheme"),
        ("credentials: {kind: jwt}", "3: credentials:"),
        ("entries: [{kind: jwt}]", "3: 'key' is missing"),
        ("entries: [{key: a, kind: jwt, becomes: [name]}]", "3: becomes: name is not one of user, tier, org, api_key"),
        ("entries: [{key: a, kind: jwt, becomes: [user, user]}]", "3: becomes: 'user' is written twice"),
        ("entries: [{key: a, kind: jwt}, {key: a, kind: api_key}]", "3: the entry 'a' is written twice"),
        ("entries: [{key: a, kind: jwt}]\non_invalid: deny", "4: on_invalid: deny is not one of ip, refuse"),
        ("entries: [{key: a, kind: jwt}]\nblocked_status: 500", "4: blocked_status: 500 is not one of 403, 429"),
        ("entries: [{key: a, kind: jwt}]\nissuers: []", "4: "),
        ("credentials: [" + "{kind: jwt, header: a}, " * 9 + "]", "3: 'credentials' has 9 elements; at most 8"),
    ],
)
def test_identity_error_has_position_and_message(block: str, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in problems(identity(block))), problems(identity(block))


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ("action: allow", "'limits_of' cannot be used with 'action: allow'"),
        ("rate_limit: {unit: second, requests_per_unit: 5}, hot: {lease: 100ms}", "cannot be used with 'hot'"),
        ("value: 'a*', share_threshold: true", "cannot be used with 'share_threshold'"),
    ],
)
def test_limits_of_conflicts_are_rejected(beside: str, expected: str) -> None:
    found = problems(f"domain: api\ndescriptors: [{{key: user, limits_of: user, {beside}}}]")
    assert any(expected in problem for problem in found), found


def test_unknown_limits_of_subject_is_rejected() -> None:
    found = problems("domain: api\ndescriptors: [{key: user, limits_of: org}]")
    assert found == ["2: limits_of 'org' is not one of user, api_key"]


def test_ext_authz_entry_may_use_the_caller_identity() -> None:
    sources = ("user", "tier", "org", "api_key", "caller", "anonymous_ip")
    entries = ", ".join(f"{{key: {name}, from: {name}}}" for name in sources)
    mapping = compiled(f"domain: api\next_authz: {{descriptors: [{{entries: [{entries}]}}]}}").tree.mappings["api"]
    assert [entry.source for entry in mapping.descriptors[0].entries] == [
        CallerSource("user"),
        CallerSource("tier"),
        CallerSource("org"),
        CallerSource("api_key"),
        CallerIdSource(ClientIp()),
        AnonymousIpSource(ClientIp()),
    ]


def test_identity_survives_a_round_trip() -> None:
    (document,) = canonical_documents(compiled(FULL), with_places=False)
    again = compiled(yaml.safe_dump(document))
    assert again.tree.identities == compiled(FULL).tree.identities
    assert canonical_documents(again, with_places=False) == [document]


def test_trusted_proxies_are_a_number_or_networks() -> None:
    block = "domain: api\next_authz:\n  %s\n  descriptors: [{entries: [{key: ip, from: client_ip}]}]"
    mapping = compiled(block % "trusted_networks: [10.0.0.0/8, 'fd00::/8']").tree.mappings["api"]
    assert [str(network) for network in mapping.client_ip.trusted_networks] == ["10.0.0.0/8", "fd00::/8"]
    assert problems(block % "trusted_networks: [10.0.0.1/8]") == [
        "3: trusted_networks: 10.0.0.1/8 is not a network such as 10.0.0.0/8"
    ]
    both = "trusted_networks: [10.0.0.0/8]\n  trusted_proxies: 1\n  use_remote_address: true"
    assert "both define the trusted proxies" in problems(block % both)[0]
    assert "at most 64" in problems(block % f"trusted_networks: [{'10.0.0.0/8, ' * 65}]")[0]


PAGE = (Path(__file__).parents[3] / "docs" / "identity.md").read_text()


def test_documented_identity_rules_load_without_warnings() -> None:
    rules, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert compiled(rules).warnings == ()
    assert compiled(rules).tree.identities["api"].hidden


def test_documented_issuers_file_loads(tmp_path: Path) -> None:
    _, issuers = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "issuers.yaml").write_text(issuers)
    (issuer,) = read_issuers(tmp_path / "issuers.yaml")
    assert issuer.name == "accounts"
