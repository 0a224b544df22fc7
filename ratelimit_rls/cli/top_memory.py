"""`top --memory`: what fills Redis, by domain and rule.

Every key is read by SCAN and assigned to a group by its name. The memory of a group is estimated from a sample of its
keys, with MEMORY USAGE.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ratelimit_rls.cli.credential_options import format_table
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_bytes, format_count, plural
from ratelimit_rls.cli.redis_options import OptionValue, with_redis
from ratelimit_rls.cli.rules_arguments import load_rules
from ratelimit_rls.core.match import match
from ratelimit_rls.core.model import Descriptor, Request
from ratelimit_rls.core.storage_key_parser import ParsedKey, parse_key
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import StoreError

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings
    from ratelimit_rls.store.redis.deployment import ServerNode
    from ratelimit_rls.store.redis.factory import AnyRedisStore

DEFAULT_KEYS_PER_SECOND = 5_000
"""Costs Redis less than 2 % of a core: 2.4 to 3.5 µs a key were measured on Redis 6.2, 7.0 and Valkey 9."""

MAX_KEYS_PER_SCAN = 100
"""SCAN blocks the server for 70 to 220 µs with this COUNT, less than a batch of a hundred decisions."""

MIN_MEASURED = 20
"""Keys of a group whose memory is measured in any case; of the others, MEASURED_SHARE."""

MEASURED_SHARE = 0.05
PROGRESS_INTERVAL_S = 2.0

REQUEST_IDS = "request ids"
OTHER_KEYS = "keys that are not ours"


class Group(NamedTuple):
    """Keys that are counted together."""

    domain: str  # empty for keys that are no counters
    rule: str  # path of the rule; empty if it is unknown
    descriptor: str  # its keys: `plan, user`; or which other keys these are
    state: str  # e.g. `gcra:60`


@dataclass(slots=True)
class GroupMemory:
    """Keys of one group, and the memory of those that were measured."""

    keys: int = 0
    measured_keys: int = 0
    measured_bytes: int = 0

    @property
    def bytes_each(self) -> float | None:
        """Mean memory of a key; None if none was measured."""
        return self.measured_bytes / self.measured_keys if self.measured_keys else None


@dataclass(slots=True)
class NodeScan:
    """Progress of the scan of one node."""

    node: ServerNode
    total_keys: int = 0
    scanned_keys: int = 0
    cursor: bytes | None = b"0"  # None: the scan is complete or failed
    used_memory_bytes: int | None = None
    maxmemory_bytes: int | None = None
    error: str = ""

    @property
    def is_complete(self) -> bool:
        return self.cursor is None and not self.error

    @property
    def progress(self) -> float:
        return self.scanned_keys / max(1, self.total_keys)


@dataclass(slots=True)
class MemoryScan:
    """Result of a scan, which is valid at any time: what is unknown is extrapolated from what was seen."""

    nodes: list[NodeScan] = field(default_factory=list)
    groups: dict[Group, GroupMemory] = field(default_factory=dict)
    measure_error: str = ""  # why the memory of keys is unknown

    @property
    def scanned_keys(self) -> int:
        return sum(node.scanned_keys for node in self.nodes)

    @property
    def total_keys(self) -> int:
        """Keys in all nodes: counted where the scan is complete, else as reported by DBSIZE."""
        return sum(
            node.scanned_keys if node.is_complete else max(node.total_keys, node.scanned_keys) for node in self.nodes
        )

    @property
    def factor(self) -> float:
        """Number of existing keys for each that was seen."""
        return self.total_keys / self.scanned_keys if self.scanned_keys else 1.0

    def rows(self) -> list[tuple[Group, int, int | None]]:
        """Return the groups with their estimated keys and bytes, the largest first."""
        rows = [
            (group, round(memory.keys * self.factor), _scaled(memory.bytes_each, memory.keys * self.factor))
            for group, memory in self.groups.items()
        ]
        return sorted(rows, key=lambda row: (-(row[2] or 0), -row[1], row[0]))


def _scaled(each: float | None, keys: float) -> int | None:
    return None if each is None else round(each * keys)


def show_memory(
    where: dict[str, OptionValue], rules: Sequence[Path], keys_per_second: int, limit: int, form: str
) -> ExitCode:
    """Scan and print. After Ctrl-C, print what was seen so far."""
    settings = _settings(where)
    tree = load_rules(tuple(rules), merge_domains=True).tree if rules else None
    scan = MemoryScan()

    async def work(store: AnyRedisStore) -> None:
        await scan_memory(store, scan, Grouping(settings.cache_key_prefix, tree), keys_per_second, _show_progress)

    started_s = time.monotonic()
    try:
        with_redis(settings, work)
    except KeyboardInterrupt:
        click.echo(err=True)
    _print(scan, time.monotonic() - started_s, limit, form)
    failed = [node for node in scan.nodes if node.error]
    for node in failed:
        click.echo(f"Error: the keys of {node.node} are missing: {escape_unprintable(node.error)}", err=True)
    return ExitCode.UNREACHABLE if failed else ExitCode.DONE


def _settings(where: dict[str, OptionValue]) -> Settings:
    from ratelimit_rls.cli.serve import settings_from_flags

    settings = settings_from_flags(where)
    if settings.redis is None:
        raise click.UsageError(
            "neither --redis-url nor REDIS_URL is set: the store is embedded, and its counters are in the memory of "
            "the server; see ratelimit.embedded_store.keys and ratelimit.embedded_store.bytes in its /stats"
        )
    return settings


class Grouping:
    """Assigns keys to groups: by rule if rules are given, else by the keys of the descriptor."""

    def __init__(self, prefix: str, tree: Tree | None) -> None:
        self._prefix = prefix
        self._tree = tree

    def group(self, key: bytes) -> Group:
        text = key.decode(errors="replace")
        parsed = parse_key(text, self._prefix)
        if parsed is not None:
            descriptor = ", ".join(entry.key for entry in parsed.entries) + ", …" * parsed.is_cut
            return Group(parsed.domain, self._rule(parsed), descriptor, parsed.state)
        is_record = text.startswith(f"{self._prefix}rl:{{") and ":once:" in text
        return Group("", "", REQUEST_IDS if is_record else OTHER_KEYS, "")

    def _rule(self, key: ParsedKey) -> str:
        if self._tree is None or key.is_cut:
            return ""
        (found,) = match(self._tree, Request(key.domain, (Descriptor(key.entries),)))
        return found.rule.path if found.rule else ""


async def scan_memory(
    store: AnyRedisStore,
    scan: MemoryScan,
    grouping: Grouping,
    keys_per_second: int,
    on_progress: Callable[[MemoryScan], None] = lambda scan: None,
) -> None:
    """Scan all nodes, in turn, so that all are equally far: the keys seen so far are a sample of all keys.

    A node that fails is left out, with its error.
    """
    scan.nodes += [NodeScan(node) for realm in store.realms for node in realm.nodes()]
    for node in scan.nodes:
        await _guarded(node, _describe(node))
    started_s = time.monotonic()
    reported_s = started_s
    count = min(MAX_KEYS_PER_SCAN, keys_per_second)
    while unfinished := [node for node in scan.nodes if node.cursor is not None]:
        node = min(unfinished, key=lambda one: one.progress)
        await _guarded(node, _scan_some(scan, node, grouping, count))
        if time.monotonic() - reported_s >= PROGRESS_INTERVAL_S:
            reported_s = time.monotonic()
            on_progress(scan)
        await asyncio.sleep(max(0.0, started_s + scan.scanned_keys / keys_per_second - time.monotonic()))


async def _guarded(node: NodeScan, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StoreError as exc:
        node.error, node.cursor = str(exc), None


async def _describe(node: NodeScan) -> None:
    """Ask for the number of keys and, as far as permitted, for the memory."""
    from ratelimit_rls.store.redis.resp import command
    from ratelimit_rls.store.redis.server_info import parse_server_info

    connection = node.node.connection
    (node.total_keys,) = await connection.execute(command(b"DBSIZE"))
    (info,) = await connection.query([command(b"INFO")], timeout_s=5.0)
    if isinstance(info, bytes):
        parsed = parse_server_info(info)
        node.used_memory_bytes, node.maxmemory_bytes = parsed.used_memory_bytes, parsed.maxmemory_bytes


async def _scan_some(scan: MemoryScan, node: NodeScan, grouping: Grouping, count: int) -> None:
    from ratelimit_rls.store.redis.resp import command

    assert node.cursor is not None
    (reply,) = await node.node.connection.execute(command(b"SCAN", node.cursor, b"COUNT", b"%d" % count))
    cursor, keys = reply
    measured = []
    for key in keys:
        memory = scan.groups.setdefault(grouping.group(key), GroupMemory())
        memory.keys += 1
        if memory.keys <= MIN_MEASURED or random.random() < MEASURED_SHARE:
            measured.append((key, memory))
    node.scanned_keys += len(keys)
    node.cursor = None if cursor == b"0" else cursor
    await _measure(scan, node, measured)


async def _measure(scan: MemoryScan, node: NodeScan, keys: Sequence[tuple[bytes, GroupMemory]]) -> None:
    """Add the memory of these keys to their groups, unless the server does not permit it."""
    from ratelimit_rls.store.redis.resp import command

    if scan.measure_error or not keys:
        return
    requests = [command(b"MEMORY", b"USAGE", key) for key, _ in keys]
    for (_, memory), reply in zip(keys, await node.node.connection.query(requests, timeout_s=5.0), strict=True):
        if isinstance(reply, int):
            memory.measured_keys += 1
            memory.measured_bytes += reply
        elif reply is not None:  # None: the key has expired meanwhile
            scan.measure_error = str(reply)
            return


def _show_progress(scan: MemoryScan) -> None:
    share = 100 * scan.scanned_keys / max(1, scan.total_keys)
    click.echo(f"… {scan.scanned_keys:,} of {scan.total_keys:,} keys, {share:.0f} %; Ctrl-C shows these", err=True)


def _print(scan: MemoryScan, elapsed_s: float, limit: int, form: str) -> None:
    click.echo(json.dumps(_json(scan, limit)) if form == "json" else "\n".join(_text(scan, elapsed_s, limit)))
    if scan.measure_error:
        click.echo(f"memory is unknown: MEMORY USAGE failed: {escape_unprintable(scan.measure_error)}", err=True)


def _text(scan: MemoryScan, elapsed_s: float, limit: int) -> Iterator[str]:
    yield (
        f"{scan.scanned_keys:,} of {_keys(scan.total_keys)} on {format_count(len(scan.nodes), 'node')} "
        f"scanned in {elapsed_s:.1f} s" + ("" if scan.factor == 1 else "; the rest is extrapolated")
    )
    for node in scan.nodes:
        yield _node_text(node)
    rows = scan.rows()
    if not rows:
        return
    yield ""
    whole = sum(bytes_ or 0 for _, _, bytes_ in rows)
    cells = [_row(group, keys, bytes_, whole) for group, keys, bytes_ in rows[:limit]]
    head, *lines = format_table(("DOMAIN", "RULE", "STATE", "KEYS", "BYTES", "EACH", "SHARE"), cells)
    yield click.style(head, bold=True)
    yield from lines
    if len(rows) > limit:
        rest = rows[limit:]
        keys, bytes_left = sum(row[1] for row in rest), sum(row[2] or 0 for row in rest)
        yield f"… and {format_count(len(rest), 'more row')}: {_keys(keys)}, {format_bytes(bytes_left)}"


def _keys(number: int) -> str:
    return f"{number:,} {plural(number, 'key')}"


def _row(group: Group, keys: int, bytes_: int | None, whole: int) -> tuple[str, ...]:
    name = group.rule or (f"({group.descriptor})" if group.descriptor else "(no entries)")
    figures = ("–", "–", "–")
    if bytes_ is not None:
        figures = format_bytes(bytes_), f"{bytes_ / max(1, keys):.0f}", f"{100 * bytes_ / max(1, whole):.0f} %"
    return group.domain or "–", name, group.state or "–", f"{keys:,}", *figures


def _node_text(node: NodeScan) -> str:
    text = f"{node.node}: {_keys(node.total_keys)}"
    if node.used_memory_bytes is not None:
        text += f", {format_bytes(node.used_memory_bytes)} used"
        if node.maxmemory_bytes:
            share = 100 * node.used_memory_bytes / node.maxmemory_bytes
            text += f" of {format_bytes(node.maxmemory_bytes)} ({share:.0f} %)"
    return text


def _json(scan: MemoryScan, limit: int) -> dict[str, Any]:
    return {
        "scanned_keys": scan.scanned_keys,
        "keys": scan.total_keys,
        "nodes": [
            {
                "node": str(node.node),
                "keys": node.total_keys,
                "scanned_keys": node.scanned_keys,
                "memory_bytes": node.used_memory_bytes,
                "maxmemory_bytes": node.maxmemory_bytes,
                "error": node.error,
            }
            for node in scan.nodes
        ],
        "groups": [{**group._asdict(), "keys": keys, "bytes": bytes_} for group, keys, bytes_ in scan.rows()[:limit]],
    }
