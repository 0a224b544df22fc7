"""The one place that knows a gRPC library. `server.GrpcServer` is what the rest of the house sees."""
