"""Import of rules from files into the database: all rules of the files are stored, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from ratelimit_rls.admin.rules import MAX_ATTEMPTS, read_rules
from ratelimit_rls.errors import Conflict
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.rules.sources.database import stored_sources
from ratelimit_rls.rules.stored_rule import StoredRule

if TYPE_CHECKING:
    from ratelimit_rls.database.repository import Actor, Repository, UnitOfWork

TRANSACTION_TIMEOUT_S: Final = 600.0
"""Timeout of each transaction of an import, which may store many rules on a busy database."""


class FileRule(NamedTuple):
    """A file, or one document of a file, and the rule it contains."""

    source: SourceDocument
    rule: StoredRule

    @property
    def place(self) -> str:
        above = self.source.lines_above
        return f"{self.source.name}:{above + 1}" if above else self.source.name


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The changes that an import makes."""

    new: Sequence[StoredRule]
    changed: Sequence[StoredRule]
    deleted: Sequence[StoredRule]
    unchanged: int

    @classmethod
    def of(cls, file_rules: Mapping[str, FileRule], stored: Mapping[str, StoredRule], *, prune: bool) -> ImportPlan:
        wanted = [
            _with_file_fields(item.rule, stored[name]) for name, item in sorted(file_rules.items()) if name in stored
        ]
        changed = [rule for rule in wanted if rule != stored[rule.name]]
        return cls(
            new=[item.rule for name, item in sorted(file_rules.items()) if name not in stored],
            changed=changed,
            deleted=[rule for name, rule in stored.items() if prune and name not in file_rules],
            unchanged=len(wanted) - len(changed),
        )

    async def apply(self, change: UnitOfWork) -> None:
        for rule in self.deleted:  # first: a new rule may reuse the name
            await change.delete_rule(rule.rule_id)
        for rule in self.changed:
            await change.put_rule(rule)
        for rule in self.new:
            await change.add_rule(rule)


async def import_rules(
    repository: Repository, actor: Actor, file_rules: Mapping[str, FileRule], *, prune: bool, dry_run: bool
) -> ImportPlan:
    """Store the rules of files, by name, and return what was changed. `prune` deletes the stored rules in no file.

    Everything is compiled first, together with the stored rules that remain. If these change meanwhile, it starts
    again. Raises RulesError, or Conflict after too many attempts.
    """
    for _ in range(MAX_ATTEMPTS):
        async with repository.reading(TRANSACTION_TIMEOUT_S) as reader:
            stored = {rule.name: rule for rule in await read_rules(reader)}
        kept = [] if prune else [rule for name, rule in stored.items() if name not in file_rules]
        # Outside of any transaction: compiling many rules takes long and must not block other writers.
        await asyncio.to_thread(_compile, file_rules, kept)
        plan = ImportPlan.of(file_rules, stored, prune=prune)
        async with repository.change(actor, dry_run=dry_run, timeout_s=TRANSACTION_TIMEOUT_S) as change:
            if {rule.name: rule for rule in await read_rules(change)} == stored:
                await plan.apply(change)
                return plan
    raise Conflict("other clients keep changing the stored rules; try again")


def _with_file_fields(rule: StoredRule, stored: StoredRule) -> StoredRule:
    """Return the stored rule with the fields that a file defines."""
    return replace(
        stored,
        document=rule.document,
        priority=rule.priority,
        enabled=rule.enabled,
        targeting=rule.targeting,
    )


def _compile(file_rules: Mapping[str, FileRule], kept: Sequence[StoredRule]) -> None:
    """Compile the rules. Raises RulesError; positions are those in the files, whose first line is a comment."""
    for item in file_rules.values():
        if not item.rule.enabled:  # so that enabling it later cannot fail
            compile_documents([item.source])
    compile_documents([*(item.source for item in file_rules.values() if item.rule.enabled), *stored_sources(kept)])
