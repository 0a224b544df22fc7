"""`ratelimit-rls users` on each database: atomic import, export and list."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ratelimit_rls.admin import users
from ratelimit_rls.cli import main
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.database.administration import AccountUsage, AuditRow
from ratelimit_rls.database.change_follower import ChangeFollower
from ratelimit_rls.database.configuration import Configuration
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Actor, Reader, Repository, UnitOfWork
from ratelimit_rls.database.usage.counters import UserUsage
from ratelimit_rls.identity.accounts import ApiKey, Override, Tier, User
from tests.integration.database.conftest import LIMITS

FAR_S = 4_000_000_000.0
PAST_S = 1_000_000_000.0

HOURLY = [{"unit": "hour", "requests_per_unit": 7}]

Change = Callable[[UnitOfWork], Awaitable[Any]]


async def _add_tiers(change: UnitOfWork) -> None:
    await change.add_tier(Tier("gold", LIMITS))
    await change.add_tier(Tier("free", LIMITS))


class Place:
    """A database with two tiers, and the commands on it."""

    def __init__(self, url: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._directory = directory
        self._capsys = capsys
        self.change(_add_tiers)

    def run(self, *message: str | Path, expect: int = ExitCode.DONE) -> tuple[str, str]:
        """Run a command; return its stdout and stderr."""
        assert main(["users", *map(str, message), "--database", self.url]) == expect, self._capsys.readouterr().err
        result = self._capsys.readouterr()
        return result.out, result.err

    def file(self, name: str, *lines: object) -> Path:
        path = self._directory / name
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    def change(self, what: Change) -> None:
        async def work(repository: Repository) -> None:
            async with repository.change(Actor("test")) as change:
                await what(change)

        self.with_repository(work)

    def ask(self, what: Callable[[Reader], Awaitable[Any]]) -> Any:
        async def work(repository: Repository) -> Any:
            async with repository.reading() as reader:
                return await what(reader)

        return self.with_repository(work)

    def with_repository(self, work: Callable[[Repository], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            database = Database(self.url)
            try:
                return await work(Repository(database))
            finally:
                await database.close()

        return asyncio.run(run())

    @property
    def users(self) -> dict[str, User]:
        return {user.user_id: user for user in self.accounts.users}

    @property
    def accounts(self) -> Configuration:
        found: Configuration = self.ask(lambda reader: reader.accounts())
        return found

    @property
    def audit(self) -> list[AuditRow]:
        found: list[AuditRow] = self.ask(lambda reader: reader.audit(kind="user"))
        return found


@pytest.fixture
def place(
    upgraded_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Place:
    monkeypatch.setenv("LOGNAME", "jane")
    return Place(upgraded_url, tmp_path, capsys)


@pytest.fixture(params=["one by one", "by pages"])
def _looked_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and many users are looked up by different queries."""
    if request.param == "by pages":
        monkeypatch.setattr(users, "MAX_SINGLE_LOOKUPS", 0)
        monkeypatch.setattr(users, "PAGE", 2)


@pytest.mark.usefixtures("_looked_up")
def test_import_creates_and_updates_users_in_one_change(place: Place) -> None:
    place.change(lambda change: change.put_user(User("alice", "gold", org="acme")))
    place.change(lambda change: change.put_user(User("bob", "free")))
    place.change(lambda change: change.put_user(User("carl", "free")))
    place.change(lambda change: change.put_user(User("zoe", "free")))
    before = place.accounts.sequence
    file = place.file(
        "users.jsonl",
        {"user_id": "alice", "tier": "gold", "org": "acme"},
        {"user_id": "bob", "tier": "gold"},
        "",
        {"user_id": "dora", "org": "Ünïon, Ltd", "limits": HOURLY},
        {"user_id": "carl"},
        {"user_id": "emil", "tier": "free", "limits": []},
    )
    assert place.run("import", file) == ("2 users created, 2 changed, 1 unchanged\n", "")
    assert place.users == {
        "alice": User("alice", "gold", org="acme"),
        "bob": User("bob", "gold", version=2),
        "carl": User("carl", version=2),
        "dora": User("dora", "", (Limit(7, Unit.HOUR),), org="Ünïon, Ltd"),
        "emil": User("emil", "free"),
        "zoe": User("zoe", "free"),
    }
    assert place.accounts.sequence == before + 1
    row, *others = place.audit
    assert (row.actor, row.action, row.subject) == ("cli:jane", "import", "*")
    assert row.after == {"created": 2, "replaced": 2}
    assert "import" not in {other.action for other in others}


