"""`serve`: run the server. Its flags are the settings, made from them, so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings
    from ratelimit_rls.settings.catalogue import Variable

_EXAMPLES = """\b
Examples:
  # rules from a directory, counters in this process
  $ ratelimit-rls serve --rules descriptors/
  # as the reference is run: everything from the environment
  $ RUNTIME_ROOT=/data RUNTIME_SUBDIRECTORY=ratelimit REDIS_URL=redis:6379 ratelimit-rls serve"""

_METAVARS = {"secret": "TEXT", "list": "A,B", "map": "K:V,K:V"}


class _SettingOption(click.Option):
    """A flag of one variable. Its text is parsed where the variable's is, so that both are read alike."""

    def __init__(self, variable: Variable) -> None:
        self.variable = variable
        names = [variable.flag, variable.field]
        if variable.kind == "bool":
            names[0] += f"/--no-{variable.flag[2:]}"
            super().__init__(names, default=None)
        else:
            super().__init__(names, metavar=_METAVARS.get(variable.kind, variable.kind.upper()))

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        variable = self.variable
        source = f"{variable.name}, {variable.default}" if variable.default else variable.name
        shown = f"--[no-]{variable.flag[2:]}" if variable.kind == "bool" else f"{variable.flag} {self.metavar}"
        return shown, f"{variable.description} [{source}]"


@cache
def _setting_options() -> tuple[_SettingOption, ...]:
    from ratelimit_rls.settings.catalogue import VARIABLES

    return tuple(_SettingOption(variable) for variable in VARIABLES)


class _Serve(click.Command):
    """Made without importing the settings, which only parsing and --help need."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*_setting_options(), *super().get_params(ctx)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in _setting_options():
            groups.setdefault(option.variable.group, []).append(option.get_help_record(ctx))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
        help_option = self.get_help_option(ctx)
        record = help_option.get_help_record(ctx) if help_option else None
        if record:
            with formatter.section("Other"):
                formatter.write_dl([record])


@click.command(cls=_Serve, options_metavar="[--FLAG VALUE]…", epilog=_EXAMPLES)
def serve(**flags: str | bool | None) -> int:
    """Run the server.

    Every setting is a variable and a flag, in brackets the variable and its default. A flag wins over its variable.
    Give passwords as variables: a flag can be seen in the list of processes.
    """
    settings = settings_of(flags)
    from ratelimit_rls.server import run  # after the settings: what is wrong with them is told at once

    return run(settings)


def settings_of(flags: Mapping[str, str | bool | None]) -> Settings:
    """The environment with the flags that were given laid over it."""
    from ratelimit_rls.settings import Settings

    given: dict[str, Any] = {field: value for field, value in flags.items() if value is not None}
    return Settings(**given)
