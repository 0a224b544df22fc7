"""Request and response bodies of the admin API."""
