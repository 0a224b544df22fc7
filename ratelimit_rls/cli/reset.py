"""`reset`: forget what was counted for a descriptor, its penalties and warnings included."""

from __future__ import annotations

import click

from ratelimit_rls.cli.counters import Paths, counter_arguments, settings_with, with_redis
from ratelimit_rls.cli.descriptor import parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules import load
from ratelimit_rls.cli.words import counted, printable
from ratelimit_rls.core.model import Request
from ratelimit_rls.core.plan import Planner, Policy

_EXAMPLES = """\b
Examples:
  # let alice begin anew
  $ ratelimit-rls reset descriptors/ --redis-url localhost:6379 --domain edge --descriptor user=alice
  # only lift her penalty
  $ ratelimit-rls reset descriptors/ --redis-url localhost:6379 --domain edge --descriptor user=alice --penalty-only"""


@click.command(epilog=_EXAMPLES)
@counter_arguments
@click.option(
    "--penalty-only", is_flag=True, help="Forget violations and the cooldown, and leave the limits as they are."
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be forgotten.")
def reset(
    paths: Paths,
    merge_domains: bool,
    domain: str,
    descriptors: tuple[str, ...],
    entries: tuple[str, ...],
    redis_url: str | None,
    cache_key_prefix: str | None,
    penalty_only: bool,
    dry_run: bool,
) -> ExitCode:
    """Forget what was counted for a descriptor: its limits are as if never used, its penalty is lifted.

    PATHS are the rules of the server.
    """
    settings = settings_with(redis_url, cache_key_prefix)
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
