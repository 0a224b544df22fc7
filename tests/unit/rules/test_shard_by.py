"""Compilation of `shard_by`, which must be equal in all files of a domain."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.storage_keys import ShardBy, ShardByKey, Sharding
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents


@pytest.mark.parametrize(
    ("written", "shard_by"),
    [
        ("", ShardBy.DESCRIPTOR),
        ("shard_by: descriptor", ShardBy.DESCRIPTOR),
        ("shard_by: domain", ShardBy.DOMAIN),
        ("shard_by: ~", ShardBy.DESCRIPTOR),
        ("shard_by: {key: org}\ndescriptors: [{key: org}]", ShardByKey("org")),
        ("shard_by:\n  key: domain\ndescriptors: [{key: domain}]", ShardByKey("domain")),
    ],
)
def test_shard_by_is_compiled(written: str, shard_by: Sharding) -> None:
    tree = compile_documents({"a": f"domain: a\n{written}\n".encode(), "b": b"domain: b"}).tree

    assert tree.domains["a"].shard_by == shard_by
    assert tree.domains["b"].shard_by is ShardBy.DESCRIPTOR


@pytest.mark.parametrize("silent", ["a.yaml", "b.yaml"])
def test_shard_by_of_one_file_applies_to_all(silent: str) -> None:
    files = dict.fromkeys(("a.yaml", "b.yaml", "c.yaml"), b"domain: d\nshard_by: domain")

    compiled = compile_documents({**files, silent: b"domain: d"}, merge_domains=True)

    assert compiled.tree.domains["d"].shard_by is ShardBy.DOMAIN


def test_conflicting_shard_by_is_an_error() -> None:
    files = {"a.yaml": b"domain: d\nshard_by: domain", "b.yaml": b"domain: d\n\nshard_by: descriptor"}

    with pytest.raises(
        RulesError, match=r"b\.yaml:3:11: .*different shard_by at a\.yaml:2:11; .*same in all its files"
    ):
        compile_documents(files, merge_domains=True)


def test_conflicting_keys_are_an_error() -> None:
    descriptors = b"\ndescriptors: [{key: org}]"
    files = {"a.yaml": b"domain: d\nshard_by: {key: org}" + descriptors, "b.yaml": b"domain: d\nshard_by: {key: user}"}

    with pytest.raises(RulesError, match=r"b\.yaml:2:11: .*different shard_by at a\.yaml:2:11"):
        compile_documents(files, merge_domains=True)
    assert compile_documents({**files, "b.yaml": files["a.yaml"].partition(b"\ndescriptors")[0]}, merge_domains=True)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("org", "shard_by 'org' is not one of descriptor, domain or {key: …}, e.g. {key: org}"),
        (
            "domains",
            "shard_by 'domains' is not one of descriptor, domain or {key: …}, e.g. {key: org}; did you mean 'domain'?",
        ),
        ("{}", "'key' is missing; write 'key: org'"),
        ("{key: ''}", "shard_by: key '' is not the key of a descriptor's entry; write e.g. {key: org}"),
        ("{key: 7}", "shard_by: key '7' is not the key of a descriptor's entry; write e.g. {key: org}"),
        ("{key: [org]}", "shard_by: key 'a list' is not the key of a descriptor's entry; write e.g. {key: org}"),
        ("{key: org, value: acme}", "unknown key 'value'"),
        ("[key]", "is not one of descriptor, domain or {key: …}"),
    ],
)
def test_invalid_shard_by_is_an_error(written: str, message: str) -> None:
    with pytest.raises(RulesError) as caught:
        compile_documents({"f.yaml": f"domain: d\nshard_by: {written}\ndescriptors: [{{key: org}}]".encode()})

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("descriptors", "warns"),
    [("{key: user}", True), ("{key: user, descriptors: [{key: org}]}", False), ("{key: o*}", False)],
)
def test_key_without_a_rule_is_a_warning(descriptors: str, warns: bool) -> None:
    text = f"domain: d\nshard_by: {{key: org}}\ndescriptors: [{descriptors}]"

    warnings = compile_documents({"f.yaml": text.encode()}).warnings

    expected = (2, "unused-shard-key", "shard_by: no rule of domain 'd' has the key 'org', so it has no effect")
    assert [(one.line, one.code, one.message) for one in warnings] == ([expected] if warns else [])
