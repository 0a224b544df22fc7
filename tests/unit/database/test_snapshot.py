"""The snapshot file, from which a process starts while the database is unavailable."""

from __future__ import annotations

import gzip
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.database.account_mirror import AccountMirror
from ratelimit_rls.database.configuration import Configuration, ConfigurationChanges
from ratelimit_rls.database.snapshot_file import SnapshotFile
from ratelimit_rls.errors import DatabaseError
from ratelimit_rls.identity.accounts import ApiKey, Override, Tier, User
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting

LIMITS = (Limit(100, Unit.MINUTE), Limit(5, Unit.SECOND, Algorithm.TOKEN_BUCKET, 9))

EVERYTHING = Configuration(
    42,
    (Tier("gold", LIMITS, "the best", 3), Tier("open", ())),
    (
        User("alice", "gold"),
        User("bob \N{SNOWMAN}", "", LIMITS, Override(LIMITS, 1e9, "why"), Block("spam", 2e9), "acme", 7),
        User("carl", block=Block()),
    ),
    (ApiKey("k1", b"\x00\xff", "alice", "laptop", "gold", LIMITS, 1.5, 2.5, 4), ApiKey("k2", b"d", "alice")),
    (
        StoredRule(
            "r1", "first", "domain: a\n", 1, True, Targeting(("gold",), ("/a/*",), ("GET",), ("::/0",), CounterScope.IP)
        ),
        StoredRule("r2", "second", "domain: b\n", 2, False, Targeting(), 5, "me", 1.0, 2.0),
    ),
)


@pytest.fixture
def file(tmp_path: Path) -> SnapshotFile:
    return SnapshotFile(tmp_path / "new" / "snapshot.gz")


def test_snapshot_round_trip(file: SnapshotFile) -> None:
    assert file.read() is None
    file.write(EVERYTHING)
    assert file.read() == EVERYTHING


def test_snapshot_is_private_and_leaves_no_temporary_file(file: SnapshotFile) -> None:
    file.write(EVERYTHING)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert list(file.path.parent.iterdir()) == [file.path]


def test_recent_snapshot_of_another_process_is_not_rewritten(file: SnapshotFile) -> None:
    file.write(EVERYTHING)
    before = file.path.stat()
    file.write(EVERYTHING)
    assert file.path.stat().st_ino == before.st_ino
    backup = replace(EVERYTHING, sequence=41)  # a restored database is behind, but it is authoritative
    file.write(backup)
    assert file.read() == backup


def test_old_snapshot_with_the_same_sequence_is_rewritten(file: SnapshotFile) -> None:
    file.write(EVERYTHING)
    os.utime(file.path, (1e9, 1e9))
    other = replace(EVERYTHING, users=())
    file.write(other)
    assert file.read() == other


def _flipped(content: bytes) -> bytes:
    text = gzip.decompress(content).replace(b'"gold"', b'"lead"')
    return gzip.compress(text)


def _other_format(content: bytes) -> bytes:
    head, _, rest = gzip.decompress(content).partition(b"\n")
    return gzip.compress(json.dumps({**json.loads(head), "format": 2}).encode() + b"\n" + rest)


@pytest.mark.parametrize(
    ("damage", "expected_error"),
    [
        (_flipped, "checksum is wrong"),
        (lambda content: content[:-20], "not a complete gzip file"),
        (lambda content: b"", "header is invalid"),
        (lambda content: b"hello", "not a complete gzip file"),
        (lambda content: gzip.compress(b"hello"), "header is invalid"),
        (_other_format, "format 2"),
    ],
)
def test_damaged_snapshot_is_rejected(file: SnapshotFile, damage: object, expected_error: str) -> None:
    file.write(EVERYTHING)
    file.path.write_bytes(damage(file.path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DatabaseError, match=expected_error) as raised:
        file.read()
    assert str(file.path) in str(raised.value)
    file.write(EVERYTHING)  # a damaged file is replaced
    assert file.read() == EVERYTHING


def test_account_mirror_applies_changes() -> None:
    mirror = AccountMirror(EVERYTHING)
    assert mirror.accounts() == EVERYTHING
    early = StoredRule("r3", "zeroth", "domain: c\n", 0)
    mirror.apply(
        ConfigurationChanges(
            43,
            {"open": None},
            {"alice": None, "dora": User("dora"), "nobody": None},
            {"k2": ApiKey("k2", b"d", "alice", revoked_s=1.0)},
            {"r3": early},
        )
    )
    now = mirror.accounts()
    assert now.sequence == 43
    assert [tier.name for tier in now.tiers] == ["gold"]
    assert [user.user_id for user in now.users] == ["bob \N{SNOWMAN}", "carl", "dora"]
    assert [key.revoked_s for key in now.keys] == [2.5, 1.0]
    assert [rule.name for rule in now.rules] == ["zeroth", "first", "second"]
