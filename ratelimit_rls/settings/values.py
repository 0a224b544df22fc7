"""All fields of the settings, their sources, and what follows from several fields. Nothing is validated here."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import PrivateAttr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ratelimit_rls.settings import database, groups, mogrifiers, telemetry, unsupported, xds
from ratelimit_rls.settings.redis_address import RedisServers, RedisTls
from ratelimit_rls.settings.redis_servers import RedisVariables, parse_redis_servers


class _Environment(PydanticBaseSettingsSource):
    """Settings source: variables by exact name, as text.

    The source of pydantic-settings would also accept `port` for PORT, and would parse JSON.
    """

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[str | None, str, bool]:
        name = field_name.upper()
        return os.environ.get(name), name, False

    def __call__(self) -> dict[str, str]:
        found = (self.get_field_value(about, field) for field, about in self.settings_cls.model_fields.items())
        return {name: value for value, name, _ in found if value is not None}


class SettingsValues(
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
    BaseSettings,
):
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=str.upper,
        populate_by_name=True,
        hide_input_in_errors=True,  # pydantic's own errors would quote secrets
        protected_namespaces=(),
    )

    # Variables without fields: their names depend on the value of another variable.
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

    def given(self, field: str) -> bool:
        """Return whether a field was set explicitly, even to its default."""
        return field in self.model_fields_set

    @property
    def redis(self) -> RedisServers | None:
        """Redis servers for the counters; None: the embedded store is used."""
        return parse_redis_servers(self.redis_family) if self.redis_url.get_secret_value() else None

    @property
    def redis_persecond_servers(self) -> RedisServers | None:
        """Redis servers for limits per second; None: the same as for all others."""
        return parse_redis_servers(self.redis_persecond_family) if self.redis_persecond else None

    @property
    def redis_family(self) -> RedisVariables:
        return RedisVariables(
            prefix="REDIS_",
            url=self.redis_url.get_secret_value(),
            type=self.redis_type if self.given("redis_type") else None,
            # With the default of envoyproxy/ratelimit, unix, host:port would be an error.
            socket_type=self.redis_socket_type if self.given("redis_socket_type") else None,
            auth=self.redis_auth.get_secret_value(),
            auth_file=self.redis_auth_file,
            sentinel_auth=self.redis_sentinel_auth.get_secret_value(),
            tls=self.redis_tls,
            tls_files=self._redis_tls_files,
        )

    @property
    def redis_persecond_family(self) -> RedisVariables:
        return RedisVariables(
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
        """Whole seconds for which a request id is remembered."""
        return max(1, round(self.rls_request_id_ttl.total_seconds()))

    @property
    def client_ca(self) -> str:
        """File with the CA of client certificates; empty: none are required."""
        return self.grpc_client_tls_cacert or self.grpc_server_tls_ca_cert

    @property
    def grpc_requires_client_certificates(self) -> bool:
        return self.grpc_server_use_tls and bool(self.client_ca)

    @property
    def has_http_token(self) -> bool:
        return bool(self.rls_http_token.get_secret_value() or self.rls_http_token_file)

    @property
    def serves_json(self) -> bool:
        """True if /json is served. By default it is not if gRPC requires client certificates and HTTP nothing."""
        if self.rls_http_json != "auto":
            return self.rls_http_json == "on"
        is_protected = self.has_http_token or self.rls_http_client_cert or bool(self.rls_http_uds)
        return is_protected or not self.grpc_requires_client_certificates

    @property
    def socket_mode(self) -> int | None:
        """Permissions of Unix sockets; None: determined by the umask."""
        return int(self.rls_grpc_uds_mode, 8) if self.rls_grpc_uds_mode else None

    @property
    def stats_sink(self) -> telemetry.Sink:
        """Metrics sink besides OTLP; empty: none. USE_STATSD has an effect only if it is set explicitly."""
        if self.disable_stats:
            return ""
        if self.use_dog_statsd:
            return "dogstatsd"
        if self.use_prometheus:
            return "prometheus"
        return "statsd" if self.use_statsd and self.given("use_statsd") else ""

    @property
    def otlp_metrics(self) -> Literal["", "http", "grpc"]:
        """OTLP protocol for metrics; empty: do not send any."""
        return "" if self.disable_stats else self.rls_otlp_metrics

    @property
    def prometheus_listen(self) -> tuple[str, int]:
        """Host and port of the Prometheus endpoint."""
        return telemetry.parse_listen_address(self.prometheus_addr)

    @property
    def dog_statsd_mogrifiers(self) -> tuple[mogrifiers.Mogrifier, ...]:
        """Mogrifiers, in the order they are tried."""
        return mogrifiers.parse_mogrifiers(self.use_dog_statsd_mogrifiers, self._mogrifier_variables)
