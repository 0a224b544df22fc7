"""Helpers of the verbs `keys` and `tokens`: the actor of a change, expiry, the key secret and table output."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.formatting import escape_unprintable
from ratelimit_rls.core.duration import parse_lifetime_s

if TYPE_CHECKING:
    from ratelimit_rls.database.repository import Actor
    from ratelimit_rls.identity.key_format import SecretKind

NEVER = "never"
KEY_SECRET = "RLS_KEY_SECRET"  # noqa: S105 - the name of a variable


class Expiry(click.ParamType[float]):
    """A duration from now, converted to the Unix time at which the credential expires."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return time.time() + parse_lifetime_s(str(value))
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)


def cli_actor() -> Actor:
    """Return the user who runs the command, as the audit log names them."""
    from ratelimit_rls.database.repository import Actor

    try:
        login = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a numeric user without a name
        login = str(os.getuid())
    return Actor(f"cli:{login}")


def read_key_secret(database: str) -> bytes:
    """Return the secret with which keys and tokens are hashed. Raises SettingsError if there is no RLS_KEY_SECRET."""
    from ratelimit_rls.database.database_url import parse_database_url
    from ratelimit_rls.database.hash_secret import load_key_secret

    url = parse_database_url(database)
    file = url.path if url.dialect == "sqlite" else None
    return load_key_secret(os.environ.get(KEY_SECRET, ""), file)


def parse_public_id(text: str, kind: SecretKind) -> str:
    """Return the public id for an id, or for a whole key or token. Errors never repeat the text: it may be a secret."""
    from ratelimit_rls.identity.key_format import ID_CHARACTERS, public_id

    public = public_id(text, kind)
    if public is None and len(text) > ID_CHARACTERS:
        what = "key" if kind == "rlk" else "token"
        raise click.UsageError(f"one argument is neither the id of a {what} ({ID_CHARACTERS} characters) nor a {what}")
    return public or text


def format_timestamp(at_s: float | None, otherwise: str = NEVER) -> str:
    return otherwise if at_s is None else time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(at_s))


def format_credential_state(revoked_s: float | None, expires_s: float | None, now_s: float) -> str:
    if revoked_s is not None:
        return f"revoked {format_timestamp(revoked_s)}"
    return "expired" if expires_s is not None and expires_s <= now_s else "active"


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose columns are as wide as their longest cell."""
    lines = [list(head), *([escape_unprintable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
