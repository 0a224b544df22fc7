"""`keys`: create, list and revoke API keys directly in the database; no server has to run."""

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
    from ratelimit_rls.database.repository import Repository
    from ratelimit_rls.identity.accounts import ApiKey

_CREATE_EXAMPLES = """\b
Examples:
  # a key for alice that expires after 90 days; only the key is printed to stdout
  $ ratelimit-rls keys create --user alice --expires 90d --name laptop"""


@click.group()
def keys() -> None:
    """Create, list and revoke API keys.

    The changes are written to the database and take effect on all servers within a second, or within
    RLS_DATABASE_POLL (30s) if a notification is lost.
    """


@keys.command(epilog=_CREATE_EXAMPLES)
@database_option
@click.option(
    "--user", "user_id", required=True, metavar="ID", help="Owner of the key; created if the user does not exist."
)
@click.option("--tier", default="", metavar="NAME", help="Tier of the key.  [default: the tier of its user]")
@click.option(
    "--expires", "expires_s", type=Expiry(), help="Lifetime of the key, e.g. 12h or 90d.  [default: never expires]"
)
@click.option("--name", default="", metavar="TEXT", help="A name that identifies the key in lists.")
def create(database: str, user_id: str, tier: str, expires_s: float | None, name: str) -> ExitCode:
    """Create a key. It is printed once and stored only as a hash."""

    async def work(repository: Repository) -> tuple[ApiKey, str]:
        from ratelimit_rls.admin.credentials import new_key
        from ratelimit_rls.identity.accounts import User

        key, text = new_key(read_key_secret(database), user_id, name=name, tier=tier, expires_s=expires_s)
        async with repository.change(cli_actor()) as change:
            if await change.find_user(user_id) is None:
                await change.put_user(User(user_id))
            return await change.add_key(key), text

    created, text = with_repository(database, work)
    click.echo(text)
    end = format_timestamp(created.expires_s)
    click.echo(
        f"key {created.key_id} of user {escape_unprintable(user_id)}; expires: {end}. It cannot be displayed again.",
        err=True,
    )
    return ExitCode.DONE


@keys.command("list")
@database_option
@click.option("--user", "user_id", metavar="ID", help="Only the keys of this user.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def list_keys(database: str, user_id: str | None, form: str) -> ExitCode:
    """List keys, without their secrets."""

    async def work(repository: Repository) -> list[ApiKey]:
        found: list[ApiKey] = []
        async with repository.reading() as reader:
            while page := await reader.keys(found[-1].key_id if found else "", PAGE, user_id=user_id):
                found += page
        return found

    found, now_s = with_repository(database, work), time.time()
    if form == "json":
        click.echo(json.dumps([_json(key) for key in found], indent=2))
        return ExitCode.DONE
    rows = [
        (
            key.key_id,
            key.user_id,
            key.name,
            key.tier,
            format_timestamp(key.expires_s),
            format_credential_state(key.revoked_s, key.expires_s, now_s),
        )
        for key in found
    ]
    for line in format_table(("KEY", "USER", "NAME", "TIER", "EXPIRES", "STATE"), rows):
        click.echo(line)
    return ExitCode.DONE


@keys.command(short_help="Revoke keys permanently.")
@database_option
@click.argument("key_ids", nargs=-1, required=True, metavar="KEY…")
def revoke(database: str, key_ids: tuple[str, ...]) -> ExitCode:
    """Revoke keys permanently: all of them, or none if one does not exist. KEY is an id, or the key itself."""

    async def work(repository: Repository) -> list[ApiKey]:
        async with repository.change(cli_actor()) as change:
            return [await change.revoke_key(parse_public_id(text, "rlk")) for text in key_ids]

    for key in with_repository(database, work):
        click.echo(f"{key.key_id} of user {escape_unprintable(key.user_id)} is revoked")
    return ExitCode.DONE


def _json(key: ApiKey) -> dict[str, object]:
    return {
        "key_id": key.key_id,
        "user_id": key.user_id,
        "name": key.name,
        "tier": key.tier,
        "expires_s": key.expires_s,
        "revoked_s": key.revoked_s,
    }
