"""Envoy's external authorization (ext_authz): a mapping in the rules builds descriptors from the request."""
