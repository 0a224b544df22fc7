"""Catalogue of all variables with their documentation: the source of `serve --help`, its flags, and the docs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from ratelimit_rls.settings import database, groups, telemetry, unsupported, xds
from ratelimit_rls.settings.parse import UNSET, format_duration

GROUPS: tuple[type[BaseModel], ...] = (
    groups.RulesSettings,
    xds.XdsSettings,
    groups.GrpcSettings,
    groups.HttpSettings,
    groups.MessageSettings,
    groups.StoreSettings,
    groups.RedisSettings,
    groups.PerSecondSettings,
    groups.FailureSettings,
    groups.ResponseSettings,
    groups.LogSettings,
    telemetry.StatsSettings,
    telemetry.TracingSettings,
    database.DatabaseSettings,
    database.IdentitySettings,
    database.AdminSettings,
    unsupported.NoEffectSettings,
    unsupported.CalendarSettings,
    unsupported.MemcachedSettings,
)

_KINDS: dict[object, str] = {
    bool: "bool",
    int: "number",
    float: "number",
    timedelta: "duration",
    str: "text",
    SecretStr: "secret",
    tuple: "list",
    dict: "map",
}


@dataclass(frozen=True, slots=True)
class Variable:
    field: str
    group: str
    kind: str  # bool, number, duration, text, secret, list, map, or the choices joined by |
    default: str  # as text, as in the variable
    effective_default: str  # what applies if the variable is not set, for readers
    description: str

    @property
    def name(self) -> str:
        return self.field.upper()

    @property
    def flag(self) -> str:
        return "--" + self.field.removeprefix("rls_").replace("_", "-")


def _variable(group: type[BaseModel], field: str, about: FieldInfo) -> Variable:
    default = _text(about.default)
    extra = about.json_schema_extra
    unset = extra.get(UNSET) if isinstance(extra, dict) else None
    return Variable(
        field=field,
        group=group.__doc__ or "",
        kind=_kind(about),
        default=default,
        effective_default=str(unset) if unset else default + _binary_unit(field, about.default),
        description=about.description or "",
    )


def _kind(about: FieldInfo) -> str:
    origin = get_origin(about.annotation) or about.annotation
    if origin is Literal:
        return "|".join(filter(None, get_args(about.annotation)))
    return _KINDS[origin]


def _binary_unit(field: str, default: object) -> str:
    """Return a number of bytes in KiB or MiB, to be appended to its digits, or nothing."""
    if "bytes" not in field or not isinstance(default, int) or not default or default % (1 << 10):
        return ""
    return f" = {default >> 20}MiB" if not default % (1 << 20) else f" = {default >> 10}KiB"


def _text(default: object) -> str:
    match default:
        case bool():
            return str(default).lower()
        case timedelta():
            return format_duration(default)
        case SecretStr() | () | {}:
            return ""
        case _:
            return str(default)


VARIABLES: tuple[Variable, ...] = tuple(
    _variable(group, field, about) for group in GROUPS for field, about in group.model_fields.items()
)
