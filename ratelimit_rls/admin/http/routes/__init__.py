"""The routes of the admin API."""
