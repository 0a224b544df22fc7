"""`serve`: run the server. Its options are generated from the settings, so that the two cannot differ."""

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
  # rules from a directory, counters in memory
  $ ratelimit-rls serve --rules descriptors/
  # like envoyproxy/ratelimit: everything from the environment
  $ RUNTIME_ROOT=/data RUNTIME_SUBDIRECTORY=ratelimit REDIS_URL=redis:6379 ratelimit-rls serve"""

_METAVARS = {"secret": "TEXT", "list": "A,B", "map": "K:V,K:V"}


class _SettingOption(click.Option):
    """Option of one setting. Its value is parsed by the settings, exactly like the environment variable."""

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
        default = variable.effective_default
        source = f"{variable.name}; default: {default}" if default else variable.name
        flag = f"--[no-]{variable.flag[2:]}" if variable.kind == "bool" else f"{variable.flag} {self.metavar}"
        return flag, f"{variable.description} [{source}]"


@cache
def _setting_options() -> tuple[_SettingOption, ...]:
    from ratelimit_rls.settings.catalogue import VARIABLES

    return tuple(_SettingOption(variable) for variable in VARIABLES)


class _Serve(click.Command):
    """Command whose options are created on demand: only parsing and --help import the settings."""

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

    Every setting is an environment variable and an option; brackets show the variable and its default. An option
    overrides its variable. Pass passwords as variables: options are visible in the process list. A DURATION is a
    number with a unit, e.g. 250ms, 90s, 1h30m or 90d.
    """
    settings = settings_from_flags(flags)
    from ratelimit_rls.server import run  # after the settings, so that their errors are reported at once

    return run(settings)


def settings_from_flags(flags: Mapping[str, str | bool | None]) -> Settings:
    """Return the settings from the environment, overridden by the given options."""
    from ratelimit_rls.settings import Settings

    overrides: dict[str, Any] = {field: value for field, value in flags.items() if value is not None}
    return Settings(**overrides)
