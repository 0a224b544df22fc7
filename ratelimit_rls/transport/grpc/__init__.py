"""The one place that knows a gRPC library. `server.GrpcServer` is what the rest of the house sees."""

import os

# The library would write lines of its own to stderr, among ours and in another form. What goes wrong, we are told.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
