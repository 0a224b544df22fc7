"""Stores on Redis: one round trip and one run of the script for every batch of calls."""
