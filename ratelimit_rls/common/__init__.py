"""Building blocks that know nothing of rate limits: back-off, a bounded cache and timers."""
