"""Metrics exporters, as configured: Prometheus, statsd or DogStatsD, and OTLP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ratelimit_rls.server.http_ports import HttpPorts
from ratelimit_rls.server.worker_stats import WorkerStats
from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.collector import distributions
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.otlp import OtlpMetrics, new_otlp_metrics
from ratelimit_rls.telemetry.prometheus import new_prometheus_text
from ratelimit_rls.telemetry.series import Collected
from ratelimit_rls.telemetry.statsd import StatsdSink, new_statsd_sink
from ratelimit_rls.transport.http.prometheus_endpoint import metrics_app
from ratelimit_rls.transport.http.server import HttpServer


class MetricsExporters:
    """Exports metrics.

    A scrape of any worker returns those of all workers; pushed metrics are sent by each worker itself.
    """

    def __init__(self, settings: Settings, metrics: Metrics, worker_stats: WorkerStats, ports: HttpPorts) -> None:
        """Construct the configured exporters. Raises SettingsError if a mapping file or a setting is unusable."""
        self._settings = settings
        self._worker_stats = worker_stats
        self._prometheus_text = new_prometheus_text(settings)
        self._prometheus: HttpServer | None = None
        if settings.stats_sink == "prometheus":
            self._prometheus = ports.metrics(metrics_app(settings.prometheus_path, self.scrape))
        statsd = new_statsd_sink(settings, self._own_names, lambda: dict(distributions(metrics)), worker_stats.stats)
        otlp = new_otlp_metrics(settings, self._own_series)
        self._sinks: list[StatsdSink | OtlpMetrics] = [sink for sink in (statsd, otlp) if sink is not None]
        self._sending: list[asyncio.Task[None]] = []

    async def _own_names(self) -> Iterable[tuple[str, int]]:
        return (await self._worker_stats.collect_own()).names.items()

    async def _own_series(self) -> Collected:
        return (await self._worker_stats.collect_own()).series

    async def scrape(self) -> Iterable[bytes]:
        metrics = await self._worker_stats.collect_all()
        return self._prometheus_text.pieces(metrics.series, metrics.names.items())

    async def start(self) -> None:
        """Start the exporters. Raises SettingsError if the Prometheus port cannot be bound."""
        self._sending = [asyncio.create_task(sink.run()) for sink in self._sinks]
        if self._prometheus is not None:
            host, port = self._settings.prometheus_listen
            await self._prometheus.start(host, port, reuse_port=self._settings.rls_workers > 1)

    async def close(self) -> None:
        """Stop the exporters. Pending metrics are flushed, within a time limit."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await asyncio.gather(*(sink.close() for sink in self._sinks))
        if self._prometheus is not None:
            await self._prometheus.stop()