def test_import_keeps_overrides_blocks_keys_and_usage(place: Place) -> None:
    override, block = Override(LIMITS, FAR_S, "a launch"), Block("spam", FAR_S)

    async def alice(change: UnitOfWork) -> None:
        await change.put_user(User("alice", "gold", LIMITS))
        await change.set_override("alice", override)
        await change.set_block("alice", block)
        await change.add_key(ApiKey("abcdefghijkl", b"d" * 32, "alice", "laptop"))

    async def count(repository: Repository) -> None:
        await repository.count_users({"alice": UserUsage(5, 2, PAST_S)})

    place.change(alice)
    place.with_repository(count)
    out, err = place.run("import", place.file("users.csv", "user_id,tier", "alice,free"))
    assert out == "0 users created, 1 changed, 0 unchanged\n"
    assert err == "1 user lost custom limits: their lines have none\n"
    assert place.users["alice"] == User("alice", "free", (), override, block, version=4)
    assert [key.key_id for key in place.accounts.keys] == ["abcdefghijkl"]
    use: AccountUsage = place.ask(lambda reader: reader.usage_of_users(["alice"]))["alice"]
    assert (use.denied, use.last_s) == (2, PAST_S)


def test_dry_run_changes_nothing(place: Place) -> None:
    place.change(lambda change: change.put_user(User("alice", "gold", LIMITS)))
    before = place.accounts
    file = place.file("users.jsonl", {"user_id": "alice", "tier": "gold"}, {"user_id": "bob"})
    assert place.run("import", "--dry-run", file) == (
        "1 user would be created, 1 would be changed, 0 unchanged\n",
        "1 user would lose custom limits: their lines have none\n",
    )
    assert place.accounts == before
    assert len(place.audit) == 1


def test_import_without_changes_writes_no_change(place: Place) -> None:
    file = place.file("users.jsonl", {"user_id": "alice", "tier": "gold", "limits": HOURLY}, {"user_id": "bob"})
    place.run("import", file)
    before = place.accounts
    assert place.run("import", file)[0] == "0 users created, 0 changed, 2 unchanged\n"
    assert place.accounts == before
    assert len(place.audit) == 1


