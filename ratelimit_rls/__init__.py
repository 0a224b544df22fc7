"""Rate limit service for Envoy, compatible with envoyproxy/ratelimit."""

__version__ = "0.1.0"
