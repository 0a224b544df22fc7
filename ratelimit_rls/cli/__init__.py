"""The commands, one file per verb. Answers go to stdout, everything else to stderr.

Importing this package costs click and nothing more: each verb imports what it needs when it runs, so that --help and
`check` start at once. Errors are turned into a sentence and an exit code here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from ratelimit_rls import __version__
from ratelimit_rls.cli.ask import ask
from ratelimit_rls.cli.check import check
from ratelimit_rls.cli.db import db
from ratelimit_rls.cli.envoy_config import envoy_config
from ratelimit_rls.cli.exit_codes import LEGEND, ExitCode
from ratelimit_rls.cli.explain import explain
from ratelimit_rls.cli.keys import keys
from ratelimit_rls.cli.peek import peek
from ratelimit_rls.cli.reset import reset
from ratelimit_rls.cli.serve import serve
from ratelimit_rls.cli.show import show
from ratelimit_rls.cli.simulate import simulate
from ratelimit_rls.cli.stored_rules import rules
from ratelimit_rls.cli.test import test
from ratelimit_rls.cli.tokens import tokens
from ratelimit_rls.cli.top import top
from ratelimit_rls.cli.usage import usage
from ratelimit_rls.cli.users import users
from ratelimit_rls.errors import RateLimitRlsError, RecordsUnavailable, RulesError, StoreError

_EXAMPLES = """\b
Examples:
  # serve the rules in a directory, counters in this process
  $ ratelimit-rls serve --rules descriptors/
  # check them before they are deployed
  $ ratelimit-rls check --strict descriptors/"""


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order one meets them, not in that of the alphabet."""
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"max_content_width": 110}, epilog=f"{LEGEND}\n\n{_EXAMPLES}")
@click.version_option(__version__, message="%(prog)s %(version)s")
def commands() -> None:
    """The rate limit service that Envoy asks before it lets a request through."""


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
    """Run one command line; the exit code."""
    color = False if os.environ.get("NO_COLOR") else None
    try:
        code = commands.main(arguments, prog_name="ratelimit-rls", standalone_mode=False, color=color)
    except click.Abort:
        return ExitCode.INTERRUPTED
    except click.ClickException as fault:
        fault.show()
        return fault.exit_code
    except RulesError as fault:
        click.echo(fault, err=True)
        return ExitCode.BAD
    except RateLimitRlsError as fault:
        for line in str(fault).splitlines():
            click.echo(f"Error: {line}", err=True)
        return ExitCode.UNREACHABLE if isinstance(fault, StoreError | RecordsUnavailable) else ExitCode.BAD
    return int(code or ExitCode.DONE)