def run_before_next_change(place: Place, interfere: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `interfere` when an import has read everything, before it locks anything."""
    change = Repository.change

    def interrupted(self: Repository, *given: Any, **more: Any) -> Any:
        monkeypatch.setattr(Repository, "change", change)
        other = threading.Thread(target=place.change, args=[interfere])
        other.start()
        other.join()
        return change(self, *given, **more)

    monkeypatch.setattr(Repository, "change", interrupted)


@pytest.mark.usefixtures("_looked_up")
@pytest.mark.parametrize("is_many", [False, True])
def test_import_sees_concurrent_changes(place: Place, monkeypatch: pytest.MonkeyPatch, is_many: bool) -> None:
    for name in ("alice", "bob", "carl"):
        place.change(lambda change, name=name: change.put_user(User(name, "gold")))  # type: ignore[misc]

    async def interfere(change: UnitOfWork) -> None:
        if is_many:
            await change.put_users([User("alice", "free"), User("dora", "gold")])
        else:
            await change.put_user(User("alice", "free"))
            await change.put_user(User("dora", "gold"))
        await change.delete_user("carl")

    run_before_next_change(place, interfere, monkeypatch)
    names = ("alice", "bob", "carl", "dora", "emil")
    file = place.file("users.jsonl", *({"user_id": name, "tier": "gold"} for name in names))
    assert place.run("import", file)[0] == "2 users created, 1 changed, 2 unchanged\n"
    assert {user.tier for user in place.users.values()} == {"gold"}
    assert set(place.users) == set(names)
    assert place.audit[0].after == {"created": 2, "replaced": 1}


def test_tier_deleted_during_import_rolls_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run_before_next_change(place, lambda change: change.delete_tier("free"), monkeypatch)
    file = place.file("users.jsonl", {"user_id": "alice", "tier": "gold"}, {"user_id": "bob", "tier": "free"})
    assert 'tier "free" does not exist' in place.run("import", file, expect=ExitCode.BAD)[1]
    assert place.users == {}
    assert place.audit == []


MISTAKES = (
    ('{"user_id": "a"', "not JSON: Expecting ',' delimiter, at column 16"),
    ('["a"]', "not a JSON object"),
    ('{"user_id": "a", "user_id": "b"}', "duplicate field"),
    ("[" * 60_000, "nested too deeply"),
    ('{"user_id": ' + "9" * 5000 + "}", "not a user: Exceeds the limit"),
    ('{"tier": "gold"}', "user_id must not be empty"),
    ('{"user_id": 7}', "user_id must be a string"),
    ('{"user_id": "a", "tier": null}', "tier must be a string"),
    ('{"user_id": " a"}', "user_id begins or ends with a space"),
    ('{"user_id": "a\\ud800"}', "user_id has a character that cannot be printed"),
    (json.dumps({"user_id": "a" * 256}), "user_id has 256 characters; 255 are the most"),
    (json.dumps({"user_id": "a", "org": "o" * 256}), "org has 256 characters"),
    ('{"user_id": "a", "tier": "platinum"}', 'there is no tier "platinum": create it first'),
    ('{"user_id": "a", "block": {}}', 'unknown field "block"; fields are user_id, tier, org, limits'),
    ('{"user_id": "a", "limits": {}}', "limits: must be a list of limits"),
    ('{"user_id": "a", "limits": [{"unit": "hour"}]}', "limits[0]: 'requests_per_unit' is missing"),
    ('{"user_id": "a", "limits": [{"unit": "eon", "requests_per_unit": 1}]}', "limits[0]"),
    ('{"user_id": "first"}', 'user "first" is already defined in {file}:1'),
    (" " * 70_000 + "{}", "longer than 65,536 bytes"),
    (b'{"user_id": "\xff"}', "not UTF-8"),
)


@pytest.mark.parametrize("upgraded_url", ["sqlite"], indirect=True)
def test_import_errors_have_line_numbers_and_nothing_is_written(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "users.jsonl"
    lines = ['{"user_id": "first", "tier": "gold"}', *(line for line, _ in MISTAKES), '{"user_id": "last"}']
    file.write_bytes(b"\r\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    out, err = place.run("import", file, expect=ExitCode.BAD)
    *result, last = err.splitlines()
    assert out == ""
    assert last == f"Error: {len(MISTAKES)} mistakes; nothing was imported"
    assert len(result) == len(MISTAKES)
    for number, (line, (_, expected_error)) in enumerate(zip(result, MISTAKES, strict=True), 2):
        assert line.startswith(f"{file}:{number}: ")
        assert expected_error.replace("{file}", str(file)) in line
    assert place.users == {}


@pytest.mark.parametrize("upgraded_url", ["sqlite"], indirect=True)
def test_at_most_twenty_import_errors_are_printed(place: Place) -> None:
    good = place.file("good.jsonl", {"user_id": "alice"})
    bad = place.file("bad.jsonl", *({"user_id": f"u{number}", "tier": "none", "org": 1} for number in range(1000)))
    result = place.run("import", good, bad, expect=ExitCode.BAD)[1].splitlines()
    assert len(result) == 22
    assert result[0] == f'{bad}:1: org must be a string, e.g. "alice"'
    assert result[19].startswith(f"{bad}:10: ")
    assert result[20:] == ["and 1980 more", "Error: 2000 mistakes; nothing was imported"]
    assert place.users == {}


@pytest.mark.parametrize("upgraded_url", ["sqlite"], indirect=True)
def test_csv_is_detected_by_file_name_or_flag(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("\ufefforg,user_id,tier", '"Acme, ""Inc""",alice,gold', "", ",bob,")
    assert place.run("import", place.file("USERS.CSV", *lines))[0].startswith("2 users created")
    assert place.users == {"alice": User("alice", "gold", org='Acme, "Inc"'), "bob": User("bob")}
    piped = io.TextIOWrapper(io.BytesIO(b"user_id,tier\r\ncarl,free\r\n"))
    monkeypatch.setattr("sys.stdin", piped)
    assert place.run("import", "--format", "csv", "-")[0].startswith("1 user created")
    assert place.users["carl"] == User("carl", "free")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"user_id": "dora"}\nnonsense\n')))
    assert place.run("import", "-", expect=ExitCode.BAD)[1].startswith("<stdin>:2: not JSON")


