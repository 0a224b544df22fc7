"""Changes by administrators: each is one transaction with its audit row and its change feed row."""
