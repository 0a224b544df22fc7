"""Reader for the YAML file that a setting names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ratelimit_rls.core.model import Position
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlNode
from ratelimit_rls.yaml.parser import NotYaml, parse

MAX_SETTINGS_FILE_BYTES = 2**20

T = TypeVar("T")


def read_settings_file(variable: str, path: Path, read: Callable[[YamlNode | None, Findings], T]) -> T:
    """Return what `read` makes of the file's document, which is None if the file is empty.

    Raise SettingsError with all errors and their positions if `read` finds any, or if the file is not YAML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SETTINGS_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{variable}: {path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_SETTINGS_FILE_BYTES:
        raise SettingsError(f"{variable}: {path} is larger than {MAX_SETTINGS_FILE_BYTES // 2**20} MiB")
    found = Findings(str(path))
    try:
        result = read(parse(content), found)
    except NotYaml as error:
        found.error(Position(found.file, error.line, error.column), f"this is not YAML: {error.reason}")
    else:
        if not found.errors:
            return result
    raise SettingsError(f"{variable}:\n" + "\n".join(str(problem) for problem in sorted(found.errors)))