@pytest.mark.parametrize("upgraded_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("lines", "line", "expected_error"),
    [
        ((), 1, "the file is empty; the first line must be user_id,tier,org"),
        (("alice,gold",), 1, "the first line must name the columns"),
        (("user_id,limits",), 1, "limits need JSON"),
        (("user_id,tier,tier",), 1, "the first line must name the columns"),
        (("user_id,tier", "alice,gold", "bob"), 3, "1 columns, expected 2"),
        (("user_id,tier", 'alice,"gold', "bob,free"), 2, "not CSV: unexpected end of data"),
        (('"user_id', "alice"), 1, "not CSV: unexpected end of data"),
        (("user_id,tier", "alice,none"), 2, 'there is no tier "none"'),
    ],
)
def test_csv_error_is_reported_once(place: Place, lines: tuple[str, ...], line: int, expected_error: str) -> None:
    file = place.file("users.csv", *lines)
    result, last = place.run("import", file, expect=ExitCode.BAD)[1].splitlines()
    assert result.startswith(f"{file}:{line}: ")
    assert expected_error in result
    assert last == "Error: 1 mistake; nothing was imported"


def test_export_and_import_round_trip(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(users, "PAGE", 2)
    everything = (
        Limit(0, Unit.SECOND),
        Limit(4_294_967_295, Unit.YEAR),
        Limit(9, Unit.MONTH, timezone="Europe/Berlin"),
        Limit(5, Unit.MINUTE, Algorithm.SLIDING_WINDOW, unit_multiplier=15),
        Limit(5, Unit.DAY, Algorithm.GCRA, 2),
        Limit(5, Unit.WEEK, Algorithm.TOKEN_BUCKET, 5),
    )
    some = [
        User("alice", "gold", everything, org="acme"),
        User('b,"ö\\ \N{GRINNING FACE}'),
        User("carl", org="Zürich"),
        User("dora", "", LIMITS),
        User("emil", "free"),
    ]
    place.change(lambda change: change.put_users(some))
    place.change(lambda change: change.set_block("alice", Block("spam")))
    out, _ = place.run("export")
    assert len(out.splitlines()) == 5
    file = tmp_path / "users.jsonl"
    assert place.run("export", "--output", file) == ("", f"5 users written to {file}\n")
    assert file.read_text() == out

    async def forget(change: UnitOfWork) -> None:
        for user in some:
            await change.delete_user(user.user_id)

    place.change(forget)
    assert place.run("import", file)[0] == "5 users created, 0 changed, 0 unchanged\n"
    assert place.users == {user.user_id: user for user in some}
    assert place.run("export")[0] == out


@pytest.mark.parametrize("upgraded_url", ["sqlite"], indirect=True)
def test_failed_export_keeps_the_existing_file(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(users, "PAGE", 1)
    place.change(lambda change: change.put_users([User("alice"), User("bob")]))
    kept = tmp_path / "kept" / "users.jsonl"
    kept.parent.mkdir()
    kept.write_text("as it was")
    line_of = importlib.import_module("ratelimit_rls.cli.users_file").format_user

    def failing(user: User) -> str:
        if user.user_id == "bob":
            raise OSError(28, "No space left on device")
        return str(line_of(user))

    with monkeypatch.context() as broken:
        broken.setattr("ratelimit_rls.cli.users_file.format_user", failing)
        assert "No space left on device" in place.run("export", "--output", kept, expect=ExitCode.BAD)[1]
    assert kept.read_text() == "as it was"
    assert [path.name for path in kept.parent.iterdir()] == ["users.jsonl"]
    place.run("export", "--output", kept)
    assert kept.read_text() == '{"user_id": "alice"}\n{"user_id": "bob"}\n'
    assert "No such file" in place.run("export", "--output", tmp_path / "no" / "x", expect=ExitCode.BAD)[1]


def test_list_filters_users(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "PAGE", 2)

    async def fill(change: UnitOfWork) -> None:
        await change.put_users(
            [User("alice", "gold", org="acme"), User("bob", "free", LIMITS), User("carl"), User("d")]
        )
        await change.set_block("alice", Block("spam", FAR_S))
        await change.set_block("bob", Block("", PAST_S))
        await change.set_block("d", Block())
        await change.set_override("bob", Override(LIMITS[:1], FAR_S, "a launch"))

    def listed(*message: str) -> list[str]:
        return [user["user_id"] for user in json.loads(place.run("list", "--format", "json", *message)[0])]

    place.change(fill)
    out, err = place.run("list")
    assert err == ""
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "USER TIER ORG LIMITS STATE",
        "alice gold acme blocked until 2096-10-02 07:06Z",
        "bob free 100/minute fixed_window and 5/second token_bucket, burst 9 override until 2096-10-02 07:06Z",
        "carl",
        "d blocked",
    ]
    assert listed("--blocked") == ["alice", "d"]
    assert listed("--blocked", "--limit", "1") == ["alice"]
    assert listed("--tier", "free") == ["bob"]
    assert listed("--tier", "") == ["carl", "d"]
    assert listed("--tier", "none such") == []
    assert place.run("list", "--limit", "3")[1] == "there are more than 3 users; raise --limit to list them\n"
    assert place.run("list", "--limit", "4")[1] == ""
    _, bob, *_ = json.loads(place.run("list", "--format", "json")[0])
    assert bob == {
        "user_id": "bob",
        "tier": "free",
        "org": "",
        "limits": [
            {"requests_per_unit": 100, "unit": "minute"},
            {"requests_per_unit": 5, "unit": "second", "algorithm": "token_bucket", "burst": 9},
        ],
        "override": {
            "limits": [{"requests_per_unit": 100, "unit": "minute"}],
            "until_s": FAR_S,
            "reason": "a launch",
        },
        "block": {"until_s": PAST_S, "reason": ""},
        "version": 3,
    }


def test_server_follows_an_import(place: Place) -> None:
    file = place.file("users.jsonl", *({"user_id": f"u{number}", "tier": "gold"} for number in range(6000)))

    async def serve() -> list[int]:
        loads: list[int] = []
        database = Database(place.url)

        async def take(accounts: Configuration) -> None:
            loads.append(len(accounts.users))

        follower = ChangeFollower(Repository(database), database, take, lambda _: None, 3600.0)
        await follower.start()
        try:
            await asyncio.to_thread(place.run, "import", file)
            async with asyncio.timeout(20):
                while len(loads) < 2:
                    await asyncio.sleep(0.01)
        finally:
            await follower.close()
            await database.close()
        return loads

    assert asyncio.run(serve()) == [0, 6000]


@pytest.mark.parametrize("upgraded_url", ["sqlite"], indirect=True)
def test_missing_file_or_database_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in place.run("import", "none.jsonl", expect=ExitCode.USAGE)[1]
    monkeypatch.delenv("RLS_DATABASE_URL", raising=False)
    for line in (["import", "-"], ["export"], ["list"]):
        assert main(["users", *line]) == ExitCode.USAGE
