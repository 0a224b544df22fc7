"""Settings of a process, from flags and environment variables. Read once and immutable.

    flag --grpc-port  =  field grpc_port  =  variable GRPC_PORT          --workers = rls_workers = RLS_WORKERS

A flag takes precedence over its variable. `Settings()` reads the environment and is either completely valid or raises
SettingsError with one sentence per problem. Nothing else in the package reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.settings import catalogue, validation
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.settings.values import SettingsValues

__all__ = ["RedisAddress", "RedisServers", "Settings"]


class Settings(SettingsValues):
    """Valid settings."""

    @model_validator(mode="wrap")
    @classmethod
    def _report_all(cls, values: Mapping[str, Any], handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report values that cannot be parsed together with all other problems, not instead of them."""
        unparsed: list[ErrorDetails] = []
        try:
            settings = handler(values)
        except ValidationError as error:
            unparsed = error.errors()
            bad = {detail["loc"][0] for detail in unparsed}
            settings = handler({name: value for name, value in values.items() if name not in bad})
        unparsed.sort(key=lambda detail: _ORDER.get(str(detail["loc"][0]).lower(), 0))
        sentences = [_format_error(detail, values[str(detail["loc"][0])]) for detail in unparsed]
        problems = [*sentences, *validation.errors(settings)]
        if problems:
            raise SettingsError("\n".join(problems))
        return settings

    def warnings(self) -> list[str]:
        """Return one sentence for each setting that has no effect or an unexpected one."""
        return list(validation.warnings(self, frozenset(os.environ)))


_ORDER = {variable.field: at for at, variable in enumerate(catalogue.VARIABLES)}


def _format_error(detail: ErrorDetails, value: object) -> str:
    """Return one sentence about an invalid value. The value is quoted unless it may be a secret."""
    field = str(detail["loc"][0]).lower()
    name, context = field.upper(), detail.get("ctx", {})
    if field not in Settings.model_fields:
        return f"{name} is not a setting"
    if value == "":
        return f"{name} is set but empty; set a value or unset it"
    displayed = f"{name}={value!r}" if _is_public(field) else name
    match detail["type"]:
        case "value_error":
            return f"{displayed} {context['error']}"
        case "greater_than_equal":
            return f"{displayed} is too small; it must be ≥ {context['ge']}"
        case "greater_than":
            return f"{displayed} is too small; it must be > {context['gt']}"
        case "less_than_equal":
            return f"{displayed} is too large; it must be ≤ {context['le']}"
        case "literal_error":
            return f"{displayed} is not a valid choice; use {context['expected']}"
        case "string_pattern_mismatch":
            return f"{displayed} is not a header name; use letters, digits and dashes"
        case _:
            return f"{displayed} cannot be used: {detail['msg']}"


def _is_public(field: str) -> bool:
    about = Settings.model_fields[field]
    return about.repr and about.annotation is not SecretStr
