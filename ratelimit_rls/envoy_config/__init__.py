"""Generator of Envoy configuration for rules: the implementation of the command `envoy-config`.

    rules ─► paths of keys ─► descriptors that Envoy can send ─► typed messages ─► documents
                                   ▲
    mapping: where the value of each key comes from

Everything is pure, and speed does not matter: nothing here runs in the server. Envoy's API is imported only through
api.py, which takes half a second, so that reading rules and mappings does not need it.
"""
