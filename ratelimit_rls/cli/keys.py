"""`keys`: API keys, made, listed and revoked in the database itself; no server need run."""

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
    from ratelimit_rls.core.accounts import ApiKey
    from ratelimit_rls.records.desk import Desk

_CREATE_EXAMPLES = """\b
Examples:
  # a key for alice, good for 90 days; its text is all there is on stdout
  $ ratelimit-rls keys create --user alice --expires 90d --name laptop"""


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    They are written to the database; servers know of it within a second.
    """


@keys.command(epilog=_CREATE_EXAMPLES)
@database_option
@click.option("--user", "user_id", required=True, metavar="ID", help="Whose it is; a new user is made.")
@click.option("--tier", default="", metavar="NAME", help="In place of its user's.")
@click.option("--expires", "expires_s", type=Expiry(), help="After so long: 12h, 90d.  [default: never]")
@click.option("--name", default="", metavar="TEXT", help="To know it by.")
def create(database: str, user_id: str, tier: str, expires_s: float | None, name: str) -> ExitCode:
    """Make a key. Its text is printed this once, and kept nowhere."""

    async def work(desk: Desk) -> tuple[ApiKey, str]:
        from ratelimit_rls.core.accounts import ApiKey, User
        from ratelimit_rls.identity.secrets import new_secret

        secret = new_secret("rlk")
        key = ApiKey(secret.public_id, digest_of(database, secret.text), user_id, name, tier, expires_s=expires_s)
        async with desk.change(here()) as change:
            if await change.find_user(user_id) is None:
                await change.put_user(User(user_id))
            return await change.add_key(key), secret.text

    made, text = at_desk(database, work)
    click.echo(text)
    end = moment_words(made.expires_s)
    click.echo(f"key {made.key_id} of user {printable(user_id)}; expires: {end}. It is not shown again.", err=True)
    return ExitCode.DONE


@keys.command("list")
@database_option
@click.option("--user", "user_id", metavar="ID", help="Only this user's.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def list_keys(database: str, user_id: str | None, form: str) -> ExitCode:
    """List keys, without their secrets."""

    async def work(desk: Desk) -> list[ApiKey]:
        found: list[ApiKey] = []
        async with desk.reading() as reader:
            while page := await reader.keys(found[-1].key_id if found else "", PAGE, user_id=user_id):
                found += page
        return found

    found, now_s = at_desk(database, work), time.time()
    if form == "json":
        click.echo(json.dumps([_json(key) for key in found], indent=2))
        return ExitCode.DONE
    rows = [
        (
            key.key_id,
            key.user_id,
            key.name,
            key.tier,
            moment_words(key.expires_s),
            state_words(key.revoked_s, key.expires_s, now_s),
        )
        for key in found
    ]
    for line in table(("KEY", "USER", "NAME", "TIER", "EXPIRES", "STATE"), rows):
        click.echo(line)
    return ExitCode.DONE


@keys.command()
@database_option
@click.argument("key_ids", nargs=-1, required=True, metavar="KEY…")
def revoke(database: str, key_ids: tuple[str, ...]) -> ExitCode:
    """Revoke keys, for good: all of them, or none if one is not there. KEY is an id, or the key itself."""

    async def work(desk: Desk) -> list[ApiKey]:
        async with desk.change(here()) as change:
            return [await change.revoke_key(public_id_of(text, "rlk")) for text in key_ids]

    for key in at_desk(database, work):
        click.echo(f"{key.key_id} of user {printable(key.user_id)} is revoked")
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
