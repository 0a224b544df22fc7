"""`ratelimit`: a drop-in for the command of envoyproxy/ratelimit, which images start as `/bin/ratelimit`."""

from __future__ import annotations

import sys

from ratelimit_rls import cli

_OWN_FLAGS = ("--help", "--version")


def main() -> int:
    """Serve, unless the first argument is one of our verbs.

    envoyproxy/ratelimit reads no arguments, and some gateways pass it flags. Other arguments are therefore ignored,
    with a message on stderr.
    """
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in (*cli.commands.commands, *_OWN_FLAGS):
        names = " ".join(argument.partition("=")[0] for argument in arguments)
        print(f"ratelimit: arguments are ignored, settings are environment variables: {names}", file=sys.stderr)
        arguments = []
    return cli.main(arguments or ["serve"])
