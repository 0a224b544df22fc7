"""Metrics, traces, logs and usage recording, fed from finished decisions."""
