"""What the service tells of itself: counters and logs, written from finished decisions."""
