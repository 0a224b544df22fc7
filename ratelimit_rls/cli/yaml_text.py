"""Values as YAML that the rules' own dialect reads back: PyYAML writes for its own, which knows other numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from ratelimit_rls.rules.scalars import Kind, resolve

_ODD_BREAKS = re.compile("[\r\x85\u2028\u2029]")


def yaml_text(documents: Iterable[Mapping[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes what would not come back as the text that it is; where PyYAML quotes for its own sake, so it stays."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None
    if _ODD_BREAKS.search(text):
        style = '"'  # escaped: some parsers take each of them for a line's end
    elif resolve(text)[0] is not Kind.STRING:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
