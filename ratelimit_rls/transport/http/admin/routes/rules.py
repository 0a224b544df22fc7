"""Rules in the database: documents in the grammar of files, with a name, a priority and a target."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any
from uuid import uuid4

from fastapi import Query
from starlette.responses import Response

from ratelimit_rls.core.accounts import StoredRule, Targeting
from ratelimit_rls.errors import RulesError
from ratelimit_rls.records.desk import Change, Reader
from ratelimit_rls.rules.sources.database import check_rule
from ratelimit_rls.transport.http.admin.documents import document_text
from ratelimit_rls.transport.http.admin.models import RuleBody, RuleId, Sought, TargetingBody
from ratelimit_rls.transport.http.admin.pages import MOST, WhichPart, answer_page
from ratelimit_rls.transport.http.admin.problems import Fault, rules_fault
from ratelimit_rls.transport.http.admin.query import QueryBool
from ratelimit_rls.transport.http.admin.shown import Page, ShownRule
from ratelimit_rls.transport.http.admin.visit import Answer, Here, Visit
from ratelimit_rls.transport.http.admin.way import path_of, routes_of

MOST_ATTEMPTS = 5
"""To compile and store, where others store rules at the same time."""

router = routes_of("rules", "rules")

Rules = dict[str, StoredRule]
"""All stored ones, by id."""


class _Moved(Exception):
    """The stored rules are not those any more that the new one was compiled with."""


@router.get("", summary="List stored rules, by priority", response_model=Page[ShownRule])
async def list_rules(
    visit: Here,
    part: WhichPart,
    domain: Annotated[Sought | None, Query(description="Only those of this domain.")] = None,
    enabled: Annotated[QueryBool | None, Query(description="Only those that are, or are not.")] = None,
) -> Response:
    async with visit.backend.desk.reading() as reader:
        return await answer_page(
            visit,
            part,
            lambda after, limit: reader.rules(str(after or ""), limit, domain=domain, enabled=enabled),
            lambda rule: rule.rule_id,
            ShownRule.of,
        )


@router.post("", summary="Store a rule", status_code=201, response_model=ShownRule)
async def add_rule(visit: Here, body: RuleBody) -> Response:
    """It is compiled with everything else in force first; what does not compile is refused, and nothing changes."""
    rule = await _rule(str(uuid4()), body)

    async def work(change: Change) -> Answer:
        made = await change.add_rule(rule)
        return Answer(ShownRule.of(made), 201, made.version, path_of(router, made.rule_id))

    return await _stored(visit, body, rule, work)


@router.get("/{rule_id}", summary="Show a stored rule", response_model=ShownRule)
async def show_rule(visit: Here, rule_id: RuleId) -> Response:
    async with visit.backend.desk.reading() as reader:
        rule = await reader.rule(rule_id)
    return visit.show(ShownRule.of(rule), rule.version)


@router.put("/{rule_id}", summary="Replace a stored rule", response_model=ShownRule)
async def put_rule(visit: Here, rule_id: RuleId, body: RuleBody) -> Response:
    rule = await _rule(rule_id, body)

    async def work(change: Change) -> Answer:
        before = await change.rule(rule_id)
        visit.seen.require(before.version, f"rule '{before.name}'")
        put = await change.put_rule(rule, before.version)
        return Answer(ShownRule.of(put), 200, put.version)

    return await _stored(visit, body, rule, work)


@router.delete("/{rule_id}", summary="Delete a stored rule", status_code=204)
async def delete_rule(visit: Here, rule_id: RuleId) -> Response:
    async def work(change: Change) -> Answer:
        before = await change.rule(rule_id)
        visit.seen.require(before.version, f"rule '{before.name}'")
        await change.delete_rule(rule_id, before.version)
        return Answer(status=204)

    return await visit.change(work)


async def _rule(rule_id: str, body: RuleBody) -> StoredRule:
    return StoredRule(
        rule_id=rule_id,
        name=body.name,
        document=await document_text(body.document),
        priority=body.priority,
        enabled=body.enabled,
        targeting=_targeting(body.targeting),
    )


def _targeting(body: TargetingBody) -> Targeting:
    return Targeting(tuple(body.tiers), tuple(body.endpoints), tuple(body.methods), tuple(body.cidrs), body.scope)


async def _stored(visit: Visit, body: RuleBody, rule: StoredRule, work: Any) -> Response:
    """Compiled outside the transaction, since large rules take their time and others must be able to write; stored only
    if the other stored rules are by then the same."""
    for _ in range(MOST_ATTEMPTS):
        async with visit.backend.desk.reading() as reader:
            replayed = await visit.replay(reader)  # before it is found to be there already
            others = await _all(reader, but=rule.rule_id)
        if replayed is not None:
            return replayed
        # One whose name is taken is told so where it would be stored, and not that it contradicts its namesake.
        if all(other.name != rule.name for other in others.values()):
            await _compile(visit, body, rule, [*others.values()])

        async def work_if_same(change: Change, compiled_with: Rules = others) -> Answer:
            if await _all(change, but=rule.rule_id) != compiled_with:
                raise _Moved
            answer: Answer = await work(change)
            return answer

        try:
            return await visit.change(work_if_same)
        except _Moved:
            continue
    raise Fault(409, "conflict", "other rules change all the time; send this one again")


async def _compile(visit: Visit, body: RuleBody, rule: StoredRule, others: Sequence[StoredRule]) -> None:
    """A rule that is not enabled is compiled as if it were, by itself: it must be fit to be."""
    shown = {} if isinstance(body.document, str) else {"document": rule.document}
    try:
        if rule.enabled:
            await asyncio.to_thread(visit.backend.check_rules, [*others, rule])
        else:
            await asyncio.to_thread(check_rule, [replace(rule, enabled=True)])
    except RulesError as error:
        raise rules_fault(error, **shown) from None


async def _all(reader: Reader, but: str) -> Rules:
    found: Rules = {}
    after = ""
    while page := await reader.rules(after, MOST):
        after = page[-1].rule_id
        found.update((rule.rule_id, rule) for rule in page if rule.rule_id != but)
    return found
