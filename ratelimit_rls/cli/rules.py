"""Rules from the paths on a command line: the arguments that name them, and what they compile to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.rules.compile import Compiled
    from ratelimit_rls.rules.load import Source


def rules_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of every verb that reads rules."""
    paths = click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
    merge = click.option(
        "--merge-domains", is_flag=True, help="Several files may add to one domain, as with MERGE_DOMAIN_CONFIG=true."
    )
    return paths(merge(command))


def read(paths: tuple[Path, ...]) -> list[Source]:
    """Every rules file in `paths`; of directories every *.yaml and *.yml."""
    from ratelimit_rls.rules.sources.files import RulesFiles

    sources = RulesFiles(paths).read()
    if not sources:
        raise SettingsError(f"no rules in {' '.join(map(str, paths))}: there is no *.yaml or *.yml file")
    return sources


def load(paths: tuple[Path, ...], merge_domains: bool) -> Compiled:
    """Raises RulesError with everything that is wrong."""
    from ratelimit_rls.rules.compile import compile_documents

    return compile_documents(read(paths), merge_domains=merge_domains)
