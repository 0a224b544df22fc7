"""Rules stored in the database: documents in the format of rules files, with a name, a priority and a target."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated
from uuid import uuid4

from fastapi import Query, Response

from ratelimit_rls.admin.backend import AdminBackend
from ratelimit_rls.admin.http.changes import ChangeRequest, ChangeResult
from ratelimit_rls.admin.http.dependencies import (
    READ,
    WRITE,
    Backend,
    Change,
    Conditional,
    Put,
    ResourceChange,
    make_router,
    resource_path,
)
from ratelimit_rls.admin.http.pagination import PageItems, Pagination
from ratelimit_rls.admin.http.problems import invalid_rules
from ratelimit_rls.admin.http.schemas.fields import QueryBool, RuleId, SearchText
from ratelimit_rls.admin.http.schemas.requests import RuleInput, TargetingInput
from ratelimit_rls.admin.http.schemas.resources import Rule, RulePage
from ratelimit_rls.admin.rules import RulesById, compile_rule, document_text, other_rules
from ratelimit_rls.core.accounts import StoredRule, Targeting
from ratelimit_rls.database.repository import UnitOfWork
from ratelimit_rls.errors import Conflict, RulesError

MAX_ATTEMPTS = 5
"""Attempts to compile and store a rule while other rules are stored concurrently."""

router = make_router("rules", "rules")


class _RulesChanged(Exception):
    """The stored rules are no longer those that the new rule was compiled with."""


@router.get("", summary="List stored rules, by priority", response_model=RulePage, dependencies=[READ])
async def list_rules(
    backend: Backend,
    page: Pagination,
    domain: Annotated[SearchText | None, Query(description="Only rules of this domain.")] = None,
    enabled: Annotated[QueryBool | None, Query(description="Only enabled, or only disabled rules.")] = None,
) -> PageItems[StoredRule]:
    async with backend.repository.reading() as reader:
        return await page.read(
            lambda after, limit: reader.rules(str(after or ""), limit, domain=domain, enabled=enabled),
            lambda rule: rule.rule_id,
        )


@router.post("", summary="Create a rule", status_code=201, response_model=Rule, dependencies=[WRITE])
async def create_rule(backend: Backend, change: Change, body: RuleInput) -> Response:
    """The rule is first compiled together with all active rules. If that fails, it is rejected and nothing changes."""
    rule = await _stored_rule(str(uuid4()), body)

    async def work(unit: UnitOfWork) -> ChangeResult:
        created = await unit.add_rule(rule)
        return ChangeResult(Rule.model_validate(created), 201, created.version, resource_path(router, created.rule_id))

    return await _compile_and_store(backend, change, body, rule, work)


@router.get("/{rule_id}", summary="Get a stored rule", response_model=Rule, dependencies=[READ])
async def get_rule(backend: Backend, conditional: Conditional, rule_id: RuleId) -> StoredRule | Response:
    async with backend.repository.reading() as reader:
        rule = await reader.rule(rule_id)
    return conditional.respond(rule, rule.version)


@router.put("/{rule_id}", summary="Replace a stored rule", response_model=Rule, dependencies=[WRITE])
async def put_rule(backend: Backend, change: Put, rule_id: RuleId, body: RuleInput) -> Response:
    rule = await _stored_rule(rule_id, body)

    async def work(unit: UnitOfWork) -> ChangeResult:
        before = await unit.rule(rule_id)
        change.require(before.version, f"rule '{before.name}'")
        put = await unit.put_rule(rule, before.version)
        return ChangeResult(Rule.model_validate(put), 200, put.version)

    return await _compile_and_store(backend, change, body, rule, work)


@router.delete("/{rule_id}", summary="Delete a stored rule", status_code=204, dependencies=[WRITE])
async def delete_rule(change: ResourceChange, rule_id: RuleId) -> Response:
    async def work(unit: UnitOfWork) -> ChangeResult:
        before = await unit.rule(rule_id)
        change.require(before.version, f"rule '{before.name}'")
        await unit.delete_rule(rule_id, before.version)
        return ChangeResult(status=204)

    return await change.run(work)


async def _stored_rule(rule_id: str, body: RuleInput) -> StoredRule:
    return StoredRule(
        rule_id=rule_id,
        name=body.name,
        document=await document_text(body.document),
        priority=body.priority,
        enabled=body.enabled,
        targeting=_targeting(body.targeting),
    )


def _targeting(body: TargetingInput) -> Targeting:
    return Targeting(tuple(body.tiers), tuple(body.endpoints), tuple(body.methods), tuple(body.cidrs), body.scope)


async def _compile_and_store(
    backend: AdminBackend,
    change: ChangeRequest,
    body: RuleInput,
    rule: StoredRule,
    work: Callable[[UnitOfWork], Awaitable[ChangeResult]],
) -> Response:
    """Compile a rule, then store it if the other stored rules are still the same; else start again.

    It is compiled outside the transaction, because large rules take long and others must be able to write meanwhile.
    """
    for _ in range(MAX_ATTEMPTS):
        async with backend.repository.reading() as reader:
            replayed = await change.replay(reader)  # before its name is found to be taken
            others = await other_rules(reader, rule)
        if replayed is not None:
            return replayed
        try:
            await compile_rule(backend, rule, others)
        except RulesError as error:
            extra = {} if isinstance(body.document, str) else {"document": rule.document}
            raise invalid_rules(error, **extra) from None

        async def work_if_same(unit: UnitOfWork, compiled_with: RulesById = others) -> ChangeResult:
            if await other_rules(unit, rule) != compiled_with:
                raise _RulesChanged
            return await work(unit)

        try:
            return await change.run(work_if_same)
        except _RulesChanged:
            continue
    raise Conflict("other rules are being changed concurrently; retry")
