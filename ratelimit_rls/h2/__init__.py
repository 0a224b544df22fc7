"""Server side of HTTP/2 for gRPC, without I/O and without a clock. README.md has its rules and an example."""
