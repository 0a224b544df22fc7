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
    format_node,
    format_response_policy,
    format_rule,
)
from ratelimit_rls.cli.rules_arguments import load_rules, sources_arguments
from ratelimit_rls.core.tree import Node

if TYPE_CHECKING:
    from ratelimit_rls.rules.compile import CompiledRules

_EXAMPLES = """\b
Examples:
  # every rule, with its place in the tree and its position in the file
  $ ratelimit-rls show descriptors/
  # which rules differ in meaning between two directories
  $ diff <(ratelimit-rls show --format yaml old/) <(ratelimit-rls show --format yaml new/)"""


@click.command(epilog=_EXAMPLES)
@sources_arguments
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "yaml", "json"]),
    default="tree",
    show_default=True,
    help="Output format: a tree, canonical YAML with the same meaning, or JSON with positions.",
)
def show(paths: tuple[Path, ...], merge_domains: bool, database: str, form: str) -> ExitCode:
    """Show rules as the server compiles them.

    PATHS are rules files, or directories of rules files. With --database, the stored rules take precedence over them.
    """
    compiled = load_rules(paths, merge_domains, database)
    if form == "json":
        domains = canonical_documents(compiled, with_places=True)
        click.echo(json.dumps({"digest": compiled.digest, "files": compiled.files, "domains": domains}, indent=2))
    elif form == "yaml":
        click.echo(_yaml(compiled), nl=False)
    else:
        for root in compiled.tree.domains.values():
            click.echo("\n".join(_draw_tree(root, compiled)))
    return ExitCode.DONE


def _draw_tree(root: Node, compiled: CompiledRules) -> Iterator[str]:
    """Yield one line per node: its place in the tree, its rule if it has one, and its position."""
    name = format_node(root)
    mapped = root.key in compiled.tree.mappings
    rows = list(_rows(root, "", source_order(compiled)))
    width = max([len(name), *(len(text) for text, _ in rows)])
    of_domain = ", ".join(filter(None, (format_domain(root), "ext_authz" if mapped else "")))
    yield f"{click.style(name, bold=True)}{' ' * (width - len(name))}  {of_domain}".rstrip()
    for text, node in rows:
        yield f"{text:<{width}}  {_format_node_details(node, root)}".rstrip()


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
