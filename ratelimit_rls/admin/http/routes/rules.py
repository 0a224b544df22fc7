"""Rules stored in the database: documents in the format of rules files, with a name, a priority and a target."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Query, Response

from ratelimit_rls.admin.backend import AdminBackend
from ratelimit_rls.admin.http.changes import ChangeRequest, ChangeResult
from ratelimit_rls.admin.http.dependencies import (
    READ,
    WRITE,
    Backend,
    Change,
    Conditional,
    ResourceChange,
    make_router,
    resource_path,
)
from ratelimit_rls.admin.http.pagination import PageItems, Pagination
from ratelimit_rls.admin.http.problems import invalid_rules
from ratelimit_rls.admin.http.schemas.fields import QueryBool, RuleId, SearchText
from ratelimit_rls.admin.http.schemas.requests import RuleInput
from ratelimit_rls.admin.http.schemas.resources import Rule, RulePage
from ratelimit_rls.admin.rules import CompiledRule, compile_and_store, document_text
from ratelimit_rls.database.repository import UnitOfWork
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.stored_rule import StoredRule

router = make_router("rules", "rules")


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
    rule = body.to_rule("", await document_text(body.document))

    async def work(unit: UnitOfWork, compiled: CompiledRule) -> ChangeResult:
        created = await compiled.add(unit)
        return ChangeResult(Rule.model_validate(created), 201, created.version, resource_path(router, created.rule_id))

    return await _compile_and_store(backend, change, body, rule, work)


@router.get("/{rule_id}", summary="Get a stored rule", response_model=Rule, dependencies=[READ])
async def get_rule(backend: Backend, conditional: Conditional, rule_id: RuleId) -> StoredRule | Response:
    async with backend.repository.reading() as reader:
        rule = await reader.rule(rule_id)
    return conditional.respond(rule, rule.version)


@router.put("/{rule_id}", summary="Replace a stored rule", response_model=Rule, dependencies=[WRITE])
async def put_rule(backend: Backend, change: ResourceChange, rule_id: RuleId, body: RuleInput) -> Response:
    """The rule must exist: POST creates rules. It is compiled as a new one is."""
    rule = body.to_rule(rule_id, await document_text(body.document))

    async def work(unit: UnitOfWork, compiled: CompiledRule) -> ChangeResult:
        before = await unit.rule(rule_id)
        change.require(before.version, f"rule '{before.name}'")
        put = await compiled.put(unit, before.version)
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


async def _compile_and_store(
    backend: AdminBackend,
    change: ChangeRequest,
    body: RuleInput,
    rule: StoredRule,
    work: Callable[[UnitOfWork, CompiledRule], Awaitable[ChangeResult]],
) -> Response:
    """Compile and store a rule. The error of an object has the text that it was compiled as, which positions are in."""
    try:
        return await compile_and_store(
            backend, rule, change.replay, lambda compiled: change.run(lambda unit: work(unit, compiled))
        )
    except RulesError as error:
        extra = {} if isinstance(body.document, str) else {"document": rule.document}
        raise invalid_rules(error, **extra) from None
