"""YAML text to nodes with positions."""
