"""The database: accounts, stored rules, tokens and audit entries, and recorded decisions and usage."""
