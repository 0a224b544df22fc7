"""Rules from several sources: which of them counts where they speak of the same, and what is said about the others."""

from __future__ import annotations

import hashlib

import pytest

from ratelimit_rls.cli.normal_form import documents
from ratelimit_rls.core.accounts import StoredRule
from ratelimit_rls.core.explain import explain
from ratelimit_rls.core.keys import ShardBy
from ratelimit_rls.core.model import Charge, Descriptor, Entry, OnStoreFailure
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import Compiled, compile_documents
from ratelimit_rls.rules.load import Source
from ratelimit_rls.rules.sources.database import check_rule, stored_sources


def stored(name: str, descriptors: str, priority: int = 100, of_domain: str = "") -> StoredRule:
    return StoredRule(f"id of {name}", name, f"domain: edge\n{of_domain}\ndescriptors: [{descriptors}]\n", priority)


def file(descriptors: str, name: str = "f.yaml", of_domain: str = "") -> Source:
    return Source(name, f"domain: edge\n{of_domain}\ndescriptors: [{descriptors}]\n".encode())


def limit(number: int) -> str:
    return f"rate_limit: {{unit: minute, requests_per_unit: {number}}}"


def limits(compiled: Compiled) -> dict[str, int]:
    return {rule.path: rule.limits[0].requests_per_unit for rule in compiled.tree.rules()}


USER, VIP, PLAN = "key: user", "key: user, value: vip", "key: plan, value: free"


@pytest.mark.parametrize(
    ("rules", "files", "met", "overridden"),
    [
        # what is nowhere else is added
        ([stored("a", f"{{{USER}, {limit(1)}}}")], [file(f"{{{VIP}, {limit(2)}}}")], {"user": 1, "user_vip": 2}, []),
        # the database comes before files
        ([stored("a", f"{{{USER}, {limit(1)}}}")], [file(f"{{{USER}, {limit(2)}}}")], {"user": 1}, ["f.yaml"]),
        # a lower priority comes before a higher one, whatever the names
        (
            [stored("a", f"{{{USER}, {limit(1)}}}", 9), stored("b", f"{{{USER}, {limit(2)}}}", 3)],
            [],
            {"user": 2},
            ["database:a"],
        ),
        # of three, the strongest
        (
            [stored("a", f"{{{USER}, {limit(1)}}}", 9), stored("b", f"{{{USER}, {limit(2)}}}", -3)],
            [file(f"{{{USER}, {limit(3)}}}")],
            {"user": 2},
            ["database:a", "f.yaml"],
        ),
        # the whole node stands, and the other is left out with all that is below it
        (
            [stored("a", f"{{{PLAN}, {limit(1)}}}")],
            [file(f"{{{PLAN}, {limit(2)}, descriptors: [{{{USER}, {limit(3)}}}]}}")],
            {"plan_free": 1},
            ["f.yaml"],
        ),
        # one that only leads to others overrides nothing, whichever of the two it is
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
        # of what both lead to, the stronger one counts
        (
            [stored("a", f"{{{PLAN}, descriptors: [{{{USER}, {limit(1)}}}]}}")],
            [file(f"{{{PLAN}, descriptors: [{{{USER}, {limit(2)}}}, {{{VIP}, {limit(3)}}}]}}")],
            {"plan_free.user": 1, "plan_free.user_vip": 3},
            ["f.yaml"],
        ),
        # to have no limit is something to say
        (
            [stored("a", f"{{{VIP}}}")],
            [file(f"{{{VIP}, {limit(2)}}}, {{{USER}, {limit(1)}}}")],
            {"user": 1},
            ["f.yaml"],
        ),
        # a network is the same however it is written
        (
            [stored("a", f"{{key: ip, match: {{cidr: '::ffff:10.0.0.0/104'}}, {limit(1)}}}")],
            [file(f"{{key: ip, match: {{cidr: 10.0.0.0/8}}, {limit(2)}}}")],
            {"ip_cidr(::ffff:10.0.0.0/104)": 1},
            ["f.yaml"],
        ),
        # equal priorities add to one domain
        (
            [stored("a", f"{{{USER}, {limit(1)}}}"), stored("b", f"{{{VIP}, {limit(2)}}}")],
            [],
            {"user": 1, "user_vip": 2},
            [],
        ),
    ],
)
def test_who_wins(rules: list[StoredRule], files: list[Source], met: dict[str, int], overridden: list[str]) -> None:
    for shuffled in (rules, rules[::-1]):
        compiled = check_rule(shuffled, files)
        assert limits(compiled) == {f"edge.{path}": number for path, number in met.items()}
        assert [(problem.code, problem.file) for problem in compiled.warnings] == [
            ("overridden", name) for name in overridden
        ]


