"""The report of `simulate` for people: what happened to the traffic, then a table of rules, then what has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import click

from ratelimit_rls.cli.words import plural

Row = Sequence[str]


def text_of(told: dict[str, Any]) -> Iterator[str]:
    """From the same values that --format json prints."""
    rate = told["calls"] / max(told["took_s"], 0.001)
    span = f", {told['first']} to {told['last']}" if told["calls"] else ""
    requests = f"{told['calls']:,} {plural(told['calls'], 'request')}"
    yield f"{requests}{span}; replayed in {told['took_s']:.1f} s, {rate:,.0f} a second"
    yield from _left_out(told)
    for rule_set in told["rule_sets"]:
        yield ""
        yield from _rule_set(rule_set, told["calls"])
    if "difference" in told:
        yield ""
        yield from _difference(told["difference"], *(one["rules"] for one in told["rule_sets"]))


def _left_out(told: dict[str, Any]) -> Iterator[str]:
    if told["lines_bad"]:
        verbs = "is bad and was" if told["lines_bad"] == 1 else "are bad and were"
        of_all = f"{told['lines_bad']:,} of {told['lines']:,} {plural(told['lines'], 'line')}"
        yield click.style(f"{of_all} {verbs} left out:", fg="yellow")
        yield from (f"  line {bad['line']}: {bad['why']}" for bad in told["first_bad_lines"])
    if told["lines_without_descriptor"]:
        number = told["lines_without_descriptor"]
        yield f"{number:,} {plural(number, 'line')} without a descriptor: a field of each is missing"
    if told["lines_late"]:
        number = told["lines_late"]
        yield f"{number:,} {plural(number, 'line')} far below later ones, taken at the moment of those"


def _rule_set(told: dict[str, Any], calls: int) -> Iterator[str]:
    share = told["refused"] / max(calls, 1)
    verdict = f"{told['admitted']:,} admitted, {told['refused']:,} refused ({share:.1%})"
    none = f", {told['met_no_rule']:,} met no rule" if told["met_no_rule"] else ""
    yield f"{click.style(told['rules'], bold=True)}: {verdict}{none}"
    if told["counters_evicted"]:
        number = told["counters_evicted"]
        yield f"{number:,} {plural(number, 'counter')} dropped for lack of memory: refusals may be too few"
    columns = [_NUMBERS, *(one for one in _SELDOM if any(rule[one.shown_for] for rule in told["per_rule"])), _MOMENTS]
    rows = [(rule["rule"], *(cell for column in columns for cell in column.cells(rule))) for rule in told["per_rule"]]
    if rows:
        yield from _table(("rule", *(name for column in columns for name in column.names)), rows)


class _Columns(NamedTuple):
    names: Row
    cells: Callable[[dict[str, Any]], Row]
    shown_for: str = ""  # the value that some rule must have, where most have nothing to show


_NUMBERS = _Columns(
    ("calls", "hits", "refused"), lambda rule: [f"{rule[name]:,}" for name in ("calls", "hits", "refused")]
)
_SELDOM = (
    _Columns(("over, let pass",), lambda rule: [f"{rule['let_pass']:,}"], "let_pass"),
    _Columns(("waited", "longest"), lambda rule: [f"{rule['waited']:,}", f"{rule['longest_wait_s']:.3g} s"], "waited"),
)
_MOMENTS = _Columns(
    ("first over", "last over", "peak"),
    lambda rule: [rule["first_over"] or "–", rule["last_over"] or "–", f"{rule['peak_per_s']:,}/s"],
)


def _difference(told: dict[str, Any], new: str, old: str) -> Iterator[str]:
    number = told["newly_refused"]
    yield (
        f"{new} compared with {old}: {number:,} {plural(number, 'request')} newly refused, "
        f"{told['newly_admitted']:,} newly admitted"
    )
    rows = []
    for row in told["per_rule"]:
        change = (row["refused"] or 0) - (row["refused_against"] or 0)
        rows.append((row["rule"], _count(row["refused_against"]), _count(row["refused"]), f"{change:+,}"))
    if rows:
        yield from _table(("rule", "refused before", "now", "change"), rows)


def _count(number: int | None) -> str:
    return "not met" if number is None else f"{number:,}"


def _table(head: Row, rows: Sequence[Row]) -> Iterator[str]:
    """The first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]
        line = "  ".join(cells)
        yield click.style(line, dim=True) if row is head else line
