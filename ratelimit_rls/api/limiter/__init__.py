"""RateLimiter: our own gRPC API, for applications without Envoy."""
