"""Where metrics go, as the settings say: to whoever scrapes them, to statsd or DogStatsD, by OTLP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ratelimit_rls.server.siblings import Siblings
from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.collect import distributions
from ratelimit_rls.telemetry.collected import Collected
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.otlp import OtlpMetrics, new_otlp_metrics
from ratelimit_rls.telemetry.prometheus import new_prometheus_text
from ratelimit_rls.telemetry.statsd import StatsdSink, new_statsd_sink
from ratelimit_rls.transport.http.metrics import metrics_app
from ratelimit_rls.transport.http.server import HttpServer


class Exports:
    """Of several workers, whichever is scraped tells of all; what is sent, each sends for itself."""

    def __init__(self, settings: Settings, metrics: Metrics, siblings: Siblings) -> None:
        """Raises SettingsError if something they are made by cannot be used."""
        self._settings = settings
        self._siblings = siblings
        self._prometheus_text = new_prometheus_text(settings)
        self._prometheus: HttpServer | None = None
        if settings.stats_sink == "prometheus":
            self._prometheus = HttpServer(metrics_app(settings.prometheus_path, self.scrape))
        statsd = new_statsd_sink(settings, self._names_here, lambda: dict(distributions(metrics)), siblings.stats)
        otlp = new_otlp_metrics(settings, self._series_here)
        self._sinks: list[StatsdSink | OtlpMetrics] = [sink for sink in (statsd, otlp) if sink is not None]
        self._sending: list[asyncio.Task[None]] = []

    async def _names_here(self) -> Iterable[tuple[str, int]]:
        return (await self._siblings.told_here()).names.items()

    async def _series_here(self) -> Collected:
        return (await self._siblings.told_here()).series

    async def scrape(self) -> Iterable[bytes]:
        told = await self._siblings.told()
        return self._prometheus_text.pieces(told.series, told.names.items())

    async def start(self) -> None:
        """Raises SettingsError if the port cannot be used."""
        self._sending = [asyncio.create_task(sink.run()) for sink in self._sinks]
        if self._prometheus is not None:
            host, port = self._settings.prometheus_listen
            await self._prometheus.start(host, port, reuse_port=self._settings.rls_workers > 1)

    async def close(self) -> None:
        """What was not sent yet is sent now, within a bound."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await asyncio.gather(*(sink.close() for sink in self._sinks))
        if self._prometheus is not None:
            await self._prometheus.stop()
