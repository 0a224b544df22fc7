"""The database: what administrators decide, and the record of what was decided."""
