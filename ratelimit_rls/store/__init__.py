"""Plans in, answers out: the only place where anything is counted."""
