"""The Envoy side of a rules file, as the command `envoy-config` writes it.

    rules ─► shapes ─► descriptors that Envoy can make ─► typed messages ─► documents
                            ▲
    mapping: where the value of each key comes from

Pure from end to end, and free to be slow: nothing here runs in the server. Envoy's API is imported through api.py,
which takes half a second, so whoever only reads rules and mappings does without.
"""
