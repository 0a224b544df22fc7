"""The gRPC port. Other packages use `server.GrpcServer`; only this package uses the gRPC library on the server side."""

import os

# The library would write to stderr in its own format, between our log lines. Errors are reported to us anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
