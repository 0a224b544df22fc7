"""The two HTTP ports: `json` for callers without gRPC, `ops` for people."""
