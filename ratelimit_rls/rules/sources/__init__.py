"""Sources of rules: each can be read as a whole, and signals when to read it again."""
