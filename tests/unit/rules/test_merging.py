"""Merging of rules from several sources: precedence, and warnings about overridden rules."""

from __future__ import annotations

import hashlib

import pytest

from ratelimit_rls.cli.canonical_yaml import canonical_documents
from ratelimit_rls.core.explain import explain
from ratelimit_rls.core.model import Charge, Descriptor, Entry, OnStoreFailure
from ratelimit_rls.core.storage_keys import ShardBy
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import CompiledRules, compile_documents
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.rules.sources.database import check_rules, stored_sources
from ratelimit_rls.rules.stored_rule import StoredRule


def stored(name: str, descriptors: str, priority: int = 100, domain_keys: str = "") -> StoredRule:
    return StoredRule(f"id of {name}", name, f"domain: edge\n{domain_keys}\ndescriptors: [{descriptors}]\n", priority)


def file(descriptors: str, name: str = "f.yaml", domain_keys: str = "") -> SourceDocument:
    return SourceDocument(name, f"domain: edge\n{domain_keys}\ndescriptors: [{descriptors}]\n".encode())


def limit(number: int) -> str:
    return f"rate_limit: {{unit: minute, requests_per_unit: {number}}}"


def limits(compiled: CompiledRules) -> dict[str, int]:
    return {rule.path: rule.limits[0].requests_per_unit for rule in compiled.tree.rules()}


USER, VIP, PLAN = "key: user", "key: user, value: vip", "key: plan, value: free"


@pytest.mark.parametrize(
    ("rules", "files", "matched", "overridden"),
    [
        # a descriptor of one source only is added
        ([stored("a", f"{{{USER}, {limit(1)}}}")], [file(f"{{{VIP}, {limit(2)}}}")], {"user": 1, "user_vip": 2}, []),
        # the database takes precedence over files
        ([stored("a", f"{{{USER}, {limit(1)}}}")], [file(f"{{{USER}, {limit(2)}}}")], {"user": 1}, ["f.yaml"]),
        # a lower priority number takes precedence, whatever the names
        (
            [stored("a", f"{{{USER}, {limit(1)}}}", 9), stored("b", f"{{{USER}, {limit(2)}}}", 3)],
            [],
            {"user": 2},
            ["database:a"],
        ),
        # of three, the lowest priority number
        (
            [stored("a", f"{{{USER}, {limit(1)}}}", 9), stored("b", f"{{{USER}, {limit(2)}}}", -3)],
            [file(f"{{{USER}, {limit(3)}}}")],
            {"user": 2},
            ["database:a", "f.yaml"],
        ),
        # the node applies as a whole, and the other is ignored with everything below it
        (
            [stored("a", f"{{{PLAN}, {limit(1)}}}")],
            [file(f"{{{PLAN}, {limit(2)}, descriptors: [{{{USER}, {limit(3)}}}]}}")],
            {"plan_free": 1},
            ["f.yaml"],
        ),
        # a descriptor that only groups others overrides nothing, in either order
        (
            [stored("a", f"{{{PLAN}, descriptors: [{{{USER}, {limit(1)}}}]}}")],
            [file(f"{{{PLAN}, {limit(2)}, descriptors: [{{key: ip, {limit(3)}}}]}}")],
            {"plan_free": 2, "plan_free.user": 1, "plan_free.ip": 3},
            [],
        ),
        (
            [stored("a", f"{{{PLAN}, {limit(1)}}}")],
            [file(f"{{{PLAN}, descriptors: [{{{USER}, {limit(2)}}}]}}")],
            {"plan_free": 1, "plan_free.user": 2},
            [],
        ),
        # of descriptors below both, the one with precedence applies
        (
            [stored("a", f"{{{PLAN}, descriptors: [{{{USER}, {limit(1)}}}]}}")],
            [file(f"{{{PLAN}, descriptors: [{{{USER}, {limit(2)}}}, {{{VIP}, {limit(3)}}}]}}")],
            {"plan_free.user": 1, "plan_free.user_vip": 3},
            ["f.yaml"],
        ),
        # an exemption is a definition, too
        (
            [stored("a", f"{{{VIP}}}")],
            [file(f"{{{VIP}, {limit(2)}}}, {{{USER}, {limit(1)}}}")],
            {"user": 1},
            ["f.yaml"],
        ),
        # networks are compared in canonical form
        (
            [stored("a", f"{{key: ip, match: {{cidr: '::ffff:10.0.0.0/104'}}, {limit(1)}}}")],
            [file(f"{{key: ip, match: {{cidr: 10.0.0.0/8}}, {limit(2)}}}")],
            {"ip_cidr(::ffff:10.0.0.0/104)": 1},
            ["f.yaml"],
        ),
        # sources of equal priority may describe one domain
        (
            [stored("a", f"{{{USER}, {limit(1)}}}"), stored("b", f"{{{VIP}, {limit(2)}}}")],
            [],
            {"user": 1, "user_vip": 2},
            [],
        ),
    ],
)
def test_precedence_between_sources(
    rules: list[StoredRule], files: list[SourceDocument], matched: dict[str, int], overridden: list[str]
) -> None:
    for shuffled in (rules, rules[::-1]):
        compiled = check_rules(shuffled, files)
        assert limits(compiled) == {f"edge.{path}": number for path, number in matched.items()}
        assert [(problem.code, problem.file) for problem in compiled.warnings] == [
            ("overridden", name) for name in overridden
        ]


