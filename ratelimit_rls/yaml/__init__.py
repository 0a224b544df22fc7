"""YAML with positions: text to nodes (parser.py), and nodes to typed values (strict_mapping.py)."""
