"""Administration: what an administrator can do, for HTTP (admin/http), gRPC (`ResetLimit`) and the CLI alike."""
