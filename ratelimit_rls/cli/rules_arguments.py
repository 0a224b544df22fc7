"""Arguments of verbs that read rules, and loading the rules they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.database_options import database_option, with_repository
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.rules.compile import CompiledRules
    from ratelimit_rls.rules.source_document import SourceDocument
    from ratelimit_rls.rules.stored_rule import StoredRule


_MERGE = click.option(
    "--merge-domains", is_flag=True, help="Allow several files to define one domain, as with MERGE_DOMAIN_CONFIG=true."
)


def rules_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add PATHS (required) and --merge-domains to a command."""
    paths = click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
    return paths(_MERGE(command))


def sources_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add PATHS (optional), --merge-domains and --database to a command."""
    paths = click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
    return paths(_MERGE(database_option(command)))


def read_sources(paths: tuple[Path, ...]) -> list[SourceDocument]:
    """Return every rules file in `paths`: of directories, every *.yaml and *.yml."""
    from ratelimit_rls.rules.sources.files import RulesFiles

    sources = RulesFiles(paths).read()
    if not sources:
        raise SettingsError(f"no rules in {' '.join(map(str, paths))}: there is no *.yaml or *.yml file")
    return sources


def load_rules(paths: tuple[Path, ...], merge_domains: bool, database: str = "") -> CompiledRules:
    """Compile the rules of files and, if given, of a database. Raises RulesError with every problem."""
    if not database:
        return compile_sources(paths, merge_domains, None)
    from ratelimit_rls.admin.rules import stored_rules

    return compile_sources(paths, merge_domains, with_repository(database, stored_rules))


def compile_sources(paths: tuple[Path, ...], merge_domains: bool, stored: Iterable[StoredRule] | None) -> CompiledRules:
    """Compile the rules of files together with stored rules; `stored` is None without a database."""
    from ratelimit_rls.rules.compile import compile_documents
    from ratelimit_rls.rules.sources.database import stored_sources

    if not paths and stored is None:
        raise click.UsageError("Missing argument 'PATHS...'; it is optional only with --database.")
    sources = read_sources(paths) if paths else []
    return compile_documents([*stored_sources(stored or ()), *sources], merge_domains=merge_domains)
