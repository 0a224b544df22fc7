"""A sample measurement, which tests of reports and charts vary."""

from __future__ import annotations

from bench.measure import Measurement

ONE = Measurement(
    calls_per_s=50_000,
    service_us=20,
    redis_us=0,
    load_us=8,
    answers_per_read=4,
    service_share=1,
    load_share=0.4,
    others_on_service_core=0,
    others_on_load_core=0,
)
