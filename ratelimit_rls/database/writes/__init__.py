"""Changes by administrators: each is one transaction with its audit entry and its change feed row."""
