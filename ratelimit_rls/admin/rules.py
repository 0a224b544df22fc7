"""Stored rules: their documents as text, and their compilation before they are stored.

A rule is compiled outside the transaction that stores it, because large rules take long and others must be able to
write meanwhile. It is stored only if the rules that it was compiled with are still the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import yaml

from ratelimit_rls.errors import BadRequest, Conflict
from ratelimit_rls.rules.sources.database import stored_sources
from ratelimit_rls.rules.stored_rule import StoredRule

if TYPE_CHECKING:
    from ratelimit_rls.admin.backend import AdminBackend
    from ratelimit_rls.database.repository import Reader, Repository, UnitOfWork

# libyaml if PyYAML was built with it: the same text in a tenth of the time.
_DUMPER: type[yaml.SafeDumper] | type[yaml.CSafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

MAX_ATTEMPTS: Final = 5
"""Attempts to compile and store a rule while other rules are stored concurrently."""

_PAGE = 500

RulesById = Mapping[str, StoredRule]

T = TypeVar("T")


class RulesChanged(Conflict):
    """The other stored rules are no longer those that a rule was compiled with."""

    def __init__(self) -> None:
        super().__init__("other rules are being changed concurrently; retry")


class CompiledRule(NamedTuple):
    """A rule that compiles together with these others, and can be stored as long as they do not change."""

    rule: StoredRule
    others: RulesById

    async def add(self, unit: UnitOfWork) -> StoredRule:
        """Store the rule as a new one. Raises RulesChanged if `others` are no longer the other rules."""
        await self._require_same_others(unit)
        return await unit.add_rule(self.rule)

    async def put(self, unit: UnitOfWork, expected: int) -> StoredRule:
        """Replace the stored rule with the same id, whose version must be `expected`. Raises RulesChanged."""
        await self._require_same_others(unit)
        return await unit.put_rule(self.rule, expected)

    async def _require_same_others(self, unit: UnitOfWork) -> None:
        if await _other_rules(unit, self.rule) != self.others:
            raise RulesChanged


async def compile_and_store(
    backend: AdminBackend,
    rule: StoredRule,
    find_stored: Callable[[Reader], Awaitable[T | None]],
    store: Callable[[CompiledRule], Awaitable[T]],
) -> T:
    """Compile a rule together with all others, and store it. If other rules change meanwhile, start again.

    `find_stored` returns the result of an earlier, equal request, which is not carried out again; None if there is
    none. `store` runs the transaction. Raises RulesError, or RulesChanged after too many attempts.
    """
    for _ in range(MAX_ATTEMPTS):
        async with backend.repository.reading() as reader:
            stored = await find_stored(reader)  # before its name is found to be taken
            others = await _other_rules(reader, rule)
        if stored is not None:
            return stored
        await compile_rule(backend, rule, others)
        try:
            return await store(CompiledRule(rule, others))
        except RulesChanged:
            continue
    raise RulesChanged


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


async def read_rules(reader: Reader) -> list[StoredRule]:
    """Return all stored rules, by priority, then name."""
    rules: list[StoredRule] = []
    while page := await reader.rules(rules[-1].rule_id if rules else "", _PAGE):
        rules += page
    return rules


async def stored_rules(repository: Repository) -> list[StoredRule]:
    """Return all stored rules, by priority, then name, from one consistent snapshot."""
    async with repository.reading() as reader:
        return await read_rules(reader)


async def _other_rules(reader: Reader, rule: StoredRule) -> RulesById:
    """Return all stored rules but this one, by id."""
    return {other.rule_id: other for other in await read_rules(reader) if other.rule_id != rule.rule_id}


def _dump_yaml(document: dict[str, Any]) -> str:
    text: str = yaml.dump(document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text
