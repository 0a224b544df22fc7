"""The pages of this folder, made from the code they describe; `make docs` writes them, a test says when to."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import click

from ratelimit_rls.cli import commands
from ratelimit_rls.settings.catalogue import VARIABLES

HERE = Path(__file__).parent
NOTICE = "<!-- Written by `make docs`; changes belong in the code it describes. -->"
WIDTH = 100


def settings() -> str:
    """Every variable, by group, with its flag, default and meaning."""
    lines = ["# Settings", "", NOTICE, ""]
    lines += ["Each setting is an environment variable and a flag of `ratelimit-rls serve`; a flag wins.", ""]
    for group, variables in groupby(VARIABLES, key=lambda variable: variable.group):
        lines += [f"## {group.strip().rstrip('.')}", "", "| variable | flag | kind | default | meaning |"]
        lines += ["|---|---|---|---|---|"]
        for one in variables:
            default = f"`{one.default}`" if one.default else ""
            cells = (f"`{one.name}`", f"`{one.flag}`", one.kind, default, one.description)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def command_line() -> str:
    """The help of every command except serve's flags, which are the settings."""
    lines = ["# Commands", "", NOTICE, "", *_help(commands, "ratelimit-rls")]
    for name, verb in commands.commands.items():
        if name == "serve":
            lines += ["## serve", "", "Runs the server. Its flags are the [settings](settings.md).", ""]
        else:
            lines += [f"## {name}", "", *_help(verb, f"ratelimit-rls {name}")]
    return "\n".join(lines)


def _help(command: click.Command, path: str) -> list[str]:
    context = click.Context(command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH)
    text = "\n".join(line.rstrip() for line in click.unstyle(command.get_help(context)).splitlines())
    return ["```text", text, "```", ""]


def pages() -> dict[Path, str]:
    """Each page's path and what should be in it."""
    return {HERE / "settings.md": settings(), HERE / "commands.md": command_line()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
