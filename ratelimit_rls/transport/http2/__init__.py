"""HTTP/2 (RFC 9113) as a gRPC server needs it: frames and header blocks, no sockets."""
