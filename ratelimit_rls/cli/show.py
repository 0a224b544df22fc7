"""`show`: the rules as they were understood, drawn, or written back in one normal form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules import load, rules_arguments
from ratelimit_rls.cli.words import node_words, rule_words
from ratelimit_rls.core.model import Algorithm, Charge, Limit, Rule
from ratelimit_rls.core.tree import Node, Tree
from ratelimit_rls.rules.grammar import NEW_LIMIT_KEYS

_EXAMPLES = """\b
Examples:
  # every rule, where it hangs and where it was written
  $ ratelimit-rls show descriptors/
  # what has changed in meaning between two directories
  $ diff <(ratelimit-rls show --format yaml old/) <(ratelimit-rls show --format yaml new/)"""


@click.command(epilog=_EXAMPLES)
@rules_arguments
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "yaml", "json"]),
    default="tree",
    help="tree: drawn; yaml: rules that mean the same, in normal form; json: with places.",
)
def show(paths: tuple[Path, ...], merge_domains: bool, form: str) -> ExitCode:
    """Show rules as they are understood.

    PATHS are rules files, or directories of them.
    """
    compiled = load(paths, merge_domains)
    if form == "json":
        domains = [_domain(root, with_places=True) for root in compiled.tree.domains.values()]
        click.echo(json.dumps({"digest": compiled.digest, "files": compiled.files, "domains": domains}, indent=2))
    elif form == "yaml":
        click.echo(_yaml(compiled.tree), nl=False)
    else:
        for root in compiled.tree.domains.values():
            click.echo("\n".join(_drawn(root)))
    return ExitCode.DONE


def children(node: Node) -> list[Node]:
    """In file order. Wildcards are among the others: each is found by its own text, too."""
    return sorted(node.children(), key=_place)


def _place(node: Node) -> tuple[str, int, int]:
    at = node.position
    return (at.file, at.line, at.column) if at else ("", 0, 0)


def _drawn(root: Node) -> Iterator[str]:
    """One line per node: the tree, the rule if there is one, the place."""
    rows = [(click.style(root.key, bold=True), len(root.key), root), *_rows(root, "")]
    width = max(length for _, length, _ in rows)
    for text, length, node in rows:
        yield f"{text}{' ' * (width - length)}  {_told(node)}".rstrip()


def _rows(parent: Node, indent: str) -> Iterator[tuple[str, int, Node]]:
    level = children(parent)
    for node in level:
        is_last = node is level[-1]
        text = f"{indent}{'└─ ' if is_last else '├─ '}{node_words(node)}"
        yield text, len(text), node
        yield from _rows(node, indent + ("   " if is_last else "│  "))


def _told(node: Node) -> str:
    if node.rule is None:
        return ""
    shared = ", share_threshold" if node.share_threshold else ""
    place = click.style(f"  {node.position}", dim=True) if node.position else ""
    return f"{click.style('●', fg='cyan')} {rule_words(node.rule)}{shared}{place}"


def _yaml(tree: Tree) -> str:
    import yaml

    documents = [_domain(root, with_places=False) for root in tree.domains.values()]
    return yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=120)


def _domain(root: Node, *, with_places: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"domain": root.key}
    descriptors = [_descriptor(node, with_places=with_places) for node in children(root)]
    return {**shown, "descriptors": descriptors} if descriptors else shown


def _descriptor(node: Node, *, with_places: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"key": node.key}
    if node.value:
        shown["value"] = node.value
    if node.pattern:
        shown["match"] = {node.pattern.way.name.lower(): node.pattern.text}
    if with_places:
        shown["position"] = str(node.position) if node.position else None
    if node.rule is not None:
        if with_places:
            shown["path"] = node.rule.path
        shown.update(_rule(node.rule))
    shown.update({name: True for name in ("share_threshold", "value_to_metric") if getattr(node, name)})
    descriptors = [_descriptor(child, with_places=with_places) for child in children(node)]
    return {**shown, "descriptors": descriptors} if descriptors else shown


def _rule(rule: Rule) -> dict[str, Any]:
    """As it would be written; what is as by default is left out."""
    replaces = [{"name": name} for name in sorted(rule.replaces)]
    written = [_limit(limit) for limit in rule.limits] or [{"unlimited": True}]
    if replaces:
        written[0]["replaces"] = replaces
    shown: dict[str, Any] = {"rate_limit": written[0]} if len(written) == 1 else {"limits": written}
    # Rules in the reference's grammar alone are charged always; every other says what it is charged.
    if rule.limits and (rule.charge is Charge.ADMITTED or len(written) > 1 or written[0].keys() & NEW_LIMIT_KEYS):
        shown["charge"] = rule.charge.value
    shown.update({mode: True for mode in ("shadow_mode", "quota_mode", "detailed_metric") if getattr(rule, mode)})
    if rule.metadata:
        shown["metadata"] = dict(rule.metadata)
    return shown


def _limit(limit: Limit) -> dict[str, Any]:
    written: dict[str, Any] = {"unit": limit.unit.name.lower(), "requests_per_unit": limit.requests_per_unit}
    if limit.unit_multiplier != 1:
        written["unit_multiplier"] = limit.unit_multiplier
    if limit.timezone:
        written.update(calendar=True, timezone=limit.timezone)
    if limit.algorithm is not Algorithm.FIXED_WINDOW:
        written["algorithm"] = limit.algorithm.value
    if limit.burst:
        written["burst"] = limit.burst
    if limit.name:
        written["name"] = limit.name
    return written
