"""YAML output that the rules parser reads back.

PyYAML writes YAML 1.1, whose scalars differ from the rules' dialect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from ratelimit_rls.yaml.scalars import ScalarKind, resolve

_ODD_BREAKS = re.compile("[\r\x85\u2028\u2029]")


def yaml_text(documents: Iterable[Mapping[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that the rules parser would not read back as strings, in addition to those that PyYAML quotes."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None
    if _ODD_BREAKS.search(text):
        style = '"'  # escaped: some parsers treat each of them as a line break
    elif resolve(text)[0] is not ScalarKind.STRING:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
