"""Rules from an xDS management server, over one aggregated discovery stream."""
