"""`usage`: show the users, rules or endpoints with the most calls, from the usage in the database."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.database_options import database_option, with_database
from ratelimit_rls.cli.duration_option import DurationType
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable
from ratelimit_rls.core.duration import format_duration_us
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.database.database import Database
    from ratelimit_rls.database.usage.queries import By, GroupedUsage, SeriesPoint

_EXAMPLES = """\b
Examples:
  # the users with the most calls in the last day, and how many of their calls were denied
  $ ratelimit-rls usage
  # the rules of one domain in the last 30 days, also drawn as SVG
  $ ratelimit-rls usage --by rule --domain edge --since 30d --picture rules.svg"""

_GROUPINGS = ("user", "rule", "endpoint", "domain", "region")
_DAY_US = 86_400_000_000
_GRANULARITIES_US = (("minute", 60_000_000), ("hour", 3_600_000_000), ("day", _DAY_US))
_MAX_BARS = 240
_FIGURES = "{:>14}  {:>14}  {:>7}  {:>10}"
_MAX_NAME_WIDTH = 60


@click.command(epilog=_EXAMPLES, short_help="Show users, rules or endpoints with the most calls.")
@database_option
@click.option("--by", type=click.Choice(_GROUPINGS), default="user", show_default=True, help="Group calls by this.")
@click.option(
    "--since",
    "since_us",
    type=DurationType(),
    default="24h",
    show_default=True,
    help="Look back this far, e.g. 90m, 24h or 30d.",
)
@click.option("--domain", metavar="TEXT", help="Only calls of this domain.")
@click.option(
    "--top",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    metavar="N",
    help="Show the N with the most calls.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw the result, and all calls over time, to this SVG file.",
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def usage(
    database: str, by: By, since_us: int, domain: str | None, top: int, picture: Path | None, form: str
) -> ExitCode:
    """Show the users, rules or endpoints with the most calls: calls, denied calls and decision latency.

    Servers record usage every ten seconds, or every minute if they have many callers. P95 is the 95th percentile of the
    time of a decision, accurate to 10 %.
    """
    if picture is not None and picture.suffix.lower() != ".svg":
        raise click.UsageError(f"--picture {str(picture)!r} must end in .svg, the only supported format")
    until_s = time.time()
    since_s = until_s - since_us / 1e6

    granularity = _granularity(since_us)

    async def work(opened: Database) -> tuple[list[GroupedUsage], list[SeriesPoint]]:
        from ratelimit_rls.database.usage.queries import heaviest, series

        rows = await heaviest(opened, by, since_s, until_s, domain=domain, limit=top)
        points = await series(opened, granularity, since_s, until_s, domain=domain) if picture is not None else []
        return rows, points

    rows, points = with_database(database, work)
    if picture is not None:
        _draw(picture, f"calls by {by}, last {_format_duration(since_us)}", points, granularity, rows)
    if form == "json":
        click.echo(json.dumps([_json(use) for use in rows], indent=2))
    else:
        click.echo("\n".join(_table(by, rows, since_us)))
    return ExitCode.DONE


def _granularity(span_us: int) -> str:
    """Return the finest granularity whose bars are still distinguishable."""
    return next(
        (name for name, each_us in _GRANULARITIES_US if span_us <= _MAX_BARS * each_us), _GRANULARITIES_US[-1][0]
    )


def _draw(
    path: Path, title: str, points: Sequence[SeriesPoint], granularity: str, rows: Sequence[GroupedUsage]
) -> None:
    from ratelimit_rls.cli.usage_svg import draw

    try:
        path.write_text(draw(title, points, granularity, rows), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--picture {path} cannot be written: {error.strerror}") from error


def _table(by: str, rows: Sequence[GroupedUsage], since_us: int) -> Iterator[str]:
    if not rows:
        article = "an" if by == "endpoint" else "a"
        yield f"no calls with {article} {by} are recorded in the last {_format_duration(since_us)}"
        return
    names = [_truncate(escape_unprintable(use.name)) for use in rows]
    width = max(len(by), *map(len, names))
    yield click.style(by.upper().ljust(width) + _FIGURES.format("CALLS", "DENIED", "", "P95"), bold=True)
    for name, use in zip(names, rows, strict=True):
        share = f"{100 * use.denied / use.total:.1f} %"
        yield name.ljust(width) + _FIGURES.format(
            f"{use.total:,}", f"{use.denied:,}", share, _format_latency(use.p95_us)
        )


def _truncate(name: str) -> str:
    return name if len(name) <= _MAX_NAME_WIDTH else f"{name[: _MAX_NAME_WIDTH - 1]}…"


def _format_duration(us: int) -> str:
    days, rest = divmod(us, _DAY_US)
    return f"{days}d" if days > 1 and not rest else format_duration_us(us)


def _format_latency(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us / 1000:.1f} ms" if us >= 1000 else f"{us:.0f} µs"


def _json(use: GroupedUsage) -> dict[str, Any]:
    return {**use._asdict(), "denied": use.denied}
