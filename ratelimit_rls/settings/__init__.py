"""Settings: everything a process is told from outside, read once, frozen.

    flag --grpc-port  =  field grpc_port  =  variable GRPC_PORT          --workers = rls_workers = RLS_WORKERS

A flag wins over its variable. `Settings()` reads the environment and either is wholly usable or raises SettingsError
with a sentence for every problem there is. Nothing else in the package reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.settings import catalogue, later, mogrifiers, records, refusals, telemetry, variables, xds
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers, RedisTls
from ratelimit_rls.settings.redis_servers import Family, parse_redis_servers

__all__ = ["RedisAddress", "RedisServers", "Settings"]


class _Environment(PydanticBaseSettingsSource):
    """Variables by their exact names, as text. The library's own source would read `port` for PORT, and JSON."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[str | None, str, bool]:
        name = field_name.upper()
        return os.environ.get(name), name, False

    def __call__(self) -> dict[str, str]:
        found = (self.get_field_value(about, field) for field, about in self.settings_cls.model_fields.items())
        return {name: value for value, name, _ in found if value is not None}


class Settings(
    variables.RulesSettings,
    xds.XdsSettings,
    variables.GrpcSettings,
    variables.HttpSettings,
    variables.StoreSettings,
    variables.RedisSettings,
    variables.PerSecondSettings,
    variables.FailureSettings,
    variables.AnswerSettings,
    variables.LogSettings,
    telemetry.StatsSettings,
    telemetry.TracingSettings,
    records.RecordsSettings,
    records.IdentitySettings,
    records.AdminSettings,
    later.NoEffectSettings,
    later.CalendarSettings,
    later.MemcachedSettings,
    BaseSettings,
):
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=str.upper,
        populate_by_name=True,
        hide_input_in_errors=True,  # should one of pydantic's own errors ever get out: it would quote secrets
        protected_namespaces=(),
    )

    # Variables without fields: their names depend on the value of another one.
    _mogrifier_variables: dict[str, str] = PrivateAttr(
        default_factory=lambda: {name: text for name, text in os.environ.items() if name.startswith(mogrifiers.PREFIX)}
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)

    @model_validator(mode="wrap")
    @classmethod
    def _report_all(cls, values: Mapping[str, Any], handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Values that cannot be parsed are reported with what is wrong with the others, not instead of it."""
        unparsed: list[ErrorDetails] = []
        try:
            settings = handler(values)
        except ValidationError as error:
            unparsed = error.errors()
            bad = {detail["loc"][0] for detail in unparsed}
            settings = handler({name: value for name, value in values.items() if name not in bad})
        unparsed.sort(key=lambda detail: _ORDER.get(str(detail["loc"][0]).lower(), 0))
        sentences = [_sentence(detail, values[str(detail["loc"][0])]) for detail in unparsed]
        problems = [*sentences, *refusals.refusals(settings)]
        if problems:
            raise SettingsError("\n".join(problems))
        return settings

    def given(self, field: str) -> bool:
        """Whether somebody set it, be it to its default."""
        return field in self.model_fields_set

    def warnings(self) -> list[str]:
        """A sentence for each thing that was set and does not do what one would think."""
        return list(refusals.warnings(self, frozenset(os.environ)))

    @property
    def redis(self) -> RedisServers | None:
        """None: the embedded store."""
        return parse_redis_servers(self.redis_family) if self.redis_url.get_secret_value() else None

    @property
    def redis_persecond_servers(self) -> RedisServers | None:
        """Where limits per second are counted; None: where all others are."""
        return parse_redis_servers(self.redis_persecond_family) if self.redis_persecond else None

    @property
    def redis_family(self) -> Family:
        return Family(
            prefix="REDIS_",
            url=self.redis_url.get_secret_value(),
            type=self.redis_type if self.given("redis_type") else None,
            # The reference's default, unix, would make host:port an error.
            socket_type=self.redis_socket_type if self.given("redis_socket_type") else None,
            auth=self.redis_auth.get_secret_value(),
            auth_file=self.redis_auth_file,
            sentinel_auth=self.redis_sentinel_auth.get_secret_value(),
            tls=self.redis_tls,
            tls_files=self._redis_tls_files,
        )

    @property
    def redis_persecond_family(self) -> Family:
        return Family(
            prefix="REDIS_PERSECOND_",
            url=self.redis_persecond_url.get_secret_value(),
            type=self.redis_persecond_type if self.given("redis_persecond_type") else None,
            socket_type=self.redis_persecond_socket_type if self.given("redis_persecond_socket_type") else None,
            auth=self.redis_persecond_auth.get_secret_value(),
            auth_file=self.redis_persecond_auth_file,
            sentinel_auth=self.redis_persecond_sentinel_auth.get_secret_value(),
            tls=self.redis_persecond_tls,
            tls_files=self._redis_tls_files,
        )

    @property
    def _redis_tls_files(self) -> RedisTls:
        return RedisTls(
            ca_file=self.redis_tls_cacert,
            certificate_file=self.redis_tls_client_cert,
            key_file=self.redis_tls_client_key,
            check_hostname=not self.redis_tls_skip_hostname_verification,
        )

    @property
    def request_id_s(self) -> int:
        """For how many whole seconds a call that carries an id is counted once."""
        return max(1, round(self.rls_request_id_ttl.total_seconds()))

    @property
    def client_ca(self) -> str:
        """The file with the CA of client certificates; empty: clients need none."""
        return self.grpc_client_tls_cacert or self.grpc_server_tls_ca_cert

    @property
    def stats_sink(self) -> telemetry.Sink:
        """The one place metrics go to beside OTLP; empty: none. The default of USE_STATSD asks for nothing."""
        if self.disable_stats:
            return ""
        if self.use_dog_statsd:
            return "dogstatsd"
        if self.use_prometheus:
            return "prometheus"
        return "statsd" if self.use_statsd and self.given("use_statsd") else ""

    @property
    def otlp_metrics(self) -> Literal["", "http", "grpc"]:
        """By which protocol metrics are sent; empty: not at all."""
        return "" if self.disable_stats else self.rls_otlp_metrics

    @property
    def prometheus_listen(self) -> tuple[str, int]:
        """Host and port."""
        return telemetry.parse_listen_address(self.prometheus_addr)

    @property
    def dog_statsd_mogrifiers(self) -> tuple[mogrifiers.Mogrifier, ...]:
        """In the order they are tried."""
        return mogrifiers.parse_mogrifiers(self.use_dog_statsd_mogrifiers, self._mogrifier_variables)


_ORDER = {variable.field: at for at, variable in enumerate(catalogue.VARIABLES)}


def _sentence(detail: ErrorDetails, given: object) -> str:
    """What is wrong with one value, in our words; the value is quoted unless it may be a secret."""
    field = str(detail["loc"][0]).lower()
    name, context = field.upper(), detail.get("ctx", {})
    if field not in Settings.model_fields:
        return f"{name} is not a setting"
    if given == "":
        return f"{name} is set but empty; give it a value or unset it"
    shown = f"{name}={given!r}" if _may_be_shown(field) else name
    match detail["type"]:
        case "value_error":
            return f"{shown} {context['error']}"
        case "greater_than_equal":
            return f"{shown} is too small; the least is {context['ge']}"
        case "greater_than":
            return f"{shown} is too small; it must be more than {context['gt']}"
        case "less_than_equal":
            return f"{shown} is too large; the most is {context['le']}"
        case "literal_error":
            return f"{shown} is not one of the choices; use {context['expected']}"
        case "string_pattern_mismatch":
            return f"{shown} is not a header name; use letters, digits and dashes"
        case _:
            return f"{shown} cannot be used: {detail['msg']}"


def _may_be_shown(field: str) -> bool:
    about = Settings.model_fields[field]
    return about.repr and about.annotation is not SecretStr
