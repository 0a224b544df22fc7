"""Who is calling: credentials checked, and how each caller stands."""
