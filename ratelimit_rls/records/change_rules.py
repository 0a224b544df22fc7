"""Stored rules. Whether one compiles is found out before it is brought here; here it is text."""

from __future__ import annotations

from uuid import UUID, uuid4

import yaml
from sqlalchemy import delete, insert, update

from ratelimit_rls.core.accounts import StoredRule
from ratelimit_rls.errors import BadRequest, Conflict, NotFound
from ratelimit_rls.records.changing import Changing, Versioned
from ratelimit_rls.records.checks import LONGEST_DOCUMENT, check_name, check_number, check_text
from ratelimit_rls.records.reader import shown
from ratelimit_rls.records.rows import Fields, rule_image, rule_row
from ratelimit_rls.records.tables import rate_limit_rules

_LONGEST_TARGETING = 1000
"""Tiers, paths, methods or CIDRs of one rule."""


class RuleChanges(Changing):
    async def add_rule(self, rule: StoredRule) -> StoredRule:
        """With an id of its own where it has none. Who creates it, and when, is known here."""
        row = _row(rule)
        rule_id = _uuid(rule.rule_id) if rule.rule_id else str(uuid4())
        await self._require_free_name(rule.name, rule_id)
        try:
            await self.rule(rule_id)
        except NotFound:
            pass
        else:
            raise Conflict(f"there is a rule with the id {shown(rule_id)} already")
        row.update({"rule_id": rule_id, "created_by": self._actor.name, "version": 1})
        await self._connection.execute(
            insert(rate_limit_rules), [{**row, "created_at": self._now_s, "updated_at": self._now_s}]
        )
        return await self._told_rule("create", None, rule_id)

    async def put_rule(self, rule: StoredRule, expected: int | None = None) -> StoredRule:
        """Replace the one with this id; its name may be another."""
        row = _row(rule)
        before = await self.rule(rule.rule_id)
        Versioned("rule", before.name, before.version).expect(expected)
        await self._require_free_name(rule.name, before.rule_id)
        written = {**row, "version": before.version + 1, "updated_at": self._now_s}
        table = rate_limit_rules
        await self._connection.execute(update(table).where(table.c.rule_id == before.rule_id).values(written))
        return await self._told_rule("replace", before, before.rule_id)

    async def delete_rule(self, rule_id: str, expected: int | None = None) -> None:
        before = await self.rule(rule_id)
        Versioned("rule", before.name, before.version).expect(expected)
        await self._connection.execute(delete(rate_limit_rules).where(rate_limit_rules.c.rule_id == rule_id))
        await self._audit("delete", "rule", rule_id, rule_image(before), None)
        await self._feed("rule", rule_id)

    async def _require_free_name(self, name: str, rule_id: str) -> None:
        try:
            other = await self.rule_named(name)
        except NotFound:
            return
        if other.rule_id != rule_id:
            raise Conflict(f"there is a rule {shown(name)} already; it has the id {other.rule_id}")

    async def _told_rule(self, action: str, before: StoredRule | None, rule_id: str) -> StoredRule:
        after = await self.rule(rule_id)
        await self._audit(action, "rule", rule_id, rule_image(before) if before else None, rule_image(after))
        await self._feed("rule", rule_id)
        return after


def _row(rule: StoredRule) -> Fields:
    """BadRequest if it cannot be stored."""
    _check(rule)
    domain = domain_of(rule.document)
    check_name(domain, "the domain of a rule", may_be_empty=True)  # where there is none, the compiler tells
    return {**rule_row(rule), "domain": domain}


def _check(rule: StoredRule) -> None:
    check_name(rule.name, "the name of a rule")
    check_text(rule.document, "the document of a rule", LONGEST_DOCUMENT)
    check_number(rule.priority, "the priority of a rule")
    for words in (rule.targeting.tiers, rule.targeting.endpoints, rule.targeting.methods, rule.targeting.cidrs):
        if len(words) > _LONGEST_TARGETING:
            raise BadRequest(f"a rule is for {_LONGEST_TARGETING} tiers, paths, methods or addresses at most")
        for word in words:
            check_text(word, "what a rule is for")


def _uuid(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise BadRequest(f"{shown(text)} is no id of a rule: it must be a UUID, or left out") from None


def domain_of(document: str) -> str:
    """What stands beside `domain` at the top, be the rest right or wrong; "" where nothing does."""
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
        pass  # the compiler tells what is wrong
    return ""
