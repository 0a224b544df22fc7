"""The database: accounts, stored rules, tokens and audit rows, and recorded decisions and usage."""