def test_overridden_positions_are_recorded() -> None:
    compiled = check_rules([stored("a", f"{{{USER}, {limit(1)}}}")], [file(f"{{{USER}, {limit(2)}}}")])
    (warning,) = compiled.warnings
    assert str(warning) == (
        "f.yaml:3:15: warning[overridden]: 'edge.user' is ignored, with everything below it: "
        "database:a:3:15 takes precedence"
    )
    explanation = explain(compiled.tree, "edge", Descriptor((Entry("user", "alice"),)))
    matched = explanation.levels[0].matched
    assert matched is not None
    assert (str(matched.position), list(map(str, matched.overrode))) == ("database:a:3:15", ["f.yaml:3:15"])


def test_rule_position_is_its_own_not_its_parent_source() -> None:
    rules = [stored("a", f"{{{PLAN}, descriptors: [{{{USER}, {limit(1)}}}]}}")]
    compiled = check_rules(rules, [file(f"{{{PLAN}, {limit(2)}}}")])
    explanation = explain(compiled.tree, "edge", Descriptor((Entry("plan", "free"),)))
    assert explanation.levels[0].matched is not None
    assert str(explanation.levels[0].matched.position) == "f.yaml:3:15"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [stored("a", f"{{{USER}, {limit(1)}}}"), stored("b", f"{{{USER}, {limit(2)}}}")],
            "database:b:3:15: error: duplicate descriptor composite key 'edge.user'; database:a:3:15 has it with the "
            "same priority; join the two, or give one of them another priority",
        ),
        (
            [stored("a", f"{{{PLAN}, descriptors: [{{{USER}}}]}}, {{{PLAN}, descriptors: [{{{USER}}}]}}")],
            "database:a:3:69: error: duplicate descriptor composite key 'edge.plan_free'; the same descriptor is at "
            "database:a:3:15; join the two",
        ),
        (
            [
                stored("a", f"{{key: p, value: a*, share_threshold: true, descriptors: [{{{USER}}}]}}"),
                stored("b", f"{{key: p, value: a*, descriptors: [{{{VIP}}}]}}"),
            ],
            "database:b:3:15: error: share_threshold of 'edge.p_a*' differs at database:a:3:15, "
            "which comes first and is in force",
        ),
        (
            [
                stored("a", f"{{{USER}, {limit(1)}}}", domain_keys="charge: always"),
                stored("b", "", domain_keys="charge: admitted"),
            ],
            "database:b:2:9: error: domain 'edge' has a different charge at database:a:2:9; a domain has one, "
            "and a rule may have its own",
        ),
        (
            [stored("a", "", domain_keys="deny: {format: json}"), stored("b", "", domain_keys="deny: {status: 503}")],
            "database:b:2:7: error: domain 'edge' has 'deny' at database:a:2:7 already; a domain has one, "
            "in one of its files",
        ),
        (
            [stored("free_tier", "{key: user, rate_limit: {unit: minuet}}")],
            "database:free_tier:3:46: error: invalid rate limit unit 'minuet'; must be one of second, minute, hour, "
            "day, week, month, year; did you mean 'minute'?",
        ),
        (
            [StoredRule("1", "a", "domain: \ud800")],
            "database:a:1:9: error: error loading config file: yaml: invalid UTF-8",
        ),
    ],
)
def test_conflicting_sources_are_rejected_with_position(rules: list[StoredRule], message: str) -> None:
    with pytest.raises(RulesError) as raised:
        check_rules(rules)
    (problem,) = raised.value.problems
    assert message in str(problem)


def test_structural_switch_comes_from_the_first_source() -> None:
    shared = f"{{key: p, value: a*, share_threshold: true, descriptors: [{{{USER}, {limit(1)}}}]}}"
    compiled = check_rules(
        [stored("a", shared)], [file(f"{{key: p, value: a*, descriptors: [{{{VIP}, {limit(2)}}}]}}")]
    )

    assert compiled.tree.domains["edge"].exact["p", "a*"].share_threshold
    (warning,) = compiled.warnings
    assert warning.code == "overridden"
    assert len(compiled.tree.rules()) == 2


def test_error_in_an_overridden_descriptor_is_reported() -> None:
    with pytest.raises(RulesError, match=r"f\.yaml:3:46: error: invalid rate limit unit"):
        check_rules(
            [stored("a", f"{{{USER}, {limit(1)}}}")],
            [file(f"{{{USER}, {limit(2)}, descriptors: []}}".replace("minute", "minuet"))],
        )


