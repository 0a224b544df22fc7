"""The rate limit service that Envoy asks before it lets a request through."""

__version__ = "0.1.0"
