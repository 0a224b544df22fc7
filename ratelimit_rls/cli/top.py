"""`top`: show the most requested counters of a running server, and those with the most denials."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ratelimit_rls.cli.duration_option import DurationType
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable
from ratelimit_rls.cli.redis_options import OptionValue, redis_connection_options
from ratelimit_rls.cli.top_memory import DEFAULT_KEYS_PER_SECOND, show_memory
from ratelimit_rls.cli.top_view import Screen, view_lines

RESPONSE_TIMEOUT_S = 5.0

MAX_RESPONSE_BYTES = 16 * 2**20

_EXAMPLES = """\b
Examples:
  # watch the server on this machine
  $ ratelimit-rls top
  # the five hottest counters of another server, once, for a script
  $ ratelimit-rls top --server http://rls:6070 --once --limit 5 --format json
  # what fills Redis, by the rules of a directory
  $ ratelimit-rls top --memory --redis-url localhost:6379 --rules descriptors/"""


class _ServerUnavailable(Exception):
    """The server cannot be reached, or its response is unusable; the message says why."""


@click.command(epilog=_EXAMPLES, short_help="Show the hottest counters, or what fills Redis.")
@click.option(
    "--server",
    default="http://localhost:6070",
    show_default=True,
    metavar="URL",
    help="URL of the debug port of a server.",
)
@click.option(
    "--interval",
    "interval_us",
    type=DurationType(100_000, 3_600_000_000),
    default="2s",
    show_default=True,
    help="Refresh interval.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File that contains the server's RLS_HTTP_TOKEN.",
)
@click.option("--once", is_flag=True, help="Print once and exit.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, metavar="N", help="Rows per table."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format; json prints one line per refresh.",
)
@click.option(
    "--memory", is_flag=True, help="Show what fills Redis, by domain and rule, instead of the hottest counters."
)
@click.option(
    "--rules",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="With --memory: files or directories with the rules, to show rules instead of descriptor keys.",
)
@click.option(
    "--rate",
    type=click.IntRange(1, 1_000_000),
    default=DEFAULT_KEYS_PER_SECOND,
    show_default=True,
    metavar="N",
    help="With --memory: keys to scan per second.",
)
@redis_connection_options
def top(
    server: str,
    interval_us: int,
    token_file: Path | None,
    once: bool,
    limit: int,
    form: str,
    memory: bool,
    rules: tuple[Path, ...],
    rate: int,
    **where: OptionValue,
) -> ExitCode:
    """Show the nodes of Redis, and the most requested counters and those with the most denials in the last ten seconds.

    Rates are those of one server with all of its workers. Descriptor values are shown as digests (#1a2b3c4d) unless the
    server has RLS_HOT_KEY_VALUES=true. Exit with Ctrl-C.

    --memory needs no server: it scans the keys in Redis, measures the memory of a sample of them, and shows each domain
    and rule with its keys and its estimated bytes. Ctrl-C ends the scan and shows the result so far, extrapolated to
    all keys. The connection to Redis can also be configured with the server's environment variables, shown in brackets.
    """
    if memory:
        return show_memory(where, rules, rate, limit, form)
    if rules or any(value is not None for value in where.values()):
        raise click.UsageError("--rules and the options of the connection to Redis need --memory")
    url = f"{_base_url(server)}/hot?limit={limit}"
    fetch = partial(_fetch, url, token_file)
    screen = Screen() if form == "text" and sys.stdout.isatty() and not once else None
    show = _show_json if form == "json" else screen.show if screen else _show_text
    try:
        return _show_once(fetch, show) if once else _show_repeatedly(fetch, show, interval_us / 1e6)
    except KeyboardInterrupt:
        return ExitCode.DONE


Show = Callable[[dict[str, Any]], None]
Fetch = Callable[[], dict[str, Any]]


def _show_once(fetch: Fetch, show: Show) -> ExitCode:
    try:
        show(fetch())
    except _ServerUnavailable as error:
        click.echo(f"Error: {error}", err=True)
        return ExitCode.UNREACHABLE
    return ExitCode.DONE


def _show_repeatedly(fetch: Fetch, show: Show, interval_s: float) -> ExitCode:
    """Refresh until Ctrl-C. An error is printed once, and the request is retried."""
    reported = ""
    while True:
        try:
            show(fetch())
            reported = ""
        except _ServerUnavailable as error:
            if str(error) != reported:
                reported = str(error)
                click.echo(f"{reported}; retrying", err=True)
        time.sleep(interval_s)


def _base_url(server: str) -> str:
    base = server if "://" in server else f"http://{server}"
    if not base.startswith(("http://", "https://")):
        raise click.UsageError(f"--server {server!r} must be an http or https URL, e.g. http://host:6070")
    return base.rstrip("/")


def _fetch(url: str, token_file: Path | None) -> dict[str, Any]:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    # No proxy: it would connect to its own localhost.
    opener = build_opener(ProxyHandler({}))
    try:
        # Read for each request: the token may be rotated.
        headers = {"Authorization": f"Bearer {token_file.read_text().strip()}"} if token_file else {}
        with opener.open(Request(url, headers=headers), timeout=RESPONSE_TIMEOUT_S) as answer:  # noqa: S310 - _base looked at it
            stats = json.loads(answer.read(MAX_RESPONSE_BYTES))
            if not isinstance(stats, dict) or not {"hottest", "denied"} <= stats.keys():
                raise ValueError
    except HTTPError as error:
        with error:
            if error.code == 401:
                raise _ServerUnavailable(f"{url} requires a token: use --token-file") from None
            raise _ServerUnavailable(
                f"{url} responds with status {error.code}: is it the debug port of a server with /hot?"
            ) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise _ServerUnavailable(f"cannot reach {url}: {escape_unprintable(str(reason))}") from None
    except ValueError:
        raise _ServerUnavailable(f"{url} returned an unexpected response: is it the debug port of a server?") from None
    return stats


def _show_json(stats: dict[str, Any]) -> None:
    click.echo(json.dumps(stats))


def _show_text(stats: dict[str, Any]) -> None:
    click.echo("\n".join(view_lines(stats, shutil.get_terminal_size((100, 24)).columns)) + "\n")
