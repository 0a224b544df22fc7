"""What `make bench` runs: how much CPU a decision costs, beside what the transport costs alone."""
