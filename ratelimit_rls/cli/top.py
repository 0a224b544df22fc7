"""`top`: the counters that are asked for most and those that refuse most, as a running server sees them now."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.top_view import Screen, view_lines
from ratelimit_rls.cli.words import printable
from ratelimit_rls.core.span import span_within

ANSWER_S = 5.0

MOST_BYTES = 16 * 2**20

_EXAMPLES = """\b
Examples:
  # watch the server on this machine
  $ ratelimit-rls top
  # the five hottest counters of another, once, for a script
  $ ratelimit-rls top --server http://rls:6070 --once --limit 5 --format json"""


class _Away(Exception):
    """The server did not say, and why."""


def _seconds(_: click.Context, __: click.Parameter, text: str) -> float:
    try:
        return span_within(100_000, 3_600_000_000)(text) / 1e6
    except ValueError as fault:
        raise click.BadParameter(f"{text!r} {fault}") from None


@click.command(epilog=_EXAMPLES)
@click.option(
    "--server", default="http://localhost:6070", show_default=True, metavar="URL", help="The debug port of a server."
)
@click.option(
    "--interval",
    "interval_s",
    callback=_seconds,
    default="2s",
    show_default=True,
    metavar="DURATION",
    help="From one view to the next.",
)
@click.option("--once", is_flag=True, help="Print one view and end.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, metavar="N", help="Of each kind.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="json: one line a view.")
def top(server: str, interval_s: float, once: bool, limit: int, form: str) -> ExitCode:
    """Show which counters are asked for most and which refuse most, of the last ten seconds.

    Rates are of the server that is asked, with all of its workers. Ends with Ctrl-C.
    """
    url = f"{_base(server)}/hot?limit={limit}"
    screen = Screen() if form == "text" and sys.stdout.isatty() and not once else None
    show = _show_json if form == "json" else screen.show if screen else _show_text
    try:
        return _look_once(url, show) if once else _look_on(url, show, interval_s)
    except KeyboardInterrupt:
        return ExitCode.DONE


Show = Callable[[dict[str, Any]], None]


def _look_once(url: str, show: Show) -> ExitCode:
    try:
        show(_seen(url))
    except _Away as why:
        click.echo(f"Error: {why}", err=True)
        return ExitCode.UNREACHABLE
    return ExitCode.DONE


def _look_on(url: str, show: Show, interval_s: float) -> ExitCode:
    """Until Ctrl-C. A server that is away is told of once, and asked again."""
    told = ""
    while True:
        try:
            show(_seen(url))
            told = ""
        except _Away as why:
            if str(why) != told:
                told = str(why)
                click.echo(f"{told}; trying again", err=True)
        time.sleep(interval_s)


def _base(server: str) -> str:
    base = server if "://" in server else f"http://{server}"
    if not base.startswith(("http://", "https://")):
        raise click.UsageError(f"--server {server!r} is not an address: use http://host:6070")
    return base.rstrip("/")


def _seen(url: str) -> dict[str, Any]:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, build_opener

    # No proxy: it would be asked for its own localhost.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(url, timeout=ANSWER_S) as answer:
            seen = json.loads(answer.read(MOST_BYTES))
            if not isinstance(seen, dict) or not {"hottest", "refused"} <= seen.keys():
                raise ValueError
    except HTTPError as refusal:
        with refusal:
            raise _Away(f"{url} answers {refusal.code}: is it the debug port of a server that has /hot?") from None
    except (OSError, HTTPException) as fault:
        reason = getattr(fault, "reason", fault)
        raise _Away(f"cannot reach {url}: {printable(str(reason))}") from None
    except ValueError:
        raise _Away(f"{url} answers something else: is it the debug port of a server?") from None
    return seen


def _show_json(seen: dict[str, Any]) -> None:
    click.echo(json.dumps(seen))


def _show_text(seen: dict[str, Any]) -> None:
    click.echo("\n".join(view_lines(seen, shutil.get_terminal_size((100, 24)).columns)) + "\n")
