"""Descriptors on the command line: --descriptor key=value,key=value, or --entry key=value once per entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ratelimit_rls.cli.formatting import escape_unprintable
from ratelimit_rls.core.model import Descriptor, Entry

_ENTRY_HELP = "An entry of one more descriptor; all --entry together form it. The value may contain commas."


def descriptor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --domain, --descriptor and --entry to a command."""
    for option in (
        click.option("--entry", "entries", multiple=True, metavar="KEY=VALUE", help=_ENTRY_HELP),
        click.option(
            "--descriptor",
            "descriptors",
            multiple=True,
            metavar="KEY=VALUE,…",
            help="A descriptor as key=value pairs. May be repeated.",
        ),
        click.option(
            "--domain",
            required=True,
            metavar="DOMAIN",
            help="Domain of the rules, as in the configuration of Envoy's filter.",
        ),
    ):
        command = option(command)
    return command


def parse_descriptors(descriptors: tuple[str, ...], entries: tuple[str, ...]) -> tuple[Descriptor, ...]:
    """Return the descriptors of --descriptor in order, then the one that all --entry form together."""
    parsed = [Descriptor(tuple(_entry(part, text) for part in text.split(","))) for text in descriptors]
    if entries:
        parsed.append(Descriptor(tuple(_entry(text, text) for text in entries)))
    if not parsed:
        raise click.UsageError("no descriptor: give --descriptor key=value,key=value or --entry key=value")
    return tuple(parsed)


def _entry(text: str, whole: str) -> Entry:
    key, equals, value = text.partition("=")
    if not key or not equals:
        hint = "; a value with a comma needs --entry" if text != whole else ""
        raise click.UsageError(f"{text!r} in {whole!r} is not key=value{hint}")
    return Entry(key, value)


def format_descriptor(descriptor: Descriptor) -> str:
    """Format a descriptor on one line; unprintable characters are escaped."""
    return escape_unprintable(", ".join(f"{key}={value}" for key, value in descriptor.entries))
