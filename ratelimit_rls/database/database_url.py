"""Parser of RLS_DATABASE_URL. Its errors never quote the URL.

A password with an unescaped `/`, `?`, `#` or `@` makes parts of it look like a host, a port or a path. Such a URL is
rejected rather than shown in parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from ratelimit_rls.errors import SettingsError

Dialect = Literal["sqlite", "postgresql"]

_SCHEMES = ("postgresql", "postgres", "postgresql+asyncpg")
_EXAMPLES = "sqlite:///file, sqlite:////absolute/file, or postgresql://user:password@host:port/name"


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """A parsed database URL."""

    dialect: Dialect
    display_name: str  # without user, password and options
    path: Path = Path()  # of SQLite
    dsn: str = field(default="", repr=False)  # of PostgreSQL, as asyncpg takes it


def parse_database_url(text: str) -> DatabaseUrl:
    """Parse a URL. Raises SettingsError if it is invalid."""
    scheme, separator, rest = text.strip().partition("://")
    scheme = scheme.lower()
    if separator and scheme == "sqlite":
        return _sqlite(rest)
    if separator and scheme in _SCHEMES:
        return _postgresql(rest)
    raise SettingsError(f"RLS_DATABASE_URL must be {_EXAMPLES}")


def _sqlite(rest: str) -> DatabaseUrl:
    """Parse the part after `sqlite://`: the host is empty, and the path follows the third slash."""
    if not rest.startswith("/") or len(rest) == 1 or "?" in rest or "#" in rest:
        raise SettingsError(
            "RLS_DATABASE_URL is not the URL of a SQLite file: it must be sqlite:///file or sqlite:////absolute/file, "
            "without options"
        )
    path = Path(unquote(rest[1:]))
    if str(path) == ":memory:":
        raise SettingsError(
            "RLS_DATABASE_URL must name a file, e.g. sqlite:///records.db: "
            "a SQLite database in memory would be separate for every connection"
        )
    return DatabaseUrl("sqlite", f"SQLite file {path}", path=path)


def _postgresql(rest: str) -> DatabaseUrl:
    wrong = SettingsError(
        "RLS_DATABASE_URL is not the URL of a PostgreSQL database: it must be "
        "postgresql://user:password@host:port/name, with / ? # @ and % in a user or password "
        "written as %2F %3F %23 %40 and %25"
    )
    try:
        parts = urlsplit(f"postgresql://{rest}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True)) if parts.query else {}
    except ValueError:
        raise wrong from None
    if parts.fragment or "#" in rest or "@" in parts.path or "@" in parts.query or "/" in parts.path[1:]:
        raise wrong
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if not all(_is_host(host) for host in hosts):
        raise wrong
    where = ",".join(host for host in hosts if host) or options.get("host", "the default host")
    database = unquote(parts.path[1:]) or options.get("database") or options.get("dbname") or "the default database"
    return DatabaseUrl("postgresql", f"PostgreSQL at {where}, {database}", dsn=f"postgresql://{rest}")


def _is_host(text: str) -> bool:
    """Return whether text is host, host:port, [IPv6]:port, or empty (then an option or the system decides)."""
    if text.startswith("["):
        _, bracket, port = text.partition("]")
        return bool(bracket) and (not port or (port.startswith(":") and port[1:].isdecimal()))
    _, colon, port = text.partition(":")
    return not colon or port.isdecimal()
