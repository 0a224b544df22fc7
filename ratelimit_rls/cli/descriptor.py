"""Descriptors as people type them: --descriptor key=value,key=value, or --entry key=value once per entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ratelimit_rls.cli.words import printable
from ratelimit_rls.core.model import Descriptor, Entry

_ENTRY_HELP = "One more descriptor, entry by entry: for values with a comma. Repeat for its next entry."


def descriptor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every verb that takes a domain and descriptors."""
    for option in (
        click.option("--entry", "entries", multiple=True, metavar="KEY=VALUE", help=_ENTRY_HELP),
        click.option("--descriptor", "descriptors", multiple=True, metavar="KEY=VALUE,…", help="Repeat for several."),
        click.option("--domain", required=True, metavar="DOMAIN", help="As in Envoy's filter and the rules."),
    ):
        command = option(command)
    return command


def parse_descriptors(descriptors: tuple[str, ...], entries: tuple[str, ...]) -> tuple[Descriptor, ...]:
    """Those of --descriptor in order, then the one that the --entry make together."""
    found = [Descriptor(tuple(_entry(part, text) for part in text.split(","))) for text in descriptors]
    if entries:
        found.append(Descriptor(tuple(_entry(text, text) for text in entries)))
    if not found:
        raise click.UsageError("no descriptor: give --descriptor key=value,key=value or --entry key=value")
    return tuple(found)


def _entry(text: str, whole: str) -> Entry:
    key, equals, value = text.partition("=")
    if not key or not equals:
        hint = "; a value with a comma needs --entry" if text != whole else ""
        raise click.UsageError(f"{text!r} in {whole!r} is not key=value{hint}")
    return Entry(key, value)


def format_descriptor(descriptor: Descriptor) -> str:
    """On one line, whatever the values are."""
    return printable(", ".join(f"{key}={value}" for key, value in descriptor.entries))
