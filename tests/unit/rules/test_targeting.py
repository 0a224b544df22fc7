"""Targeting of stored rules: expansion to descriptors, the implicit ext_authz mapping, and errors."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.cli.canonical_yaml import canonical_documents
from ratelimit_rls.core.attributes import Attributes, ClientIpSource
from ratelimit_rls.core.client_ip import ClientIp
from ratelimit_rls.core.identity import Identity
from ratelimit_rls.core.match import match
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import CompiledRules
from ratelimit_rls.rules.implicit_mapping import MAX_SHAPES
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.rules.sources.database import check_rules
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting
from ratelimit_rls.rules.targeting import MAX_ALTERNATIVES

LIMIT: dict[str, Any] = {"rate_limit": {"unit": "minute", "requests_per_unit": 5}}
BODY = "domain: edge\nrate_limit: {unit: minute, requests_per_unit: 5}\n"


def rule(targeting: Targeting, document: str = BODY, name: str = "r", priority: int = 100) -> StoredRule:
    return StoredRule(name, name, document, priority, targeting=targeting)


def descriptors(compiled: CompiledRules) -> list[dict[str, Any]]:
    (domain,) = canonical_documents(compiled, with_places=False)
    written: list[dict[str, Any]] = domain["descriptors"]
    return written


def keys(compiled: CompiledRules) -> list[str]:
    """Return the keys of the descriptors that are built from every request."""
    mapped = compiled.tree.mappings["edge"].descriptors
    return ["/".join(entry.key for entry in one.entries) for one in mapped]


@pytest.mark.parametrize(
    ("targeting", "written", "mapped_keys"),
    [
        (Targeting(), [{"key": "scope", "value": "global", **LIMIT}], ["scope"]),
        (Targeting(scope=CounterScope.GLOBAL), [{"key": "scope", "value": "global", **LIMIT}], ["scope"]),
        (Targeting(scope=CounterScope.USER), [{"key": "user", **LIMIT}], ["user"]),
        (Targeting(scope=CounterScope.API_KEY), [{"key": "api_key", **LIMIT}], ["api_key"]),
        (Targeting(scope=CounterScope.TENANT), [{"key": "org", **LIMIT}], ["org"]),
        (Targeting(scope=CounterScope.IP), [{"key": "ip", **LIMIT}], ["ip"]),
        (Targeting(scope=CounterScope.ENDPOINT), [{"key": "path", **LIMIT}], ["path"]),
        (
            Targeting(tiers=("free", "pro")),
            [{"key": "tier", "value": "free", **LIMIT}, {"key": "tier", "value": "pro", **LIMIT}],
            ["tier"],
        ),
        (
            Targeting(endpoints=("/v1/*", "/x")),
            [
                {"key": "path", "value": "/v1/*", **LIMIT, "share_threshold": True},
                {"key": "path", "value": "/x", **LIMIT},
            ],
            ["path"],
        ),
        (
            Targeting(endpoints=("/v1/*",), scope=CounterScope.ENDPOINT),
            [{"key": "path", "value": "/v1/*", **LIMIT}],
            ["path"],
        ),
        (
            Targeting(methods=("post",), scope=CounterScope.GLOBAL),
            [{"key": "method", "value": "POST", **LIMIT}],
            ["method"],
        ),
        (
            Targeting(cidrs=("10.0.0.0/8",)),
            [{"key": "ip", "match": {"cidr": "10.0.0.0/8"}, **LIMIT, "share_threshold": True}],
            ["ip"],
        ),
        (
            Targeting(cidrs=("10.0.0.0/8",), scope=CounterScope.IP),
            [{"key": "ip", "match": {"cidr": "10.0.0.0/8"}, **LIMIT}],
            ["ip"],
        ),
        (
            Targeting(("free",), ("/a",), ("GET",), ("10.0.0.0/8",), CounterScope.USER),
            [
                {
                    "key": "tier",
                    "value": "free",
                    "descriptors": [
                        {
                            "key": "path",
                            "value": "/a",
                            "descriptors": [
                                {
                                    "key": "method",
                                    "value": "GET",
                                    "descriptors": [
                                        {
                                            "key": "ip",
                                            "match": {"cidr": "10.0.0.0/8"},
                                            "share_threshold": True,
                                            "descriptors": [{"key": "user", **LIMIT}],
                                        }
                                    ],
                                }
                            ],
                        }
                    ],
                }
            ],
            ["tier/path/method/ip/user"],
        ),
    ],
)
def test_targeting_expands_to_descriptors(
    targeting: Targeting, written: list[dict[str, Any]], mapped_keys: list[str]
) -> None:
    compiled = check_rules([rule(targeting)])
    assert descriptors(compiled) == written
    assert keys(compiled) == mapped_keys
    assert compiled.warnings == ()


def test_targeting_wraps_descriptors_but_not_domain_settings() -> None:
    document = (
        "domain: edge\nshard_by: domain\nanswer: {headers: []}\n"
        "descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 5}}]"
    )
    compiled = check_rules([rule(Targeting(tiers=("free",), scope=CounterScope.TENANT), document)])
    (domain,) = canonical_documents(compiled, with_places=False)
    assert domain["shard_by"] == "domain"
    assert domain["answer"] == {"headers": []}
    below = [{"key": "org", "descriptors": [{"key": "user", **LIMIT}]}]
    assert domain["descriptors"] == [{"key": "tier", "value": "free", "descriptors": below}]
    assert keys(compiled) == ["tier/org/user"]


def test_rule_body_accepts_all_descriptor_keys() -> None:
    document = (
        "domain: edge\n<<: {charge: admitted, action: log_only}\n"
        "limits_of: user\nlimits: [{unit: day, requests_per_unit: 1}]"
    )
    compiled = check_rules([rule(Targeting(scope=CounterScope.USER), document)])
    (found,) = compiled.tree.rules()
    assert (found.path, found.charge.value, found.shadow_mode) == ("edge.user", "admitted", True)
    assert found.limits_of is not None
    assert str(found.position) == "database:r:1:1"


def test_rules_with_equal_targeting_share_levels() -> None:
    free = ("free",)
    rules = [
        rule(Targeting(tiers=free, scope=CounterScope.USER), name="a"),
        rule(Targeting(tiers=free, scope=CounterScope.IP), name="b"),
        rule(Targeting(tiers=free), name="c"),
        rule(Targeting(tiers=("pro", "free"), scope=CounterScope.USER), name="d", priority=500),
    ]
    compiled = check_rules(rules)
    assert sorted(found.path for found in compiled.tree.rules()) == [
        "edge.tier_free",
        "edge.tier_free.ip",
        "edge.tier_free.user",
        "edge.tier_pro.user",
    ]
    assert [(warning.file, warning.code) for warning in compiled.warnings] == [("database:d", "overridden")]
    assert keys(compiled) == ["tier", "tier/ip", "tier/user"]


CALLER = Identity(user="alice", tier="free", org="acme", api_key="k1")


@pytest.mark.parametrize(
    ("targeting", "attributes", "is_match"),
    [
        (Targeting(tiers=("free",), scope=CounterScope.USER), Attributes(caller=CALLER), True),
        (Targeting(tiers=("pro",), scope=CounterScope.USER), Attributes(caller=CALLER), False),
        (Targeting(scope=CounterScope.USER), Attributes(), False),
        (Targeting(scope=CounterScope.TENANT), Attributes(caller=CALLER), True),
        (Targeting(scope=CounterScope.API_KEY), Attributes(caller=CALLER), True),
        (Targeting(endpoints=("/v1/*/orders",), methods=("GET",)), Attributes("GET", path="/v1/7/orders"), True),
        (Targeting(endpoints=("/v1/*/orders",), methods=("PUT",)), Attributes("GET", path="/v1/7/orders"), False),
        (Targeting(cidrs=("10.0.0.0/8",)), Attributes(peer="10.1.2.3"), True),
        (Targeting(cidrs=("10.0.0.0/8",)), Attributes(peer="11.1.2.3"), False),
        (Targeting(), Attributes(), True),
    ],
)
def test_targeted_rule_matches_without_ext_authz_mapping(
    targeting: Targeting, attributes: Attributes, is_match: bool
) -> None:
    tree = check_rules([rule(targeting)]).tree
    request = tree.mappings["edge"].request("edge", attributes)
    matched = [found.rule for found in match(tree, request)] if request else []
    assert any(matched) is is_match


def test_existing_mapping_is_completed() -> None:
    mapping = (
        b"domain: edge\next_authz:\n  trusted_proxies: 2\n  use_remote_address: true\n"
        b"  descriptors: [{entries: [{key: user, header: x-user}]}]\n"
    )
    rules = [rule(Targeting(scope=CounterScope.USER), name="a"), rule(Targeting(scope=CounterScope.IP), name="b")]
    compiled = check_rules(rules, [SourceDocument("f.yaml", mapping)])

    assert keys(compiled) == ["user", "ip"]
    ip = compiled.tree.mappings["edge"].descriptors[1].entries[0].source
    assert ip == ClientIpSource(ClientIp(trusted_proxies=2, use_remote_address=True))
    (domain,) = canonical_documents(compiled, with_places=False)
    assert domain["ext_authz"]["descriptors"] == [
        {"entries": [{"key": "user", "header": "x-user"}]},
        {"entries": [{"key": "ip", "from": "client_ip"}]},
    ]


def test_rule_without_targeting_adds_no_mapping() -> None:
    document = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 5}}]"
    assert check_rules([rule(Targeting(), document)]).tree.mappings == {}


TIERS = tuple(map(str, range(MAX_ALTERNATIVES // 2)))


@pytest.mark.parametrize(
    ("targeting", "messages"),
    [
        (Targeting(cidrs=("10.0.0.1/8",)), ["targeting.cidrs[0]: '10.0.0.1/8' is not a network such as 192.0.2.0/24"]),
        (
            Targeting(cidrs=("10.0.0.0/8", "::ffff:10.0.0.0/104")),
            ["targeting.cidrs[1]: '::ffff:10.0.0.0/104' is already targeting.cidrs[0]"],
        ),
        (
            Targeting(tiers=("", "a*", "a" * 256), methods=("G T", "*", "get", "GET"), endpoints=("v1", "/a?b")),
            [
                "targeting.endpoints[0]: 'v1' is not a path",
                "targeting.endpoints[1]: '/a?b' has a query",
                "targeting.methods[0]: 'G T' is not the name of a method",
                "targeting.methods[1]: '*' is not the name of a method",
                "targeting.methods[3]: 'GET' is already targeting.methods[2]",
                "targeting.tiers[0]: '' is not the name of a tier",
                "targeting.tiers[1]: 'a*' is not the name of a tier",
                "targeting.tiers[2]: 'aaa",
            ],
        ),
        (
            Targeting(tiers=TIERS, methods=("GET", "PUT", "POST")),
            ["targeting: its tiers, endpoints, methods and cidrs make 384 combinations, at most 256 are allowed"],
        ),
    ],
)
def test_targeting_error_names_its_field(targeting: Targeting, messages: list[str]) -> None:
    with pytest.raises(RulesError) as raised:
        check_rules([rule(targeting)])
    problems = [str(problem) for problem in raised.value.problems]
    assert len(problems) == len(messages), problems
    for problem, start in zip(problems, messages, strict=True):
        assert problem.startswith(f"database:r: error: {start}")


@pytest.mark.parametrize(
    ("document", "place", "message"),
    [
        (
            "domain: edge\nrate_limit:\n  unit: minuet\n  requests_per_unit: 5",
            "3:9",
            "invalid rate limit unit 'minuet'",
        ),
        ("domain: edge\nrate_limt: {}\naction: reject", "2:1", "did you mean 'rate_limit'?"),
        ("domain: edge\nkey: user\nrate_limit: {unit: day}", "2:1", "'key' beside 'domain': the targeting says"),
        ("domain: edge", "1:1", "there is nothing to target"),
        ("- domain", "1:1", "a rules file is a mapping"),
        ("rate_limit: {unit: day, requests_per_unit: 5}", "1:1", "cannot have empty domain"),
        ("domain: edge\nrate_limit: [", "3:1", "error loading config file: yaml"),
        ("domain: edge\naction: dance", "2:9", "action 'dance' is not one of reject, throttle, log_only, allow"),
    ],
)
def test_document_error_keeps_its_position(document: str, place: str, message: str) -> None:
    with pytest.raises(RulesError) as raised:
        check_rules([rule(Targeting(("free", "pro"), scope=CounterScope.USER), document)])
    (problem,) = raised.value.problems
    assert str(problem).startswith(f"database:r:{place}: error: ")
    assert message in problem.message


def test_targeting_combinations_are_bounded() -> None:
    many = "descriptors: [" + ",".join(f"{{key: k{number}}}" for number in range(300)) + "]"
    with pytest.raises(RulesError, match="targeting: 128 combinations of this document are too large"):
        check_rules([rule(Targeting(TIERS), f"domain: edge\n{many}")])


def test_implicit_descriptors_per_domain_are_bounded() -> None:
    body = "rate_limit: {unit: day, requests_per_unit: 5}"
    deep = "".join(f"{{key: {key}, {body}, descriptors: [" for key in ["user", "ip"] * 10) + "]}" * 20
    rules = [
        rule(Targeting(scope=scope), f"domain: edge\ndescriptors: [{deep}]", name)
        for name, scope in (("a", CounterScope.TENANT), ("b", CounterScope.ENDPOINT))
    ]
    assert len(keys(check_rules(rules[:1]))) == 20
    with pytest.raises(RulesError) as raised:
        check_rules(rules)
    (problem,) = raised.value.problems
    assert problem.file == "database:b"
    assert f"more than {MAX_SHAPES} kinds of targeting" in problem.message


@pytest.mark.parametrize(
    ("first", "second", "hidden"),
    [
        (Targeting(endpoints=("/v1/x",), methods=("PUT",)), Targeting(endpoints=("/v1/*",), methods=("GET",)), "b"),
        (Targeting(endpoints=("/v1/*",), methods=("PUT",)), Targeting(endpoints=("/*",), methods=("GET",)), "b"),
        (Targeting(cidrs=("10.0.0.0/8",), scope=CounterScope.USER), Targeting(cidrs=("10.1.0.0/16",)), "a"),
        (Targeting(endpoints=("/v1/*",), methods=("GET",)), Targeting(endpoints=("/*",), methods=("GET",)), ""),
        (Targeting(endpoints=("/v1/*",)), Targeting(endpoints=("/v2/*",), methods=("GET",)), ""),
        (Targeting(cidrs=("10.0.0.0/8",)), Targeting(cidrs=("2001:db8::/32",), scope=CounterScope.USER), ""),
    ],
)
def test_overlapping_targeted_rules_warn_hidden(first: Targeting, second: Targeting, hidden: str) -> None:
    compiled = check_rules([rule(first, name="a", priority=1), rule(second, name="b", priority=2)])
    assert [(warning.code, warning.file) for warning in compiled.warnings] == (
        [("hidden", f"database:{hidden}")] if hidden else []
    )
