"""Compilation of `shard_by`, which must be equal in all files of a domain."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.storage_keys import ShardBy
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents


@pytest.mark.parametrize(
    ("written", "shard_by"),
    [
        ("", ShardBy.DESCRIPTOR),
        ("shard_by: descriptor", ShardBy.DESCRIPTOR),
        ("shard_by: domain", ShardBy.DOMAIN),
        ("shard_by: ~", ShardBy.DESCRIPTOR),
    ],
)
def test_shard_by_is_compiled(written: str, shard_by: ShardBy) -> None:
    tree = compile_documents({"a": f"domain: a\n{written}\n".encode(), "b": b"domain: b"}).tree

    assert tree.domains["a"].shard_by is shard_by
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