def test_both_places_are_told() -> None:
    compiled = check_rule([stored("a", f"{{{USER}, {limit(1)}}}")], [file(f"{{{USER}, {limit(2)}}}")])
    (warning,) = compiled.warnings
    assert str(warning) == (
        "f.yaml:3:15: warning[overridden]: 'edge.user' is left out, with all that is below it: "
        "database:a:3:15 comes first, and what it says of it counts"
    )
    told = explain(compiled.tree, "edge", Descriptor((Entry("user", "alice"),)))
    met = told.levels[0].met
    assert met is not None
    assert (str(met.position), list(map(str, met.overrode))) == ("database:a:3:15", ["f.yaml:3:15"])


def test_a_limit_is_told_where_it_stands_and_not_where_the_way_to_it_does() -> None:
    rules = [stored("a", f"{{{PLAN}, descriptors: [{{{USER}, {limit(1)}}}]}}")]
    compiled = check_rule(rules, [file(f"{{{PLAN}, {limit(2)}}}")])
    told = explain(compiled.tree, "edge", Descriptor((Entry("plan", "free"),)))
    assert told.levels[0].met is not None
    assert str(told.levels[0].met.position) == "f.yaml:3:15"


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            [stored("a", f"{{{USER}, {limit(1)}}}"), stored("b", f"{{{USER}, {limit(2)}}}")],
            "database:b:3:15: error: duplicate descriptor composite key 'edge.user'; database:a:3:15 has it with the "
            "same priority; join the two, or give one of them another priority",
        ),
        (
            [stored("a", f"{{{PLAN}, descriptors: [{{{USER}}}]}}, {{{PLAN}, descriptors: [{{{USER}}}]}}")],
            "database:a:3:69: error: duplicate descriptor composite key 'edge.plan_free'; it is already at "
            "database:a:3:15; join the two",
        ),
        (
            [
                stored("a", f"{{key: p, value: a*, share_threshold: true, descriptors: [{{{USER}}}]}}"),
                stored("b", f"{{key: p, value: a*, descriptors: [{{{VIP}}}]}}"),
            ],
            "database:b:3:15: error: share_threshold of 'edge.p_a*' is another at database:a:3:15, "
            "which comes first and counts",
        ),
        (
            [
                stored("a", f"{{{USER}, {limit(1)}}}", of_domain="charge: always"),
                stored("b", "", of_domain="charge: admitted"),
            ],
            "database:b:2:9: error: domain 'edge' has another charge at database:a:2:9; a domain has one, "
            "and a rule may have its own",
        ),
        (
            [stored("a", "", of_domain="deny: {format: json}"), stored("b", "", of_domain="deny: {status: 503}")],
            "database:b:2:7: error: domain 'edge' has 'deny' at database:a:2:7 already; a domain has one, "
            "in one of its files",
        ),
        (
            [stored("free_tier", "{key: user, rate_limit: {unit: minuet}}")],
            "database:free_tier:3:46: error: invalid rate limit unit 'minuet'; it is one of second, minute, hour, day, "
            "week, month, year; did you mean 'minute'?",
        ),
        (
            [StoredRule("1", "a", "domain: \ud800")],
            "database:a:1:9: error: error loading config file: yaml: invalid UTF-8",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_place(rules: list[StoredRule], says: str) -> None:
    with pytest.raises(RulesError) as refused:
        check_rule(rules)
    (problem,) = refused.value.problems
    assert says in str(problem)


def test_a_switch_of_the_way_counts_from_the_stronger_source() -> None:
    shared = f"{{key: p, value: a*, share_threshold: true, descriptors: [{{{USER}, {limit(1)}}}]}}"
    compiled = check_rule([stored("a", shared)], [file(f"{{key: p, value: a*, descriptors: [{{{VIP}, {limit(2)}}}]}}")])

    assert compiled.tree.domains["edge"].exact["p", "a*"].share_threshold
    (warning,) = compiled.warnings
    assert warning.code == "overridden"
    assert len(compiled.tree.rules()) == 2


def test_an_error_in_what_is_left_out_is_an_error() -> None:
    with pytest.raises(RulesError, match=r"f\.yaml:3:46: error: invalid rate limit unit"):
        check_rule(
            [stored("a", f"{{{USER}, {limit(1)}}}")],
            [file(f"{{{USER}, {limit(2)}, descriptors: []}}".replace("minute", "minuet"))],
        )


def test_files_describe_a_domain_once_and_a_descriptor_once_as_ever() -> None:
    rules = [stored("a", f"{{{PLAN}, descriptors: [{{{USER}, {limit(1)}}}]}}")]
    way = f"{{{PLAN}, descriptors: [{{{VIP}, {limit(1)}}}]}}"
    with pytest.raises(RulesError, match=r"g\.yaml:1:9: error: duplicate domain 'edge' .* f\.yaml:1:9"):
        check_rule(rules, [file(way), file(way, "g.yaml")])
    with pytest.raises(RulesError, match=r"g\.yaml:3:15: error: duplicate descriptor .* f\.yaml:3:15"):
        check_rule(rules, [file(way), file(way, "g.yaml")], merge_domains=True)


def test_what_is_said_of_a_domain_counts_from_the_strongest_that_says_it() -> None:
    strong = "charge: admitted\nshard_by: domain\ndeny: {status: 503}"
    weak = (
        "charge: always\nshard_by: descriptor\non_store_failure: deny\ndeny: {status: 502}\nanswer: {headers: []}\n"
        "ext_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}\n"
        "identity: {credentials: [{kind: api_key, header: x-key}]}"
    )
    compiled = check_rule([stored("a", f"{{{USER}, {limit(1)}}}", of_domain=strong)], [file("", of_domain=weak)])

    root = compiled.tree.domains["edge"]
    (rule,) = compiled.tree.rules()
    assert (rule.charge, root.shard_by, root.on_store_failure) == (
        Charge.ADMITTED,
        ShardBy.DOMAIN,
        OnStoreFailure.DENY,
    )
    assert rule.deny is not None
    assert (rule.deny.status, rule.style.headers) == (503, ())
    assert list(compiled.tree.mappings) == list(compiled.tree.identities) == ["edge"]
    assert [(warning.line, warning.message.partition(":")[0]) for warning in compiled.warnings] == [
        (2, "'charge' of domain 'edge' is left out"),
        (3, "'shard_by' of domain 'edge' is left out"),
        (5, "'deny' of domain 'edge' is left out"),
    ]


def test_a_mapping_that_is_left_out_is_not_compared_with_the_rules() -> None:
    strong = "ext_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}"
    weak = "ext_authz: {descriptors: [{entries: [{key: a, value: b}]}, {entries: [{key: user, header: x}]}]}"
    compiled = check_rule([stored("a", f"{{{USER}, {limit(1)}}}", of_domain=strong)], [file("", of_domain=weak)])
    assert [warning.code for warning in compiled.warnings] == ["overridden"]


def test_what_a_descriptor_hands_down_reaches_what_weaker_sources_have_below_it() -> None:
    rules = [stored("a", f"{{{PLAN}, on_store_failure: deny, {limit(1)}}}")]
    compiled = check_rule(rules, [file(f"{{{PLAN}, descriptors: [{{{USER}, {limit(2)}}}]}}")])
    assert [rule.on_store_failure for rule in compiled.tree.rules()] == [OnStoreFailure.DENY] * 2


def test_wildcards_are_tried_in_the_order_of_their_sources() -> None:
    rules = [
        stored("a", f"{{key: p, value: '*a*', {limit(1)}}}", 9),
        stored("b", f"{{key: p, value: '*b*', {limit(2)}}}", 5),
    ]
    compiled = check_rule(rules, [file(f"{{key: p, value: '*c*', {limit(3)}}}", "0.yaml")])
    assert [wildcard.node.value for wildcard in compiled.tree.domains["edge"].wildcards] == ["*b*", "*a*", "*c*"]
    assert compiled.sources == ("database:b", "database:a", "0.yaml")


def test_rules_are_written_back_in_the_order_they_are_tried_in_whoever_says_what_they_limit() -> None:
    rules = [
        stored("a", f"{{key: p, value: '*a*', descriptors: [{{{USER}, {limit(1)}}}]}}", 1),
        stored("b", f"{{key: p, value: '*b*', {limit(2)}}}", 2),
    ]
    (shown,) = documents(check_rule(rules, [file(f"{{key: p, value: '*a*', {limit(3)}}}")]), with_places=False)
    assert [(one["value"], one["rate_limit"]["requests_per_unit"]) for one in shown["descriptors"]] == [
        ("*a*", 3),
        ("*b*", 2),
    ]


def test_rules_that_are_not_enabled_are_no_source() -> None:
    off = StoredRule("1", "off", "nonsense: [", enabled=False)
    assert stored_sources([off]) == []


def test_a_digest_tells_priorities_and_targeting_apart_and_of_files_is_what_it_was() -> None:
    one, other = stored("a", f"{{{USER}}}", 1), stored("a", f"{{{USER}}}", 2)
    assert check_rule([one]).digest != check_rule([other]).digest
    files = {"b": b"domain: b", "a": b"domain: a"}
    assert compile_documents(files).digest == hashlib.sha256(b"9:domain: a9:domain: b").hexdigest()
