"""`identity` and `limits_of` of a rules file: what they mean, and that every mistake is found where it stands."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from ratelimit_rls.cli.normal_form import documents
from ratelimit_rls.core.attributes import AnonymousIp, Caller, CallerId
from ratelimit_rls.core.client_ip import ClientIp
from ratelimit_rls.core.identity import (
    CredentialEntry,
    CredentialKind,
    CredentialPlace,
    IdentityTerms,
    Otherwise,
)
from ratelimit_rls.core.model import Charge, Subject
from ratelimit_rls.errors import RulesError
from ratelimit_rls.identity.issuers import read_issuers
from ratelimit_rls.rules.compile import Compiled, compile_documents

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


def compiled(text: str) -> Compiled:
    return compile_documents({"api.yaml": textwrap.dedent(text).encode()})


def problems(text: str) -> list[str]:
    with pytest.raises(RulesError) as refused:
        compiled(text)
    return [f"{problem.line}: {problem.message}" for problem in refused.value.problems]


def identity(block: str) -> str:
    return "domain: api\nidentity:\n" + textwrap.indent(textwrap.dedent(block), "  ")


def test_everything_that_can_be_said() -> None:
    assert compiled(FULL).tree.identities == {
        "api": IdentityTerms(
            places=(
                CredentialPlace(CredentialKind.API_KEY, header="x-api-key"),
                CredentialPlace(CredentialKind.API_KEY, query="api_key"),
                CredentialPlace(CredentialKind.JWT, header="authorization", scheme="bearer"),
                CredentialPlace(CredentialKind.API_KEY, header="authorization", scheme="apikey"),
            ),
            entries=(
                CredentialEntry("token", CredentialKind.JWT, ("user",)),
                CredentialEntry("api-key", CredentialKind.API_KEY, ("tier", "user")),
            ),
            on_invalid=Otherwise.REFUSE,
            on_missing=Otherwise.IP,
            blocked_status=429,
            hidden=("x-api-key", "authorization"),
        )
    }


def test_little_is_enough() -> None:
    terms = compiled(identity("credentials: [{kind: jwt, header: x-token}]")).tree.identities["api"]
    assert (terms.places[0].scheme, terms.on_invalid, terms.on_missing) == ("", Otherwise.IP, Otherwise.IP)
    assert (terms.blocked_status, terms.hidden) == (403, ())


def test_rules_say_whose_limits_they_take() -> None:
    root = compiled(FULL).tree.domains["api"]
    rules = {key: node.rule for key, node in root.by_key.items()}
    assert {key: rule.limits_of for key, rule in rules.items() if rule} == {
        "user": Subject.USER,
        "api_key": Subject.API_KEY,
    }
    assert rules["api_key"] is not None
    assert rules["api_key"].limits == ()
    assert rules["user"] is not None
    assert rules["user"].charge is Charge.ADMITTED  # as of every rule that the reference cannot read


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("on_invalid: ip", "3: 'identity' does not say where credentials are"),
        ("credentials: [{kind: api_key}]", "3: a credential stands in one place; write either 'header' or 'query'"),
        ("credentials: [{kind: api_key, header: a, query: b}]", "3: a credential stands in one place"),
        ("credentials: [{kind: api_key, query: b, scheme: bearer}]", "3: 'scheme' is what stands before"),
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
def test_a_mistake_is_told_with_its_place(block: str, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in problems(identity(block))), problems(identity(block))


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ("action: allow", "'limits_of' cannot be used with 'action: allow'"),
        ("rate_limit: {unit: second, requests_per_unit: 5}, hot: {lease: 100ms}", "cannot be used with 'hot'"),
        ("value: 'a*', share_threshold: true", "cannot be used with 'share_threshold'"),
    ],
)
def test_limits_of_has_no_meaning_beside_some(beside: str, expected: str) -> None:
    told = problems(f"domain: api\ndescriptors: [{{key: user, limits_of: user, {beside}}}]")
    assert any(expected in problem for problem in told), told


def test_an_unknown_subject_is_refused() -> None:
    told = problems("domain: api\ndescriptors: [{key: user, limits_of: org}]")
    assert told == ["2: limits_of 'org' is not one of user, api_key"]


def test_a_mapping_may_take_what_credentials_prove() -> None:
    sources = ("user", "tier", "org", "api_key", "caller", "anonymous_ip")
    entries = ", ".join(f"{{key: {name}, from: {name}}}" for name in sources)
    mapping = compiled(f"domain: api\next_authz: {{descriptors: [{{entries: [{entries}]}}]}}").tree.mappings["api"]
    assert [entry.source for entry in mapping.descriptors[0].entries] == [
        Caller("user"),
        Caller("tier"),
        Caller("org"),
        Caller("api_key"),
        CallerId(ClientIp()),
        AnonymousIp(ClientIp()),
    ]


def test_written_back_it_means_the_same() -> None:
    (shown,) = documents(compiled(FULL), with_places=False)
    again = compiled(yaml.safe_dump(shown))
    assert again.tree.identities == compiled(FULL).tree.identities
    assert documents(again, with_places=False) == [shown]


def test_proxies_are_trusted_by_how_many_or_by_where() -> None:
    block = "domain: api\next_authz:\n  %s\n  descriptors: [{entries: [{key: ip, from: client_ip}]}]"
    mapping = compiled(block % "trusted_networks: [10.0.0.0/8, 'fd00::/8']").tree.mappings["api"]
    assert [str(network) for network in mapping.client_ip.trusted_networks] == ["10.0.0.0/8", "fd00::/8"]
    assert problems(block % "trusted_networks: [10.0.0.1/8]") == [
        "3: trusted_networks: 10.0.0.1/8 is not a network such as 10.0.0.0/8"
    ]
    both = "trusted_networks: [10.0.0.0/8]\n  trusted_proxies: 1\n  use_remote_address: true"
    assert "both say which proxies are believed" in problems(block % both)[0]
    assert "at most 64" in problems(block % f"trusted_networks: [{'10.0.0.0/8, ' * 65}]")[0]


PAGE = (Path(__file__).parents[3] / "docs" / "identity.md").read_text()


def test_the_rules_of_the_page_load_without_a_warning() -> None:
    rules, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert compiled(rules).warnings == ()
    assert compiled(rules).tree.identities["api"].hidden


def test_the_issuers_of_the_page_can_be_read(tmp_path: Path) -> None:
    _, issuers = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "issuers.yaml").write_text(issuers)
    (issuer,) = read_issuers(tmp_path / "issuers.yaml")
    assert issuer.name == "accounts"
