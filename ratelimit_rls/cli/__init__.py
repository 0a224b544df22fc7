"""Command line interface: one module per verb. Results go to stdout, everything else to stderr.

Importing this package imports the verbs and no library but click. Each verb imports what it needs when it runs, so that
--help and `check` start at once. This module is the only one that turns errors into a message and an exit code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from ratelimit_rls import __version__
from ratelimit_rls.cli.ask import ask
from ratelimit_rls.cli.build import build
from ratelimit_rls.cli.check import check
from ratelimit_rls.cli.db import db
from ratelimit_rls.cli.envoy_config import envoy_config
from ratelimit_rls.cli.exit_codes import LEGEND, ExitCode
from ratelimit_rls.cli.explain import explain
from ratelimit_rls.cli.keys import keys
from ratelimit_rls.cli.peek import peek
from ratelimit_rls.cli.reset import reset
from ratelimit_rls.cli.rules import rules
from ratelimit_rls.cli.serve import serve
from ratelimit_rls.cli.show import show
from ratelimit_rls.cli.simulate import simulate
from ratelimit_rls.cli.test import test
from ratelimit_rls.cli.tokens import tokens
from ratelimit_rls.cli.top import top
from ratelimit_rls.cli.usage import usage
from ratelimit_rls.cli.users import users
from ratelimit_rls.errors import DatabaseUnavailable, RateLimitRlsError, RulesError, StoreError

_EXAMPLES = """\b
Examples:
  # serve the rules of a directory, with counters in memory
  $ ratelimit-rls serve --rules descriptors/
  # check rules before deploying them
  $ ratelimit-rls check --strict descriptors/"""


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Preserve declaration order instead of sorting alphabetically."""
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"max_content_width": 110}, epilog=f"{LEGEND}\n\n{_EXAMPLES}")
@click.version_option(__version__, message=f"%(prog)s %(version)s ({build()})")
def commands() -> None:
    """Rate limit service for Envoy: RLS, ext_authz and an API for applications."""


for _verb in (
    serve,
    check,
    show,
    explain,
    test,
    simulate,
    ask,
    top,
    usage,
    peek,
    reset,
    envoy_config,
    db,
    rules,
    users,
    keys,
    tokens,
):
    commands.add_command(_verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    color = False if os.environ.get("NO_COLOR") else None
    try:
        code = commands.main(arguments, prog_name="ratelimit-rls", standalone_mode=False, color=color)
    except click.Abort:
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except RulesError as error:
        click.echo(error, err=True)
        return ExitCode.BAD
    except RateLimitRlsError as error:
        for line in str(error).splitlines():
            click.echo(f"Error: {line}", err=True)
        return ExitCode.UNREACHABLE if isinstance(error, StoreError | DatabaseUnavailable) else ExitCode.BAD
    return int(code or ExitCode.DONE)
