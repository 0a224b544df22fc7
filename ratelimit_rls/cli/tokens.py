"""`tokens`: tokens of administrators, made, listed and revoked in the database itself; no server need run."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.credentials import Expiry, digest_of, here, moment_words, public_id_of, state_words, table
from ratelimit_rls.cli.desk import PAGE, at_desk, database_option
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.words import printable

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import AdminToken
    from ratelimit_rls.records.desk import Desk

_CREATE_EXAMPLES = """\b
Examples:
  # for a pipeline that changes rules; its text is all there is on stdout
  $ ratelimit-rls tokens create --role write --name ci --expires 30d"""


@click.group()
def tokens() -> None:
    """Make, list and revoke the tokens of administrators."""


@tokens.command(epilog=_CREATE_EXAMPLES)
@database_option
@click.option(
    "--role", type=click.Choice(["read", "write", "admin"]), required=True, help="Each may do what those before may."
)
@click.option("--name", required=True, metavar="TEXT", help="What changes are recorded under.")
@click.option("--expires", "expires_s", type=Expiry(), help="After so long: 12h, 90d.  [default: never]")
def create(database: str, role: str, name: str, expires_s: float | None) -> ExitCode:
    """Make a token. Its text is printed this once, and kept nowhere."""

    async def work(desk: Desk) -> tuple[AdminToken, str]:
        from ratelimit_rls.core.accounts import AdminToken, Role
        from ratelimit_rls.identity.secrets import new_secret

        secret = new_secret("rla")
        token = AdminToken(secret.public_id, digest_of(database, secret.text), name, Role(role), expires_s)
        async with desk.change(here()) as change:
            return await change.add_token(token), secret.text

    made, text = at_desk(database, work)
    click.echo(text)
    end = moment_words(made.expires_s)
    click.echo(f"token {made.token_id} with the role {role}; expires: {end}. It is not shown again.", err=True)
    return ExitCode.DONE


@tokens.command("list")
@database_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def list_tokens(database: str, form: str) -> ExitCode:
    """List tokens, without their secrets."""

    async def work(desk: Desk) -> list[AdminToken]:
        found: list[AdminToken] = []
        async with desk.reading() as reader:
            while page := await reader.tokens(found[-1].token_id if found else "", PAGE):
                found += page
        return found

    found, now_s = at_desk(database, work), time.time()
    if form == "json":
        click.echo(json.dumps([_json(token) for token in found], indent=2))
        return ExitCode.DONE
    rows = [
        (
            token.token_id,
            token.name,
            token.role.value,
            moment_words(token.expires_s),
            moment_words(token.last_used_s),
            state_words(token.revoked_s, token.expires_s, now_s),
        )
        for token in found
    ]
    for line in table(("TOKEN", "NAME", "ROLE", "EXPIRES", "LAST USED", "STATE"), rows):
        click.echo(line)
    return ExitCode.DONE


@tokens.command()
@database_option
@click.argument("token_ids", nargs=-1, required=True, metavar="TOKEN…")
def revoke(database: str, token_ids: tuple[str, ...]) -> ExitCode:
    """Revoke tokens, for good: all of them, or none if one is not there. TOKEN is an id, or the token itself."""

    async def work(desk: Desk) -> list[AdminToken]:
        async with desk.change(here()) as change:
            return [await change.revoke_token(public_id_of(text, "rla")) for text in token_ids]

    for token in at_desk(database, work):
        click.echo(f"{token.token_id} ({printable(token.name)}) is revoked")
    return ExitCode.DONE


def _json(token: AdminToken) -> dict[str, object]:
    return {
        "token_id": token.token_id,
        "name": token.name,
        "role": token.role.value,
        "expires_s": token.expires_s,
        "revoked_s": token.revoked_s,
        "last_used_s": token.last_used_s,
    }
