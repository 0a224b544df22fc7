"""`show`: the rules as they were understood, drawn, or written back in one normal form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.normal_form import documents, in_file_order, numbered
from ratelimit_rls.cli.rules import load, sources_arguments
from ratelimit_rls.cli.words import deny_words, domain_words, node_words, printable, rule_words, style_words
from ratelimit_rls.core.tree import Node

if TYPE_CHECKING:
    from ratelimit_rls.rules.compile import Compiled

_EXAMPLES = """\b
Examples:
  # every rule, where it hangs and where it was written
  $ ratelimit-rls show descriptors/
  # what has changed in meaning between two directories
  $ diff <(ratelimit-rls show --format yaml old/) <(ratelimit-rls show --format yaml new/)"""


@click.command(epilog=_EXAMPLES)
@sources_arguments
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "yaml", "json"]),
    default="tree",
    help="tree: drawn; yaml: rules that mean the same, in normal form; json: with places.",
)
def show(paths: tuple[Path, ...], merge_domains: bool, database: str, form: str) -> ExitCode:
    """Show rules as they are understood.

    PATHS are rules files, or directories of them; the rules of the database, if there is one, come before them.
    """
    compiled = load(paths, merge_domains, database)
    if form == "json":
        domains = documents(compiled, with_places=True)
        click.echo(json.dumps({"digest": compiled.digest, "files": compiled.files, "domains": domains}, indent=2))
    elif form == "yaml":
        click.echo(_yaml(compiled), nl=False)
    else:
        for root in compiled.tree.domains.values():
            click.echo("\n".join(_drawn(root, compiled)))
    return ExitCode.DONE


def _drawn(root: Node, compiled: Compiled) -> Iterator[str]:
    """One line per node: the tree, the rule if there is one, the place."""
    name = node_words(root)
    mapped = root.key in compiled.tree.mappings
    rows = list(_rows(root, "", numbered(compiled)))
    width = max([len(name), *(len(text) for text, _ in rows)])
    of_domain = ", ".join(filter(None, (domain_words(root), "ext_authz" if mapped else "")))
    yield f"{click.style(name, bold=True)}{' ' * (width - len(name))}  {of_domain}".rstrip()
    for text, node in rows:
        yield f"{text:<{width}}  {_told(node, root)}".rstrip()


def _rows(parent: Node, indent: str, sources: Mapping[str, int]) -> Iterator[tuple[str, Node]]:
    level = in_file_order(parent, sources)
    for node in level:
        is_last = node is level[-1]
        yield f"{indent}{'└─ ' if is_last else '├─ '}{node_words(node)}", node
        yield from _rows(node, indent + ("   " if is_last else "│  "), sources)


def _told(node: Node, root: Node) -> str:
    """How it is answered is told only where it differs from the domain."""
    rule = node.rule
    if rule is None:
        return ""
    words = [rule_words(rule)]
    if node.share_threshold:
        words.append("share_threshold")
    if rule.style != root.style:
        words.append(style_words(rule.style) or "headers as by default")
    if rule.deny != root.deny:
        words.append(deny_words(rule.deny))
    words.extend(f"in place of {place}" for place in node.overrode)
    place = click.style(printable(f"  {rule.position}"), dim=True) if rule.position else ""
    return f"{click.style('●', fg='cyan')} {printable(', '.join(words))}{place}"


def _yaml(compiled: Compiled) -> str:
    from ratelimit_rls.cli.yaml_text import yaml_text

    return yaml_text(documents(compiled, with_places=False))
