"""Benchmarks of `make bench`: CPU per decision, compared with the bare transport."""
