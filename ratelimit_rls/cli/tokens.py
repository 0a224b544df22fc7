"""`tokens`: create, list and revoke admin tokens directly in the database; no server has to run."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.credential_options import (
    Expiry,
    cli_actor,
    format_credential_state,
    format_table,
    format_timestamp,
    parse_public_id,
    read_key_secret,
)
from ratelimit_rls.cli.database_options import PAGE, database_option, with_repository
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable

if TYPE_CHECKING:
    from ratelimit_rls.database.administration import AdminToken
    from ratelimit_rls.database.repository import Repository

_CREATE_EXAMPLES = """\b
Examples:
  # for a pipeline that changes rules; only the token is printed to stdout
  $ ratelimit-rls tokens create --role write --name ci --expires 30d"""


@click.group(short_help="Create, list and revoke admin tokens.")
def tokens() -> None:
    """Create, list and revoke admin tokens.

    The changes are written to the database. A revocation takes effect at once.
    """


@tokens.command(epilog=_CREATE_EXAMPLES)
@database_option
@click.option(
    "--role",
    type=click.Choice(["read", "write", "admin"]),
    required=True,
    help="Role of the token; each includes the permissions of the previous ones.",
)
@click.option("--name", required=True, metavar="TEXT", help="Name under which the audit log records changes.")
@click.option(
    "--expires", "expires_s", type=Expiry(), help="Lifetime of the token, e.g. 12h or 90d.  [default: never expires]"
)
def create(database: str, role: str, name: str, expires_s: float | None) -> ExitCode:
    """Create a token. It is printed once and stored only as a hash."""

    async def work(repository: Repository) -> tuple[AdminToken, str]:
        from ratelimit_rls.admin.credentials import new_admin_token
        from ratelimit_rls.database.administration import Role

        token, text = new_admin_token(read_key_secret(database), name, Role(role), expires_s)
        async with repository.change(cli_actor()) as change:
            return await change.add_token(token), text

    created, text = with_repository(database, work)
    click.echo(text)
    end = format_timestamp(created.expires_s)
    click.echo(
        f"token {created.token_id} with the role {role}; expires: {end}. It cannot be displayed again.", err=True
    )
    return ExitCode.DONE


@tokens.command("list")
@database_option
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def list_tokens(database: str, form: str) -> ExitCode:
    """List tokens, without their secrets."""

    async def work(repository: Repository) -> list[AdminToken]:
        found: list[AdminToken] = []
        async with repository.reading() as reader:
            while page := await reader.tokens(found[-1].token_id if found else "", PAGE):
                found += page
        return found

    found, now_s = with_repository(database, work), time.time()
    if form == "json":
        click.echo(json.dumps([_json(token) for token in found], indent=2))
        return ExitCode.DONE
    rows = [
        (
            token.token_id,
            token.name,
            token.role.value,
            format_timestamp(token.expires_s),
            format_timestamp(token.last_used_s),
            format_credential_state(token.revoked_s, token.expires_s, now_s),
        )
        for token in found
    ]
    for line in format_table(("TOKEN", "NAME", "ROLE", "EXPIRES", "LAST USED", "STATE"), rows):
        click.echo(line)
    return ExitCode.DONE


@tokens.command(short_help="Revoke tokens permanently.")
@database_option
@click.argument("token_ids", nargs=-1, required=True, metavar="TOKEN…")
def revoke(database: str, token_ids: tuple[str, ...]) -> ExitCode:
    """Revoke tokens permanently: all of them, or none if one does not exist. TOKEN is an id, or the token itself."""

    async def work(repository: Repository) -> list[AdminToken]:
        async with repository.change(cli_actor()) as change:
            return [await change.revoke_token(parse_public_id(text, "rla")) for text in token_ids]

    for token in with_repository(database, work):
        click.echo(f"{token.token_id} ({escape_unprintable(token.name)}) is revoked")
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
