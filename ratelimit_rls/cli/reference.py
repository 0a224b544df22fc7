"""`ratelimit`: the command under the reference's name, for who starts `/bin/ratelimit` in an image and says no more."""

from __future__ import annotations

import sys

from ratelimit_rls import cli

_OWN_WORDS = ("--help", "--version")


def main() -> int:
    """Serve, unless told one of our own verbs. The reference reads no arguments, so whatever else is said is ignored,
    aloud: some gateways give it flags of theirs."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in (*cli.commands.commands, *_OWN_WORDS):
        names = " ".join(argument.partition("=")[0] for argument in arguments)
        print(f"ratelimit: arguments are ignored, settings are environment variables: {names}", file=sys.stderr)
        arguments = []
    return cli.main(arguments or ["serve"])