def test_duplicates_between_files_stay_errors() -> None:
    rules = [stored("a", f"{{{PLAN}, descriptors: [{{{USER}, {limit(1)}}}]}}")]
    group = f"{{{PLAN}, descriptors: [{{{VIP}, {limit(1)}}}]}}"
    with pytest.raises(RulesError, match=r"g\.yaml:1:9: error: duplicate domain 'edge' .* f\.yaml:1:9"):
        check_rules(rules, [file(group), file(group, "g.yaml")])
    with pytest.raises(RulesError, match=r"g\.yaml:3:15: error: duplicate descriptor .* f\.yaml:3:15"):
        check_rules(rules, [file(group), file(group, "g.yaml")], merge_domains=True)


def test_domain_setting_comes_from_the_first_source_with_it() -> None:
    strong = "charge: admitted\nshard_by: domain\ndeny: {status: 503}"
    weak = (
        "charge: always\nshard_by: descriptor\non_store_failure: deny\ndeny: {status: 502}\nanswer: {headers: []}\n"
        "ext_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}\n"
        "identity: {credentials: [{kind: api_key, header: x-key}]}"
    )
    compiled = check_rules([stored("a", f"{{{USER}, {limit(1)}}}", domain_keys=strong)], [file("", domain_keys=weak)])

    root = compiled.tree.domains["edge"]
    (rule,) = compiled.tree.rules()
    assert (rule.charge, root.shard_by, root.on_store_failure) == (
        Charge.ADMITTED,
        ShardBy.DOMAIN,
        OnStoreFailure.DENY,
    )
    assert rule.deny is not None
    assert (rule.deny.status, rule.response_policy.headers) == (503, ())
    assert list(compiled.tree.mappings) == list(compiled.tree.identities) == ["edge"]
    assert [(warning.line, warning.message.partition(":")[0]) for warning in compiled.warnings] == [
        (2, "'charge' of domain 'edge' is ignored"),
        (3, "'shard_by' of domain 'edge' is ignored"),
        (5, "'deny' of domain 'edge' is ignored"),
    ]


def test_overridden_ext_authz_is_not_linted() -> None:
    strong = "ext_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}"
    weak = "ext_authz: {descriptors: [{entries: [{key: a, value: b}]}, {entries: [{key: user, header: x}]}]}"
    compiled = check_rules([stored("a", f"{{{USER}, {limit(1)}}}", domain_keys=strong)], [file("", domain_keys=weak)])
    assert [warning.code for warning in compiled.warnings] == ["overridden"]


def test_inherited_setting_applies_to_later_sources() -> None:
    rules = [stored("a", f"{{{PLAN}, on_store_failure: deny, {limit(1)}}}")]
    compiled = check_rules(rules, [file(f"{{{PLAN}, descriptors: [{{{USER}, {limit(2)}}}]}}")])
    assert [rule.on_store_failure for rule in compiled.tree.rules()] == [OnStoreFailure.DENY] * 2


def test_wildcards_are_tried_in_source_order() -> None:
    rules = [
        stored("a", f"{{key: p, value: '*a*', {limit(1)}}}", 9),
        stored("b", f"{{key: p, value: '*b*', {limit(2)}}}", 5),
    ]
    compiled = check_rules(rules, [file(f"{{key: p, value: '*c*', {limit(3)}}}", "0.yaml")])
    assert [wildcard.node.value for wildcard in compiled.tree.domains["edge"].wildcards] == ["*b*", "*a*", "*c*"]
    assert compiled.sources == ("database:b", "database:a", "0.yaml")


def test_canonical_yaml_keeps_matching_order_across_sources() -> None:
    rules = [
        stored("a", f"{{key: p, value: '*a*', descriptors: [{{{USER}, {limit(1)}}}]}}", 1),
        stored("b", f"{{key: p, value: '*b*', {limit(2)}}}", 2),
    ]
    (document,) = canonical_documents(
        check_rules(rules, [file(f"{{key: p, value: '*a*', {limit(3)}}}")]), with_places=False
    )
    assert [(one["value"], one["rate_limit"]["requests_per_unit"]) for one in document["descriptors"]] == [
        ("*a*", 3),
        ("*b*", 2),
    ]


def test_disabled_stored_rules_are_not_a_source() -> None:
    off = StoredRule("1", "off", "nonsense: [", enabled=False)
    assert stored_sources([off]) == []


def test_digest_includes_priority_and_targeting_of_stored_rules() -> None:
    one, other = stored("a", f"{{{USER}}}", 1), stored("a", f"{{{USER}}}", 2)
    assert check_rules([one]).digest != check_rules([other]).digest
    files = {"b": b"domain: b", "a": b"domain: a"}
    assert compile_documents(files).digest == hashlib.sha256(b"9:domain: a9:domain: b").hexdigest()
