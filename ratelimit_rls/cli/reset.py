"""`reset`: forget what was counted for a descriptor, or for all that match; penalties and warnings included."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.counters import Paths, Where, settings_with, where_options, with_redis
from ratelimit_rls.cli.descriptor import descriptor_options, parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.key_match import DescriptorPattern, parse_pattern, scanned
from ratelimit_rls.cli.rules import load
from ratelimit_rls.cli.words import counted, printable
from ratelimit_rls.core.key_text import KeyText, parse_key
from ratelimit_rls.core.model import Request
from ratelimit_rls.core.plan import Planner, Policy

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings
    from ratelimit_rls.store.redis.new import InRedis

PREVIEWED = 10

FORGOTTEN_AT_ONCE = 500

PROGRESS_S = 2.0

_EXAMPLES = """\b
Examples:
  # let alice begin anew
  $ ratelimit-rls reset descriptors/ --redis-url localhost:6379 --domain edge --descriptor user=alice
  # only lift her penalty
  $ ratelimit-rls reset descriptors/ --redis-url localhost:6379 --domain edge --descriptor user=alice --penalty-only
  # which counters does tenant acme have? Forget them all
  $ ratelimit-rls reset --redis-url localhost:6379 --domain edge --match 'tenant=acme,**' --dry-run
  $ ratelimit-rls reset --redis-url localhost:6379 --domain edge --match 'tenant=acme,**' --yes"""

_MATCH_HELP = "In place of PATHS and --descriptor: whatever Redis has of the domain and matches, e.g. 'user=*'."


@click.command(epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--merge-domains", is_flag=True, help="Several files may add to one domain, as with MERGE_DOMAIN_CONFIG=true."
)
@descriptor_options
@click.option("--match", "pattern", metavar="KEY=GLOB,…", help=_MATCH_HELP)
@where_options
@click.option(
    "--penalty-only", is_flag=True, help="Forget violations and the cooldown, and leave the limits as they are."
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be forgotten.")
@click.option("--yes", is_flag=True, help="Do not ask before what --match found is forgotten.")
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
    **where: Where,
) -> ExitCode:
    """Forget what was counted for a descriptor: its limits are as if never used, its penalty is lifted.

    PATHS are the rules of the server, which say what counters the descriptor has. With --match no rules are needed:
    the keys in Redis are looked through, what would be forgotten is shown, and you are asked. Every process of the
    server is told.

    In --match each entry is a key=value in which *, ? and [...] mean what they mean in a shell; ** at the end stands
    for any further entries. The names of descriptors over 512 bytes are cut in Redis and end in a digest: they match
    only by their beginning, and only with ** at the end.

    Where Redis is, the server's own variables say, too: in brackets those that have a flag here.
    """
    if pattern is not None and (paths or descriptors or entries):
        raise click.UsageError("--match looks in Redis alone: give it, or PATHS with --descriptor or --entry")
    if pattern is None and not paths:
        raise click.UsageError("no PATHS: the rules say which counters a descriptor has; or give --match")
    settings = settings_with(where)
    if pattern is not None:
        return _reset_matching(settings, domain, _parsed(pattern), penalty_only, dry_run, yes)
    tree = load(paths, merge_domains).tree
    request = Request(domain, parse_descriptors(descriptors, entries))
    keys = Planner(tree, Policy(key_prefix=settings.cache_key_prefix)).plan(request).keys
    if penalty_only:
        keys = tuple(key for key in keys if key.endswith(b":penalty"))
    if not keys:
        click.echo("there is nothing to forget: no counter belongs to that descriptor", err=True)
        return ExitCode.BAD
    forgotten = with_redis(settings, lambda store: store.present(keys) if dry_run else store.forget(keys))
    for key in forgotten:
        click.echo(printable(key.decode()))
    told = "would be forgotten" if dry_run else "forgotten"
    click.echo(f"{counted(len(forgotten), 'state')} of {len(keys)} {told}", err=True)
    return ExitCode.DONE


def _parsed(pattern: str) -> DescriptorPattern:
    try:
        return parse_pattern(pattern)
    except ValueError as fault:
        raise click.UsageError(f"--match {pattern!r} {fault}") from None


def _reset_matching(
    settings: Settings, domain: str, pattern: DescriptorPattern, penalty_only: bool, dry_run: bool, yes: bool
) -> ExitCode:
    """In two visits to Redis: a person who is asked may take their time."""
    found = with_redis(settings, partial(_found, settings.cache_key_prefix, domain, pattern, penalty_only))
    if not found:
        click.echo("nothing in Redis matches", err=True)
        return ExitCode.DONE if dry_run else ExitCode.BAD
    _preview(found)
    if dry_run:
        return ExitCode.DONE
    if not yes and not click.confirm("Forget all of them?", err=True):
        click.echo("nothing was forgotten", err=True)
        return ExitCode.INTERRUPTED
    forgotten = with_redis(settings, partial(_forget, list(found)))
    click.echo(f"{counted(forgotten, 'state')} forgotten", err=True)
    return ExitCode.DONE


def _preview(found: dict[bytes, KeyText]) -> None:
    """The first descriptors on stdout, how many there are on stderr."""
    states: dict[bytes, list[KeyText]] = {}
    for key, text in sorted(found.items()):
        states.setdefault(key.removesuffix(text.state.encode()), []).append(text)
    for texts in list(states.values())[:PREVIEWED]:
        kinds = ", ".join(text.state for text in texts)
        click.echo(f"{printable(texts[0].descriptor)}  {click.style(printable(kinds), dim=True)}")
    if len(states) > PREVIEWED:
        click.echo(f"… and {counted(len(states) - PREVIEWED, 'more descriptor')}")
    click.echo(f"{counted(len(found), 'state')} of {counted(len(states), 'descriptor')}", err=True)


async def _found(
    prefix: str, domain: str, pattern: DescriptorPattern, penalty_only: bool, store: InRedis
) -> dict[bytes, KeyText]:
    """SCAN finds roughly, and some twice; here is looked closely."""
    found: dict[bytes, KeyText] = {}
    looked_at, told_at = 0, time.monotonic()
    async for keys in store.scan(scanned(prefix, domain)):
        for key in keys:
            text = parse_key(key.decode(errors="replace"), prefix)
            if text is None or text.domain != domain or not pattern.matches(text):
                continue
            if not penalty_only or text.state == "penalty":
                found[key] = text
        looked_at += len(keys)
        if time.monotonic() - told_at >= PROGRESS_S:
            told_at = time.monotonic()
            click.echo(f"… {looked_at} keys of the domain looked at, {len(found)} match", err=True)
    return found


async def _forget(keys: list[bytes], store: InRedis) -> int:
    forgotten, told_at = 0, time.monotonic()
    for at in range(0, len(keys), FORGOTTEN_AT_ONCE):
        forgotten += len(await store.forget(keys[at : at + FORGOTTEN_AT_ONCE]))
        if time.monotonic() - told_at >= PROGRESS_S:
            told_at = time.monotonic()
            click.echo(f"… {forgotten} of {len(keys)} forgotten", err=True)
    return forgotten
