"""Changes of stored rules. Callers compile a rule before they store it; here its document is only text."""

from __future__ import annotations

from uuid import UUID, uuid4

import yaml
from sqlalchemy import delete, insert, update

from ratelimit_rls.database.queries import quote_name
from ratelimit_rls.database.row_mapping import Fields, rule_image, rule_row
from ratelimit_rls.database.tables import rate_limit_rules
from ratelimit_rls.database.validation import MAX_DOCUMENT_LENGTH, check_name, check_number, check_text
from ratelimit_rls.database.writes.audited import AuditedWrites, VersionCheck
from ratelimit_rls.errors import BadRequest, Conflict, NotFound
from ratelimit_rls.rules.stored_rule import StoredRule

_MAX_TARGETING_VALUES = 1000
"""Tiers, paths, methods or CIDRs in the targeting of one rule."""


class RuleWrites(AuditedWrites):
    """Changes of stored rules."""

    async def add_rule(self, rule: StoredRule) -> StoredRule:
        """Create a rule. Generates an id if it has none; sets its creator and its timestamps."""
        row = _row(rule)
        rule_id = _uuid(rule.rule_id) if rule.rule_id else str(uuid4())
        await self._require_free_name(rule.name, rule_id)
        try:
            await self.rule(rule_id)
        except NotFound:
            pass
        else:
            raise Conflict(f"a rule with the id {quote_name(rule_id)} already exists")
        row.update({"rule_id": rule_id, "created_by": self._actor.name, "version": 1})
        await self._connection.execute(
            insert(rate_limit_rules), [{**row, "created_at": self._now_s, "updated_at": self._now_s}]
        )
        return await self._record_rule("create", None, rule_id)

    async def put_rule(self, rule: StoredRule, expected: int | None = None) -> StoredRule:
        """Replace the rule with this id. Its name may change."""
        row = _row(rule)
        before = await self.rule(rule.rule_id)
        VersionCheck("rule", before.name, before.version).expect(expected)
        await self._require_free_name(rule.name, before.rule_id)
        written = {**row, "version": before.version + 1, "updated_at": self._now_s}
        table = rate_limit_rules
        await self._connection.execute(update(table).where(table.c.rule_id == before.rule_id).values(written))
        return await self._record_rule("replace", before, before.rule_id)

    async def delete_rule(self, rule_id: str, expected: int | None = None) -> None:
        before = await self.rule(rule_id)
        VersionCheck("rule", before.name, before.version).expect(expected)
        await self._connection.execute(delete(rate_limit_rules).where(rate_limit_rules.c.rule_id == rule_id))
        await self._audit("delete", "rule", rule_id, rule_image(before), None)
        await self._feed("rule", rule_id)

    async def _require_free_name(self, name: str, rule_id: str) -> None:
        try:
            other = await self.rule_named(name)
        except NotFound:
            return
        if other.rule_id != rule_id:
            raise Conflict(f"rule {quote_name(name)} already exists, with the id {other.rule_id}")

    async def _record_rule(self, action: str, before: StoredRule | None, rule_id: str) -> StoredRule:
        after = await self.rule(rule_id)
        await self._audit(action, "rule", rule_id, rule_image(before) if before else None, rule_image(after))
        await self._feed("rule", rule_id)
        return after


def _row(rule: StoredRule) -> Fields:
    """Convert a rule to a row. Raises BadRequest if it cannot be stored."""
    _check(rule)
    domain = domain_of(rule.document)
    check_name(domain, "the domain of a rule", may_be_empty=True)  # the compiler reports a missing one
    return {**rule_row(rule), "domain": domain}


def _check(rule: StoredRule) -> None:
    check_name(rule.name, "the name of a rule")
    check_text(rule.document, "the document of a rule", MAX_DOCUMENT_LENGTH)
    check_number(rule.priority, "the priority of a rule")
    for values in (rule.targeting.tiers, rule.targeting.endpoints, rule.targeting.methods, rule.targeting.cidrs):
        if len(values) > _MAX_TARGETING_VALUES:
            raise BadRequest(f"a rule must target at most {_MAX_TARGETING_VALUES} tiers, paths, methods or addresses")
        for value in values:
            check_text(value, "a targeting value of a rule")


def _uuid(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise BadRequest(f"the id of a rule must be a UUID, or absent, not {quote_name(text)}") from None


def domain_of(document: str) -> str:
    """Return the top-level `domain` of a document, even if the rest is invalid; "" if there is none."""
    depth = 0
    is_value, key = False, ""
    try:
        for event in yaml.parse(document, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth == 2:
                    is_value = not is_value
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.ScalarEvent) and depth == 1:
                if is_value and key == "domain":
                    return str(event.value)
                key, is_value = ("" if is_value else event.value), not is_value
            elif isinstance(event, yaml.AliasEvent) and depth == 1:
                is_value = not is_value
    except yaml.YAMLError:
        pass  # the compiler reports the error
    return ""
