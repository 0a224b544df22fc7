"""Envoy's rate limit service (RLS v3), with Kuadrant's variants of it."""
