"""What verbs that make keys and tokens share: who is at the keyboard, for how long, and the secret of their hashes."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.words import printable

if TYPE_CHECKING:
    from ratelimit_rls.identity.secrets import SecretKind
    from ratelimit_rls.records.desk import Actor

FOR_EVER = "never"
KEY_SECRET = "RLS_KEY_SECRET"  # noqa: S105 - the name of a variable


class Expiry(click.ParamType[float]):
    """A span from now; what is made is good until then."""

    name = "SPAN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from ratelimit_rls.transport.http.admin.spans import span_s

        if isinstance(value, float):
            return value
        try:
            return time.time() + span_s(str(value))
        except ValueError as fault:
            self.fail(f"{value!r} {fault}", param, ctx)


def here() -> Actor:
    """Whoever runs the command, as the record of changes has it."""
    from ratelimit_rls.records.desk import Actor

    try:
        login = getpass.getuser()
    except (KeyError, OSError):  # no such user, as in a container with a number for one
        login = str(os.getuid())
    return Actor(f"cli:{login}")


def digest_of(database: str, text: str) -> bytes:
    """What is kept of a key or token. Raises SettingsError if there is no secret to make it with."""
    from ratelimit_rls.identity.secrets import digest
    from ratelimit_rls.records.key_secret import key_secret
    from ratelimit_rls.records.url import parse_database_url

    url = parse_database_url(database)
    file = url.path if url.dialect == "sqlite" else None
    return digest(key_secret(os.environ.get(KEY_SECRET, ""), file), text)


def public_id_of(text: str, kind: SecretKind) -> str:
    """Of an id, or of the whole key or token, which is repeated nowhere, be it damaged."""
    from ratelimit_rls.identity.secrets import ID_CHARACTERS, public_id

    found = public_id(text, kind)
    if found is None and len(text) > ID_CHARACTERS:
        what = "key" if kind == "rlk" else "token"
        raise click.UsageError(f"one of them is neither the id of a {what} ({ID_CHARACTERS} characters) nor a {what}")
    return found or text


def moment_words(at_s: float | None, otherwise: str = FOR_EVER) -> str:
    return otherwise if at_s is None else time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(at_s))


def state_words(revoked_s: float | None, expires_s: float | None, now_s: float) -> str:
    if revoked_s is not None:
        return f"revoked {moment_words(revoked_s)}"
    return "expired" if expires_s is not None and expires_s <= now_s else "active"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines with columns as wide as what is in them."""
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
