"""`show`: print compiled rules as a tree, as canonical YAML or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.canonical_yaml import canonical_documents, in_file_order, source_order
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import (
    escape_unprintable,
    format_deny,
    format_domain,
    format_location,
    format_node,
    format_response_policy,
    format_rule,
)
from ratelimit_rls.cli.redis_options import OptionValue, redis_connection_options, settings_from_options, with_redis
from ratelimit_rls.cli.rules_arguments import load_rules, sources_arguments
from ratelimit_rls.core.model import Entry
from ratelimit_rls.core.pattern import WILDCARD
from ratelimit_rls.core.storage_keys import Location, ShardBy, ShardByKey, hash_tag, key_slot, key_start
from ratelimit_rls.core.tree import Node, Tree

if TYPE_CHECKING:
    from ratelimit_rls.rules.compile import CompiledRules
    from ratelimit_rls.store.redis.factory import AnyRedisStore

_EXAMPLES = """\b
Examples:
  # every rule, with its place in the tree and its position in the file
  $ ratelimit-rls show descriptors/
  # which rules differ in meaning between two directories
  $ diff <(ratelimit-rls show --format yaml old/) <(ratelimit-rls show --format yaml new/)"""


@click.command(epilog=_EXAMPLES)
@sources_arguments
@redis_connection_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "yaml", "json"]),
    default="tree",
    show_default=True,
    help="Output format: a tree, canonical YAML with the same meaning, or JSON with positions.",
)
def show(paths: tuple[Path, ...], merge_domains: bool, database: str, form: str, **where: OptionValue) -> ExitCode:
    """Show rules as the server compiles them.

    PATHS are rules files, or directories of rules files. With --database, the stored rules take precedence over them.
    The tree includes the hash slot on a Redis Cluster where `shard_by` makes it the same for all requests and, if
    --redis-url is given, the node that has it.
    """
    compiled = load_rules(paths, merge_domains, database)
    if form == "json":
        domains = canonical_documents(compiled, with_places=True)
        click.echo(json.dumps({"digest": compiled.digest, "files": compiled.files, "domains": domains}, indent=2))
    elif form == "yaml":
        click.echo(_yaml(compiled), nl=False)
    else:
        locations = _locations(compiled, where)
        for root in compiled.tree.domains.values():
            click.echo("\n".join(_draw_tree(root, compiled, locations)))
    return ExitCode.DONE


def _locations(compiled: CompiledRules, where: dict[str, OptionValue]) -> dict[bytes, Location]:
    """Return the place of each hash tag that the rules alone determine, with its node if the options name a Redis."""
    prefix = key_start(str(where["cache_key_prefix"] or "").encode())
    keys = {tag: prefix + tag for root in compiled.tree.domains.values() for tag in _hash_tags(root)}
    if where["redis_url"] is None or not keys:
        return {tag: Location(key_slot(key)) for tag, key in keys.items()}

    async def locate(store: AnyRedisStore) -> dict[bytes, Location]:
        # A second Redis has only descriptors with nothing but per-second limits.
        return {tag: store.realms[0].location(key) for tag, key in keys.items()}

    return with_redis(settings_from_options(where), locate)


def _hash_tags(root: Node) -> Iterator[bytes]:
    if root.shard_by is ShardBy.DOMAIN:
        yield hash_tag(root.key, None, root.shard_by)
    elif isinstance(root.shard_by, ShardByKey):
        nodes = (node for level in Tree({root.key: root}).levels() for node in level.children())
        yield from (hash_tag(root.key, entry, root.shard_by) for node in nodes if (entry := _shard_entry(node, root)))


def _shard_entry(node: Node, root: Node) -> Entry | None:
    """Return the entry of a node by which its descriptors are sharded; None if it has another key or any value.

    Of several entries with the same key the first one counts; rules with that are not expected.
    """
    is_key = isinstance(root.shard_by, ShardByKey) and node.key == root.shard_by.key
    is_exact = node.value and node.pattern is None and WILDCARD not in node.value
    return Entry(node.key, node.value) if is_key and is_exact else None


def _draw_tree(root: Node, compiled: CompiledRules, locations: Mapping[bytes, Location]) -> Iterator[str]:
    """Yield one line per node: its place in the tree, its rule if it has one, and its position."""
    name = format_node(root)
    mapped = root.key in compiled.tree.mappings
    rows = list(_rows(root, "", source_order(compiled)))
    width = max([len(name), *(len(text) for text, _ in rows)])
    tag = hash_tag(root.key, None, root.shard_by) if root.shard_by is ShardBy.DOMAIN else None
    place = format_location(locations[tag]) if tag else ""
    of_domain = ", ".join(filter(None, (format_domain(root), place, "ext_authz" if mapped else "")))
    yield f"{click.style(name, bold=True)}{' ' * (width - len(name))}  {of_domain}".rstrip()
    for text, node in rows:
        entry = _shard_entry(node, root)
        place = format_location(locations[hash_tag(root.key, entry, root.shard_by)]) if entry else ""
        yield f"{text:<{width}}  {'  '.join(filter(None, (_format_node_details(node, root), place)))}".rstrip()


def _rows(parent: Node, indent: str, sources: Mapping[str, int]) -> Iterator[tuple[str, Node]]:
    level = in_file_order(parent, sources)
    for node in level:
        is_last = node is level[-1]
        yield f"{indent}{'└─ ' if is_last else '├─ '}{format_node(node)}", node
        yield from _rows(node, indent + ("   " if is_last else "│  "), sources)


def _format_node_details(node: Node, root: Node) -> str:
    """Format the rule of a node. The response policy is included only if it differs from the domain's."""
    rule = node.rule
    if rule is None:
        return ""
    parts = [format_rule(rule)]
    if node.share_threshold:
        parts.append("share_threshold")
    if rule.response_policy != root.response_policy:
        parts.append(format_response_policy(rule.response_policy) or "headers as by default")
    if rule.deny != root.deny:
        parts.append(format_deny(rule.deny))
    parts.extend(f"in place of {place}" for place in node.overrode)
    place = click.style(escape_unprintable(f"  {rule.position}"), dim=True) if rule.position else ""
    return f"{click.style('●', fg='cyan')} {escape_unprintable(', '.join(parts))}{place}"


def _yaml(compiled: CompiledRules) -> str:
    from ratelimit_rls.cli.yaml_text import yaml_text

    return yaml_text(canonical_documents(compiled, with_places=False))
