"""`reset`: delete the counters of a descriptor, or of all that match a pattern, including penalties and warnings."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.descriptor_options import descriptor_options, parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_count
from ratelimit_rls.cli.key_patterns import DescriptorPattern, parse_pattern, scan_pattern
from ratelimit_rls.cli.redis_options import (
    OptionValue,
    Paths,
    redis_connection_options,
    settings_from_options,
    with_redis,
)
from ratelimit_rls.cli.rules_arguments import load_rules
from ratelimit_rls.core.model import Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.storage_key_parser import ParsedKey, parse_key

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings
    from ratelimit_rls.store.redis.factory import AnyRedisStore

PREVIEW_ROWS = 10

DELETE_BATCH_SIZE = 500

PROGRESS_INTERVAL_S = 2.0

_EXAMPLES = """\b
Examples:
  # reset all counters of alice
  $ ratelimit-rls reset descriptors/ --redis-url localhost:6379 --domain edge --descriptor user=alice
  # only lift her penalty
  $ ratelimit-rls reset descriptors/ --redis-url localhost:6379 --domain edge --descriptor user=alice --penalty-only
  # list the counters of tenant acme, then reset them all
  $ ratelimit-rls reset --redis-url localhost:6379 --domain edge --match 'tenant=acme,**' --dry-run
  $ ratelimit-rls reset --redis-url localhost:6379 --domain edge --match 'tenant=acme,**' --yes"""

_MATCH_HELP = "Instead of PATHS and --descriptor: all descriptors in Redis that match this pattern, e.g. 'user=*'."


@click.command(epilog=_EXAMPLES, short_help="Reset the counters of a descriptor in Redis.")
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--merge-domains", is_flag=True, help="Allow several files to define one domain, as with MERGE_DOMAIN_CONFIG=true."
)
@descriptor_options
@click.option("--match", "pattern", metavar="KEY=GLOB,…", help=_MATCH_HELP)
@redis_connection_options
@click.option(
    "--penalty-only", is_flag=True, help="Reset violations and the cooldown only, and keep the limits' counters."
)
@click.option("--dry-run", is_flag=True, help="Print what would be reset, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation with --match.")
def reset(
    paths: Paths,
    merge_domains: bool,
    domain: str,
    descriptors: tuple[str, ...],
    entries: tuple[str, ...],
    pattern: str | None,
    penalty_only: bool,
    dry_run: bool,
    yes: bool,
    **where: OptionValue,
) -> ExitCode:
    """Reset the counters of a descriptor: its limits are unused again and its penalty is lifted.

    PATHS are the rules of the server, which determine the counters of the descriptor. --match needs no rules: it scans
    the keys in Redis, shows what would be reset and asks for confirmation. All server processes are notified.

    In --match each entry is key=value, in which *, ? and [...] have their shell meaning; ** at the end matches any
    further entries. Descriptors over 512 bytes are truncated in Redis and end in a digest: they match only by their
    beginning, and only with ** at the end.

    The connection to Redis can also be configured with the server's environment variables, shown in brackets.
    """
    if pattern is not None and (paths or descriptors or entries):
        raise click.UsageError("--match cannot be combined with PATHS, --descriptor or --entry")
    if pattern is None and not paths:
        raise click.UsageError("PATHS is required: the rules determine the counters of a descriptor; or use --match")
    settings = settings_from_options(where)
    if pattern is not None:
        return _reset_matching(settings, domain, _parse_match(pattern), penalty_only, dry_run, yes)
    tree = load_rules(paths, merge_domains).tree
    request = Request(domain, parse_descriptors(descriptors, entries))
    keys = Planner(tree, Policy(key_prefix=settings.cache_key_prefix)).plan(request).keys
    if penalty_only:
        keys = tuple(key for key in keys if key.endswith(b":penalty"))
    if not keys:
        click.echo("nothing to reset: the rules have no counter for this descriptor", err=True)
        return ExitCode.BAD
    deleted = with_redis(settings, lambda store: store.present(keys) if dry_run else store.forget(keys))
    for key in deleted:
        click.echo(escape_unprintable(key.decode()))
    verb = "would be reset" if dry_run else "reset"
    click.echo(f"{format_count(len(deleted), 'state')} of {len(keys)} {verb}", err=True)
    return ExitCode.DONE


def _parse_match(pattern: str) -> DescriptorPattern:
    try:
        return parse_pattern(pattern)
    except ValueError as error:
        raise click.UsageError(f"--match {pattern!r} {error}") from None


def _reset_matching(
    settings: Settings, domain: str, pattern: DescriptorPattern, penalty_only: bool, dry_run: bool, yes: bool
) -> ExitCode:
    """Reset matching keys. Connects to Redis twice, since the confirmation in between may take long."""
    found = with_redis(settings, partial(_find_keys, settings.cache_key_prefix, domain, pattern, penalty_only))
    if not found:
        click.echo("nothing in Redis matches", err=True)
        return ExitCode.DONE if dry_run else ExitCode.BAD
    _preview(found)
    if dry_run:
        return ExitCode.DONE
    if not yes and not click.confirm("Reset all of them?", err=True):
        click.echo("nothing was reset", err=True)
        return ExitCode.INTERRUPTED
    deleted = with_redis(settings, partial(_delete_keys, list(found)))
    click.echo(f"{format_count(deleted, 'state')} reset", err=True)
    return ExitCode.DONE


def _preview(found: dict[bytes, ParsedKey]) -> None:
    """Print the first descriptors to stdout and the totals to stderr."""
    states: dict[bytes, list[ParsedKey]] = {}
    for key, text in sorted(found.items()):
        states.setdefault(key.removesuffix(text.state.encode()), []).append(text)
    for texts in list(states.values())[:PREVIEW_ROWS]:
        kinds = ", ".join(text.state for text in texts)
        click.echo(f"{escape_unprintable(texts[0].descriptor)}  {click.style(escape_unprintable(kinds), dim=True)}")
    if len(states) > PREVIEW_ROWS:
        click.echo(f"… and {format_count(len(states) - PREVIEW_ROWS, 'more descriptor')}")
    click.echo(f"{format_count(len(found), 'state')} of {format_count(len(states), 'descriptor')}", err=True)


async def _find_keys(
    prefix: str, domain: str, pattern: DescriptorPattern, penalty_only: bool, store: AnyRedisStore
) -> dict[bytes, ParsedKey]:
    """Return the matching keys. SCAN returns too many keys and some of them twice, so each is checked."""
    found: dict[bytes, ParsedKey] = {}
    scanned, reported_at = 0, time.monotonic()
    async for keys in store.scan(scan_pattern(prefix, domain)):
        for key in keys:
            text = parse_key(key.decode(errors="replace"), prefix)
            if text is None or text.domain != domain or not pattern.matches(text):
                continue
            if not penalty_only or text.state == "penalty":
                found[key] = text
        scanned += len(keys)
        if time.monotonic() - reported_at >= PROGRESS_INTERVAL_S:
            reported_at = time.monotonic()
            click.echo(f"… scanned {scanned} keys of the domain, {len(found)} match", err=True)
    return found


async def _delete_keys(keys: list[bytes], store: AnyRedisStore) -> int:
    deleted, reported_at = 0, time.monotonic()
    for at in range(0, len(keys), DELETE_BATCH_SIZE):
        deleted += len(await store.forget(keys[at : at + DELETE_BATCH_SIZE]))
        if time.monotonic() - reported_at >= PROGRESS_INTERVAL_S:
            reported_at = time.monotonic()
            click.echo(f"… {deleted} of {len(keys)} reset", err=True)
    return deleted
