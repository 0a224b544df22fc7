"""Protocols: gRPC over HTTP/2, and HTTP/1.1. This package moves bytes and decides nothing."""
