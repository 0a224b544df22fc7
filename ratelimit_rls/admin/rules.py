"""Stored rules: their documents as text, and their compilation before they are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from ratelimit_rls.core.accounts import StoredRule
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.rules.sources.database import stored_sources

if TYPE_CHECKING:
    from ratelimit_rls.admin.backend import AdminBackend
    from ratelimit_rls.database.repository import Reader

# libyaml if PyYAML was built with it: the same text in a tenth of the time.
_DUMPER: type[yaml.SafeDumper] | type[yaml.CSafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_PAGE = 500

RulesById = Mapping[str, StoredRule]


async def document_text(document: str | dict[str, Any], field: str = "document") -> str:
    """Return the YAML text of a document given as text or as an object.

    Objects are written in a thread, because that is slow and the event loop also serves rate limit requests. Their size
    is bounded by the caller (http.schemas.requests.MAX_DOCUMENT_VALUES). Raises BadRequest.
    """
    if isinstance(document, str):
        return document
    try:
        return await asyncio.to_thread(_dump_yaml, document)
    except UnicodeEncodeError:
        raise BadRequest("must be valid Unicode text", field=field) from None


async def compile_rule(backend: AdminBackend, rule: StoredRule, others: RulesById) -> None:
    """Compile a rule with all others, in a thread. Raises RulesError.

    A disabled rule is compiled alone, as if enabled: it must be valid to be enabled.
    """
    if any(other.name == rule.name for other in others.values()):
        return  # storing it fails because the name is taken; compiling would report a conflict with its namesake
    if rule.enabled:
        await asyncio.to_thread(backend.check_rules, [*others.values(), rule])
    else:
        await asyncio.to_thread(backend.compile_rules, stored_sources([replace(rule, enabled=True)]))


async def other_rules(reader: Reader, rule: StoredRule) -> RulesById:
    """Return all stored rules but this one, by id."""
    found: dict[str, StoredRule] = {}
    after = ""
    while page := await reader.rules(after, _PAGE):
        after = page[-1].rule_id
        found.update((other.rule_id, other) for other in page if other.rule_id != rule.rule_id)
    return found


def _dump_yaml(document: dict[str, Any]) -> str:
    text: str = yaml.dump(document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text
