"""Authentication of callers by API keys and JSON Web Tokens, and the directory of their entitlements."""
