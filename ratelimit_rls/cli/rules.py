"""Rules from the paths on a command line: the arguments that name them, and what they compile to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.desk import at_desk, database_option, stored_rules
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import StoredRule
    from ratelimit_rls.rules.compile import Compiled
    from ratelimit_rls.rules.load import Source


_MERGE = click.option(
    "--merge-domains", is_flag=True, help="Several files may add to one domain, as with MERGE_DOMAIN_CONFIG=true."
)


def rules_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of every verb that reads rules."""
    paths = click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
    return paths(_MERGE(command))


def sources_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those of verbs that take the rules of a database, too."""
    paths = click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
    return paths(_MERGE(database_option(command)))


def read(paths: tuple[Path, ...]) -> list[Source]:
    """Every rules file in `paths`; of directories every *.yaml and *.yml."""
    from ratelimit_rls.rules.sources.files import RulesFiles

    sources = RulesFiles(paths).read()
    if not sources:
        raise SettingsError(f"no rules in {' '.join(map(str, paths))}: there is no *.yaml or *.yml file")
    return sources


def load(paths: tuple[Path, ...], merge_domains: bool, database: str = "") -> Compiled:
    """Raises RulesError with everything that is wrong."""
    return compiled(paths, merge_domains, at_desk(database, stored_rules) if database else None)


def compiled(paths: tuple[Path, ...], merge_domains: bool, stored: Iterable[StoredRule] | None) -> Compiled:
    """The same with rules of a database that were read already; None: there is no database."""
    from ratelimit_rls.rules.compile import compile_documents
    from ratelimit_rls.rules.sources.database import stored_sources

    if not paths and stored is None:
        raise click.UsageError("Missing argument 'PATHS...', and there is no database either.")
    sources = read(paths) if paths else []
    return compile_documents([*stored_sources(stored or ()), *sources], merge_domains=merge_domains)
