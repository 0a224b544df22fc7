"""Rules documents that come as objects, written as the text that is stored and compiled."""

from __future__ import annotations

import asyncio
from typing import Any

import yaml

from ratelimit_rls.transport.http.admin.problems import wrong_field

# libyaml where it was compiled in: the same text in a tenth of the time.
_DUMPER: type[yaml.SafeDumper] | type[yaml.CSafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


async def document_text(document: str | dict[str, Any], field: str = "document") -> str:
    """The YAML of a document that may have come as an object, of a bounded size (models.MOST_PARTS).

    In a thread, since it is not quick, and the loop serves those whom rules are for. Raises a Fault (422).
    """
    if isinstance(document, str):
        return document
    try:
        return await asyncio.to_thread(_dumped, document)
    except UnicodeEncodeError:
        raise wrong_field(field, "it is not Unicode text") from None


def _dumped(document: dict[str, Any]) -> str:
    text: str = yaml.dump(document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text
