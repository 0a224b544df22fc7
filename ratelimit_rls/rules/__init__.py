"""From documents to the tree: everything that happens when rules are loaded, and nothing that happens per request."""
