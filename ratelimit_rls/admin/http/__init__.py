"""The admin API: REST over HTTP for everything that the database keeps (FastAPI)."""
