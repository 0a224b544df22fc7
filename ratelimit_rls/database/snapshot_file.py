"""The snapshot file: the last accounts read, from which a process starts while the database is unavailable.

    gzip of:  {"format": 1, "sequence": 42, "sha256": "…"}\\n       describes the rest
              {"tiers": …}\\n{"user": …}\\n…                         one line per account

It contains digests of keys, as the database does, so only its owner may read it. A file that fails verification is not
used at all: half of the limits would be worse than none.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.database.configuration import Configuration
from ratelimit_rls.database.row_mapping import read_limits, write_limits
from ratelimit_rls.errors import DatabaseError
from ratelimit_rls.identity.accounts import ApiKey, Override, Tier, User
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting

FORMAT = 1

_LINES_PER_STEP = 100
_PAUSE_S = 0.001
"""The writer runs in a thread beside the event loop. It releases the interpreter for this time after this many lines,
which take less than a millisecond, so that no request waits longer."""


_RECENT_S = 60.0


class _Header(NamedTuple):
    """First line of the file."""

    sequence: int
    at_s: float
    sha256: str


class SnapshotFile:
    """Reads and writes the snapshot. Blocking: call it in a thread."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def write(self, accounts: Configuration) -> None:
        """Write the file atomically. Raises OSError if that fails.

        If several processes share the file, the first one writes it; the others have the same accounts and skip it.
        """
        if self._was_recently_written(accounts):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        body = bytearray()
        for number, line in enumerate(_lines(accounts)):
            body += json.dumps(line, separators=(",", ":")).encode() + b"\n"
            if number % _LINES_PER_STEP == 0:
                time.sleep(_PAUSE_S)
        head = {
            "format": FORMAT,
            "sequence": accounts.sequence,
            "at": accounts.at_s,
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        packed = gzip.compress(json.dumps(head).encode() + b"\n" + body, compresslevel=1)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(packed)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _was_recently_written(self, accounts: Configuration) -> bool:
        """Return whether the file has these accounts and is recent. An older one is rewritten in case it was
        damaged."""
        try:
            is_new = time.time() - self.path.stat().st_mtime < _RECENT_S
            head, _ = self._verified()
            return is_new and (head.sequence, head.at_s) == (accounts.sequence, accounts.at_s)
        except (OSError, DatabaseError):
            return False

    def read(self) -> Configuration | None:
        """Return the accounts; None: there is no file. Raises DatabaseError with the reason if it is unusable."""
        try:
            head, body = self._verified()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DatabaseError(f"the snapshot {self.path} cannot be read: {error.strerror or error}") from None
        try:
            return _accounts(head, body)
        except (ValueError, KeyError, TypeError) as error:
            raise self._unusable(f"invalid content ({type(error).__name__})") from None

    def _verified(self) -> tuple[_Header, bytes]:
        try:
            with gzip.open(self.path) as file:
                head, body = self._parse_header(file.readline(4096)), file.read()
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise self._unusable("the file is not a complete gzip file") from None
        if hashlib.sha256(body).hexdigest() != head.sha256:
            raise self._unusable("its checksum is wrong")
        return head, body

    def _parse_header(self, line: bytes) -> _Header:
        try:
            fields = json.loads(line)
            if fields["format"] == FORMAT:
                return _Header(int(fields["sequence"]), float(fields["at"]), str(fields["sha256"]))
        except (ValueError, KeyError, TypeError):
            raise self._unusable("its header is invalid") from None
        raise self._unusable(f"it has format {fields['format']!r}, but this version reads {FORMAT}")

    def _unusable(self, reason: str) -> DatabaseError:
        return DatabaseError(f"the snapshot {self.path} cannot be used: {reason}")


def _lines(accounts: Configuration) -> Iterator[tuple[str, dict[str, Any]]]:
    for tier in accounts.tiers:
        yield (
            "tier",
            _without_empty(name=tier.name, limits=write_limits(tier.limits), about=tier.description, v=tier.version),
        )
    for user in accounts.users:
        override = user.override
        yield (
            "user",
            _without_empty(
                id=user.user_id,
                tier=user.tier,
                limits=write_limits(user.limits),
                override=override and [write_limits(override.limits), override.until_s, override.reason],
                block=user.block and [user.block.reason, user.block.until_s],
                org=user.org,
                v=user.version,
            ),
        )
    for key in accounts.keys:
        yield (
            "key",
            _without_empty(
                id=key.key_id,
                digest=key.digest.hex(),
                user=key.user_id,
                name=key.name,
                tier=key.tier,
                limits=write_limits(key.limits),
                expires=key.expires_s,
                revoked=key.revoked_s,
                v=key.version,
            ),
        )
    for rule in accounts.rules:
        target = rule.targeting
        yield (
            "rule",
            {
                "id": rule.rule_id,
                "name": rule.name,
                "document": rule.document,
                "priority": rule.priority,
                "enabled": rule.enabled,
                "targeting": [target.tiers, target.endpoints, target.methods, target.cidrs],
                "scope": target.scope.value if target.scope else None,
                "rest": [rule.version, rule.created_by, rule.created_s, rule.updated_s],
            },
        )


def _without_empty(**fields: Any) -> dict[str, Any]:
    """Drop empty fields: most users have a tier and nothing else."""
    return {name: value for name, value in fields.items() if value not in (None, "", [])}


def _accounts(head: _Header, body: bytes) -> Configuration:
    made: dict[str, list[Any]] = {kind: [] for kind in _MAKERS}
    for line in body.splitlines():
        kind, fields = json.loads(line)
        made[kind].append(_MAKERS[kind](fields))
    tiers, users, keys, rules = (tuple(values) for values in made.values())
    return Configuration(head.sequence, tiers, users, keys, rules, head.at_s)


def _tier(fields: dict[str, Any]) -> Tier:
    return Tier(fields["name"], read_limits(fields.get("limits", [])), fields.get("about", ""), fields["v"])


def _user(fields: dict[str, Any]) -> User:
    override, block = fields.get("override"), fields.get("block")
    return User(
        fields["id"],
        fields.get("tier", ""),
        read_limits(fields.get("limits", [])),
        Override(read_limits(override[0]), override[1], override[2]) if override else None,
        Block(block[0], block[1]) if block else None,
        fields.get("org", ""),
        fields["v"],
    )


def _key(fields: dict[str, Any]) -> ApiKey:
    return ApiKey(
        fields["id"],
        bytes.fromhex(fields["digest"]),
        fields["user"],
        fields.get("name", ""),
        fields.get("tier", ""),
        read_limits(fields.get("limits", [])),
        fields.get("expires"),
        fields.get("revoked"),
        fields["v"],
    )


def _rule(fields: dict[str, Any]) -> StoredRule:
    tiers, endpoints, methods, cidrs = (tuple(some) for some in fields["targeting"])
    targeting = Targeting(tiers, endpoints, methods, cidrs, CounterScope(fields["scope"]) if fields["scope"] else None)
    about = (fields["document"], fields["priority"], fields["enabled"], targeting)
    return StoredRule(fields["id"], fields["name"], *about, *fields["rest"])


_MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {"tier": _tier, "user": _user, "key": _key, "rule": _rule}
"""Parsers by kind, in the order of the fields of Configuration."""
